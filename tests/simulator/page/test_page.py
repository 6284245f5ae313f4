"""The page as a file: what is in it, read back, equals what it was written from.

That every job stands on a page, `test_media.py` tests.
"""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from shutil import which
from xml.etree import ElementTree

import pytest
from timeline_page import (
    boxes_in,
    boxes_of_timeline,
    columns_of,
    page_data,
    page_text,
    same_boxes,
)

from zbpp.core import Costs, RequestError, Slot
from zbpp.planning import plan
from zbpp.simulator import (
    PageEntry,
    critical_path,
    messages,
    peak_memory,
    simulate,
    step_time,
    write_page,
)
from zbpp.simulator.metrics import memory_by_job

COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3)


def timeline_of(mode, p=3, m=5, costs=COSTS):
    return simulate(plan(mode, n_stages=p, n_microbatches=m), costs)


def shaken(timeline, by=0.4):
    """As a run would measure it: later, and every time a little different."""
    rows = tuple(
        tuple(
            Slot(slot.job, 1e4 + slot.start, 1e4 + slot.end - by * random.random())
            for slot in row
        )
        for row in timeline.rows
    )
    return replace(timeline, rows=rows)


def entry_of(mode, **more):
    schedule = plan(mode, n_stages=3, n_microbatches=5)
    timeline = simulate(schedule, COSTS)
    given = {"costs": replace(COSTS, memory_limit=5)} | more
    return PageEntry(name=mode, schedule=schedule, simulated=timeline, **given)


def test_times_are_not_rounded_away_in_long_timelines():
    """The last job of 1,500 a stage is where it is, to a ten-millionth of a job."""
    timeline = timeline_of("1F1B", 2, 750)
    text = page_text([PageEntry(name="x", simulated=timeline)])
    data = page_data(text)
    found, wanted = boxes_in(data, data["panels"][0]), boxes_of_timeline(timeline)
    assert found[0][-2][1:] == pytest.approx(wanted[0][-2][1:], abs=COSTS.f * 1e-7)
    last = timeline.rows[-1][-1]
    later = Slot(last.job, last.start, last.end * (1 + 1e-5))
    moved = replace(timeline, rows=(timeline.rows[0], (*timeline.rows[1][:-1], later)))
    assert same_boxes(found, wanted)
    assert not same_boxes(found, boxes_of_timeline(moved))  # the control


def test_a_bar_takes_22_bytes_of_a_page():
    """Measured times too, whose last bits cannot be compressed; 64 x 512: 2 MiB."""
    timeline = simulate(plan("ZBH1", n_stages=16, n_microbatches=128), COSTS)
    one = PageEntry(name="x", measured=shaken(timeline), costs=COSTS)
    bare = len(page_text([replace(one, measured=timeline_of("1F1B"))]).encode())
    n_bars = sum(map(len, timeline.rows))
    assert len(page_text([one]).encode()) - bare < 22 * n_bars


def test_simulated_stands_above_measured():
    timeline = timeline_of("ZBH1")
    one = PageEntry(name="ZBH1", simulated=timeline, measured=shaken(timeline))
    text = page_text([one])
    first, second = page_data(text)["panels"]
    assert (first["of"], second["of"]) == ("simulated", "measured")
    ratios = re.search(r"measured / simulated: F (\S+), B (\S+), W (\S+),", text)
    times, errors = one.times_by_kind(), one.errors_by_kind()
    assert set(errors) == {"F", "B", "W"} | (set(errors) & {"O", "V"})
    assert all(0 < time <= 0.4 and start < 1e-6 for time, start in errors.values())
    assert [float(ratio) for ratio in ratios.groups()] == [
        pytest.approx(times[kind][1] / times[kind][0], abs=5e-4) for kind in "FBW"
    ]


def test_memory_messages_and_path_are_those_of_the_simulator():
    costs = replace(COSTS, m_fixed=10, peak_b=3, memory_limit=40)
    one = entry_of("ZBV", costs=costs)
    (panel,) = page_data(page_text([one]))["panels"]
    columns, timeline = columns_of(panel), one.simulated
    held = [pair for row in memory_by_job(timeline, costs) for pair in row]
    assert list(zip(columns["during"], columns["after"], strict=True)) == held
    assert panel["peak"] == max(peak_memory(timeline, costs))
    assert panel["fixed"] == list(costs.on(timeline.placement).fixed)
    assert panel["limit"] == 40
    firsts = [sum(panel["lines"][:stage]) for stage in range(3)]
    assert {
        (target + sender, target)
        for target, sender in enumerate(columns["awaits"])
        if sender
    } == {
        tuple(firsts[stage] + index for stage, index in (one.source, one.target))
        for one in messages(timeline)
    }
    path = critical_path(one.schedule, COSTS).slots
    assert [columns["start"][box] for box in panel["path"]] == [
        pytest.approx(slot.start, abs=1e-4) for slot in path
    ]


def cells(text):
    """The table's rows: cells by the titles of their columns."""
    root = ElementTree.fromstring(re.search(r"<table>.*?</table>", text, re.S)[0])
    titles = ["".join(th.itertext()) for th in root.find("thead").iter("th")]
    for row in root.find("tbody"):
        values = ["".join(cell.itertext()) for cell in row]
        yield dict(zip(titles, values, strict=False)), row.get("class") == "bold"


def test_the_table_has_the_figures():
    entries = [
        entry_of("1F1B"),
        entry_of("ZBV", gap=0.25, figures={"tokens/s": 1234.5, "note": "<&>"}),
        PageEntry(name="VPP", reason="needs memory 9 & more; take less"),
    ]
    text = page_text(entries, time_unit="ms")
    (base, slow), (fast, best), (none, _) = cells(text)
    assert (slow, best) == (False, True)
    steps = [step_time(entry.simulated) for entry in entries[:2]]
    assert [float(row["step, ms"]) for row in (base, fast)] == [
        pytest.approx(step, rel=1e-5) for step in steps
    ]
    assert fast["speed-up over 1F1B"] == f"{steps[0] / steps[1]:.3f}"
    assert fast["gap to the bound"] == "25.00%" and base["gap to the bound"] == ""
    assert (fast["tokens/s"], fast["note"]) == ("1234.5", "<&>")
    assert (base["chunks a stage"], fast["chunks a stage"]) == ("1", "2")
    assert (base["peak memory"], base["memory limit"]) == ("3", "5")
    assert list(none.values()) == ["VPP", "needs memory 9 & more"]
    assert "bubble measured" not in base
    assert "gap: span over" in text
    assert "gap: span over" not in page_text(entries[:1])


def test_measured_columns_appear_with_measured_timelines():
    one = entry_of("ZBH1")
    two = replace(one, measured=shaken(one.simulated, 0.0), step_measured=200.0)
    ((row, _),) = cells(page_text([two]))
    assert row["step measured"] == "200"
    assert row["bubble measured"] == row["bubble simulated"]
    assert row["measured / simulated"] == f"{200 / step_time(one.simulated):.3f}"
    ((row, _),) = cells(page_text([replace(two, bubble_measured=0.125)]))
    assert row["bubble measured"] == "12.50%", "that of several steps"


def test_charts_need_matplotlib_and_the_rest_of_the_page_does_not(monkeypatch):
    entries = [entry_of(mode) for mode in ("1F1B", "ZBH1", "auto")]
    series = {"1F1B": [(4, 0.5), (8, 0.25)]}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page_text(entries, by_microbatches=series)
    assert "charts of this page need matplotlib" in text and "data:image" not in text
    assert len(page_data(text)["panels"]) == 3
    assert "matplotlib" not in page_text(entries[:2])
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert "data:image" in page_text(entries)
    assert "data:image" in page_text(entries[:1], by_microbatches=series)
    assert "data:image" not in page_text(entries[:2])


def test_a_page_needs_nothing_else():
    text = page_text([entry_of("ZBV")], command="zbpp show ZBV --out 'x y.html'")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "http" not in text and "import(" not in text and "fetch(" not in text
    assert "zbpp show ZBV --out &#x27;x y.html&#x27;" in text


@pytest.mark.parametrize("evil", ["</script><b>&", "<!--<script>", "a<!--b-->"])
def test_names_cannot_break_out_of_the_page(evil):
    text = page_text([replace(entry_of("1F1B"), name=evil, group=evil)], title=evil)
    before, _, after = re.split(r"(<script .*?</script>)", text, maxsplit=1)
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert "<!--" not in text and "<b>" not in before + after
    (panel,) = page_data(text)["panels"]
    assert panel["name"] == evil


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    write_page([entry_of("1F1B")], tmp_path / "x.html")
    assert page_data((tmp_path / "x.html").read_text(encoding="utf-8"))
    with pytest.raises(RequestError, match=r"no/x\.html: cannot be written"):
        write_page([entry_of("1F1B")], tmp_path / "no" / "x.html")


NAMES = """
const styles = JSON.parse(process.argv[1]).styles;
%s
readTimeline(JSON.parse(process.argv[1]).panels[0]).then((timeline) => {
  const boxes = [...timeline.style.keys()].slice(0, timeline.first[timeline.stages]);
  console.log(JSON.stringify(boxes.map((box) => nameOf(timeline, box))));
});
"""


@pytest.mark.skipif(which("node") is None, reason="no node is installed")
@pytest.mark.parametrize("mode", ["ZBV", "DualPipeV"])
def test_the_scripts_read_the_jobs_of_a_page(tmp_path, mode):
    timeline = timeline_of(mode, costs=Costs(2, 2, 2, fb=5))
    text = page_text([PageEntry(name=mode, simulated=timeline)])
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    for code, wrong in ((script, 0), (script.replace(");", ";", 1), 1)):
        (tmp_path / "x.js").write_text(code, encoding="utf-8")
        check = ["node", "--check", str(tmp_path / "x.js")]
        assert subprocess.run(check, capture_output=True).returncode == wrong
    arrays = script.partition("// Panels of timelines")[0].replace('"use strict";', "")
    run = ["node", "-e", NAMES % arrays, json.dumps(page_data(text))]
    names = json.loads(subprocess.run(run, capture_output=True, check=True).stdout)
    assert names == [str(slot.job) for row in timeline.rows for slot in row]
