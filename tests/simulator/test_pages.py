"""Pages as files: tables, charts, and what they need."""

import re
import subprocess
import sys
from dataclasses import replace
from shutil import which
from xml.etree import ElementTree

import pytest
from page_data import panels_of

from zbpp.core import Costs, RequestError
from zbpp.planning import plan
from zbpp.simulator import Table, charts_html, peak_memory, simulate, write_page

COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3, memory_limit=4)


@pytest.fixture
def page_text(tmp_path):
    """Write a page and return its text."""

    def write(timelines, **options):
        write_page(timelines, tmp_path / "x.html", **options)
        return (tmp_path / "x.html").read_text(encoding="utf-8")

    return write


def timeline_of(mode, p=3, m=5):
    return simulate(plan(mode, n_stages=p, n_microbatches=m), COSTS)


def test_a_table_shows_its_cells_or_a_note(page_text):
    table = Table(["mode", "bubble", "step & <more>"], title="T", caption="gap: a < b")
    table.add("1F1B", "20%", "7")
    table.add("ZBV", "5%", "6", look="bold")
    table.add("VPP", note="needs memory 9 & more; take less")
    text = page_text([], above=[table.html()])
    root = ElementTree.fromstring(re.search(r"<table>.*?</table>", text, re.S)[0])
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert rows == [
        ["mode", "bubble", "step & <more>"],
        ["1F1B", "20%", "7"],
        ["ZBV", "5%", "6"],
        ["VPP", "needs memory 9 & more"],
    ]
    looks = [row.get("class") for row in root.find("tbody")]
    assert looks == [None, "bold", None]
    assert root.find("caption").text == "gap: a < b"
    assert not panels_of(text) and "<h2>Timelines" not in text


def test_a_panel_has_the_figures_and_the_memory_of_its_timeline(page_text):
    timelines = [timeline_of("1F1B"), timeline_of("ZBV")]
    first, second = panels_of(page_text(timelines, costs=[COSTS, None]))
    assert (first["name"], second["name"]) == ("1F1B", "ZBV")
    assert re.match(
        r"bubble rate \d+\.\d\d%, peak memory 3 M_B, \S+ from", first["facts"]
    )
    assert "memory" not in second
    memory = first["memory"]
    assert memory["limit"] == 4 and memory["base"] == 0
    peaks = [max(held for _, held in points) for _, points in memory["curves"]]
    assert peaks == peak_memory(timelines[0], COSTS)
    assert [text for _, text in memory["labels"]] == ["0", "3 M_B"]


@pytest.mark.needs("matplotlib")
def test_charts_are_pictures_in_the_colours_of_the_page(page_text):
    points = {"1F1B": (4.0, 0.3), "ZBV": (4.0, 0.05)}
    charts = charts_html(points, {"1F1B": [(4, 0.5), (8, 0.25)]}, limit=5.0)
    text = page_text(timeline_of("1F1B"), above=[charts])
    assert "peak memory of a stage" in text and "micro-batches in a step" in text
    assert "var(--ink)" in charts and "#222222" not in charts
    assert "micro-batches in a step" not in charts_html(points, {})


def test_charts_without_matplotlib_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = charts_html({"1F1B": (4.0, 0.3)}, {})
    assert "No charts: pictures need matplotlib" in text and "zbpp[viz]" in text


def test_a_page_is_self_contained_and_shows_its_command(page_text):
    text = page_text(timeline_of("ZBV"), command="zbpp show ZBV --out 'x y.html'")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "import(" not in text and "fetch(" not in text
    links = set(re.findall(r"https?://[^\"' ]+", text))
    assert links <= {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}
    assert text.count('ui.perfetto.dev";') <= 1, "only a click opens it"
    assert "zbpp show ZBV --out &#x27;x y.html&#x27;" in text


@pytest.mark.parametrize("evil", ["</script><b>&", "<!--<script>", "a<!--b-->"])
def test_names_cannot_break_out_of_the_page(page_text, evil):
    text = page_text(replace(timeline_of("1F1B"), name=evil), title=evil)
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert "<!--" not in text and "<b>" not in text
    (panel,) = panels_of(text)
    assert panel["name"] == evil


def test_a_page_of_twelve_thousand_boxes_is_small(page_text):
    text = page_text(timeline_of("ZBH1", p=32, m=128), costs=COSTS)
    (panel,) = panels_of(text)
    assert sum(len(line["names"]) for line in panel["lines"]) > 12_000
    assert len(text) < 200_000


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"no/x\.html: cannot be written"):
        write_page(timeline_of("1F1B"), tmp_path / "no" / "x.html")


@pytest.mark.skipif(which("node") is None, reason="no node is installed")
def test_the_script_of_a_page_has_no_syntax_error(page_text, tmp_path):
    text = page_text(timeline_of("ZBV"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    for code, wrong in ((script, 0), (script.replace(");", ";", 1), 1)):
        (tmp_path / "x.js").write_text(code, encoding="utf-8")
        check = ["node", "--check", str(tmp_path / "x.js")]
        assert subprocess.run(check, capture_output=True).returncode == wrong
