"""Pages as files: tables, figures, and what they need."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from shutil import which
from xml.etree import ElementTree

import pytest
from page_data import panels_of, timelines_of

from zbpp.core import Costs, RequestError, Slot
from zbpp.planning import plan
from zbpp.simulator import (
    PageEntry,
    simulate,
    step_time,
    write_page,
)

COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3, memory_limit=5)


@pytest.fixture
def page_text(tmp_path):
    """Write a page and return its text."""

    def write(entries, **options):
        write_page(entries, tmp_path / "x.html", **options)
        return (tmp_path / "x.html").read_text(encoding="utf-8")

    return write


def entry_of(mode, **more):
    costs = more.pop("costs", COSTS)
    schedule = plan(mode, n_stages=3, n_microbatches=5)
    timeline = simulate(schedule, costs)
    return PageEntry(
        name=mode, schedule=schedule, simulated=timeline, costs=costs, **more
    )


def measured(timeline, by=0.4):
    """As a run would measure it: later, and every time a little shorter."""
    rows = tuple(
        tuple(
            Slot(slot.job, 1e4 + slot.start, 1e4 + slot.end - by * random.random())
            for slot in row
        )
        for row in timeline.rows
    )
    return replace(timeline, rows=rows)


def cells(text):
    """The table's rows: cells by the titles of their columns, and if it is bold."""
    root = ElementTree.fromstring(re.search(r"<table>.*?</table>", text, re.S)[0])
    titles = ["".join(th.itertext()) for th in root.find("thead").iter("th")]
    for row in root.find("tbody"):
        values = ["".join(cell.itertext()) for cell in row]
        yield dict(zip(titles, values, strict=False)), row.get("class") == "bold"


def test_the_table_has_the_figures_and_the_best_is_bold(page_text):
    figures = {"tokens/s": 1234.5, "note": "<&>"}
    entries = [
        entry_of("1F1B"),
        entry_of("ZBV", gap=0.25, figures=figures),
        PageEntry(name="VPP", reason="needs memory 9 & more; take less"),
    ]
    text = page_text(entries, time_unit="ms")
    (base, slow), (fast, best), (none, _) = cells(text)
    assert (slow, best) == (False, True)
    steps = [step_time(entry.simulated) for entry in entries[:2]]
    found = [float(row["step, ms"]) for row in (base, fast)]
    assert found == pytest.approx(steps, rel=1e-5)
    assert fast["speed-up over 1F1B"] == f"{steps[0] / steps[1]:.3f}"
    assert fast["gap to the bound"] == "25.00%" and base["gap to the bound"] == ""
    assert (fast["tokens/s"], fast["note"]) == ("1234.5", "<&>")
    assert (base["chunks a stage"], fast["chunks a stage"]) == ("1", "2")
    assert (base["peak memory"], base["memory limit"]) == ("3", "5")
    assert list(none.values()) == ["VPP", "needs memory 9 & more"]
    assert "bubble measured" not in base
    notes = ["gap: span over" in page for page in (text, page_text(entries[:1]))]
    assert notes == [True, False]


def test_measured_figures_appear_with_measured_timelines(page_text):
    one = entry_of("ZBH1")
    run = replace(one, measured=measured(one.simulated))
    text = page_text([run])
    simulated, measurements = (panel for _, panel in panels_of(text))
    assert "</b> simulated" in simulated and "</b> measured" in measurements
    ratios = re.search(r"simulated: F (\S+), B (\S+), W (\S+),", measurements)
    for kind, ratio in zip("FBW", ratios.groups(), strict=True):
        times = [
            sum(s.duration for row in t.rows for s in row if s.job.kind == kind)
            for t in (run.measured, run.simulated)
        ]
        assert float(ratio) == pytest.approx(times[0] / times[1], abs=6e-4)
    exact = replace(one, measured=measured(one.simulated, 0.0), step_measured=200.0)
    ((row, _),) = cells(page_text([exact]))
    assert row["step measured"] == "200"
    assert row["bubble measured"] == row["bubble simulated"]
    assert row["measured / simulated"] == f"{200 / step_time(one.simulated):.3f}"
    ((row, _),) = cells(page_text([replace(exact, bubble_measured=0.125)]))
    assert row["bubble measured"] == "12.50%", "that of several steps"


@pytest.mark.needs("matplotlib")
def test_a_page_has_charts_where_there_is_something_to_compare(page_text):
    entries = [entry_of(mode) for mode in ("1F1B", "ZBH1", "auto")]
    series = {"1F1B": [(4, 0.5), (8, 0.25)]}
    texts = page_text(entries, by_microbatches=series)
    assert "peak memory of a stage (M_B)" in texts and "micro-batches in a" in texts
    assert "peak memory of a stage" in page_text(entries)
    assert "micro-batches in a" in page_text(entries[:1], by_microbatches=series)
    assert "bubble rate (%)" not in page_text(entries[:2])
    assert len(panels_of(texts)) == 3


def test_a_page_without_matplotlib_says_what_its_charts_need(page_text, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page_text([entry_of(mode) for mode in ("1F1B", "ZBH1", "auto")])
    assert "No charts: pictures need matplotlib" in text and "zbpp[viz]" in text
    assert len(panels_of(text)) == 3


def test_a_page_needs_nothing_else_and_tells_its_command(page_text):
    text = page_text([entry_of("ZBV")], command="zbpp show ZBV --out 'x y.html'")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    text += timelines_of(text)
    assert "import(" not in text and "fetch(" not in text
    links = set(re.findall(r"https?://[^\"' ]+", text))
    assert links <= {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}
    assert text.count('ui.perfetto.dev";') <= 1, "only a click opens it"
    assert "zbpp show ZBV --out &#x27;x y.html&#x27;" in text


@pytest.mark.parametrize("evil", ["</script><b>&", "<!--<script>", "a<!--b-->"])
def test_names_cannot_break_out_of_the_page(page_text, evil):
    text = page_text([replace(entry_of("1F1B"), name=evil, group=evil)], title=evil)
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert "<!--" not in text and "<b>" not in text
    ((name, panel),) = panels_of(text)
    assert name == f"{evil}, {evil}" and panel.count("<b>") == 1


def test_a_page_of_twelve_thousand_boxes_is_small(page_text):
    schedule = plan("ZBH1", n_stages=32, n_microbatches=128)
    timeline = simulate(schedule, COSTS)
    text = page_text([PageEntry(name="x", simulated=timeline, costs=COSTS)])
    assert len(timelines_of(text)) > 400_000 > 200_000 > len(text)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"no/x\.html: cannot be written"):
        write_page([entry_of("1F1B")], tmp_path / "no" / "x.html")


@pytest.mark.skipif(which("node") is None, reason="no node is installed")
def test_the_script_of_a_page_has_no_syntax_error(page_text, tmp_path):
    (script,) = re.findall(
        r"<script>(.*?)</script>", page_text([entry_of("ZBV")]), re.S
    )
    for code, wrong in ((script, 0), (script.replace(");", ";", 1), 1)):
        (tmp_path / "x.js").write_text(code, encoding="utf-8")
        check = ["node", "--check", str(tmp_path / "x.js")]
        assert subprocess.run(check, capture_output=True).returncode == wrong
