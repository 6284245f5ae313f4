"""The page as a file: what is in it, read back, equals what it was written from."""

import json
import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from zbpp.core import Costs, MemoryModel, Pass, RequestError, Slot
from zbpp.modes import MODES, plan
from zbpp.schedules import post_validated
from zbpp.simulator import (
    join,
    memory_over_time,
    messages,
    peak_memory,
    simulate,
    simulate_iterations,
    step_time,
)
from zbpp.simulator.page import (
    PageEntry,
    decode,
    page_data,
    page_text,
    write_page,
)
from zbpp.simulator.page.columns import read_columns
from zbpp.simulator.page.table import modes_table

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
    given = {"memory": MemoryModel(limit=5), "costs": COSTS} | more
    return PageEntry(name=mode, schedule=schedule, simulated=timeline, **given)


@pytest.mark.parametrize("mode", MODES)
def test_a_page_holds_every_timeline_to_the_last_bit(mode):
    timeline = timeline_of(mode)
    for one in (timeline, shaken(timeline)):
        text = page_text([PageEntry(name=mode, simulated=one, memory=MemoryModel())])
        (panel,) = page_data(text)["panels"]
        assert decode(panel, one.name) == one
    last = timeline.rows[-1][-1]
    moved = Slot(last.job, last.start, last.end * (1 + 2**-52))
    rows = (*timeline.rows[:-1], (*timeline.rows[-1][:-1], moved))
    assert decode(panel, timeline.name) != replace(timeline, rows=rows)


def test_several_iterations_with_checks_are_kept():
    schedule = post_validated(plan("ZBH2", n_stages=2, n_microbatches=4))
    twice = join(simulate_iterations(schedule, COSTS, 3))
    (panel,) = page_data(page_text([PageEntry(name="x", simulated=twice)]))["panels"]
    assert decode(panel, twice.name) == twice
    assert panel["fixed"] is None


def test_simulated_stands_above_measured():
    timeline = timeline_of("ZBH1")
    measured = shaken(timeline)
    one = PageEntry(name="ZBH1", simulated=timeline, measured=measured)
    text = page_text([one])
    first, second = page_data(text)["panels"]
    assert (first["of"], second["of"]) == ("simulated", "measured")
    assert decode(second, "ZBH1") == measured
    ratios = re.search(r"measured / simulated: F (\S+), B (\S+), W (\S+),", text)
    times, errors = one.times_by_kind(), one.errors_by_kind()
    assert set(errors) == {"F", "B", "W"} | (set(errors) & {"O", "V"})
    assert all(0 < time <= 0.4 and start < 1e-6 for time, start in errors.values())
    assert [float(ratio) for ratio in ratios.groups()] == [
        pytest.approx(times[kind][1] / times[kind][0], abs=5e-4) for kind in "FBW"
    ]


def test_memory_and_messages_are_those_of_the_simulator():
    memory = MemoryModel(m_fixed=10, peak_b=3, limit=40)
    one = entry_of("ZBV", memory=memory)
    (panel,) = page_data(page_text([one]))["panels"]
    columns = read_columns(panel)
    held = [x for curve in memory_over_time(one.simulated, memory) for x in curve]
    assert max(columns["during"]) == max(h for _, h in held) == panel["peak"]
    assert panel["peak"] == max(peak_memory(one.simulated, memory))
    assert panel["fixed"] == list(memory.on(one.simulated.placement).fixed)
    assert panel["limit"] == 40
    firsts = [sum(panel["jobs"][:stage]) for stage in range(3)]
    found = {
        (target + source, target)
        for target, source in enumerate(columns["source"])
        if source
    }
    assert found == {
        tuple(firsts[stage] + index for stage, index in (one.source, one.target))
        for one in messages(one.simulated)
    }


def cells(text):
    """The table's rows: cells by the titles of their columns."""
    (table,) = re.findall(r'<table class="modes">.*?</table>', text, re.S)
    root = ElementTree.fromstring(table.replace("class=best", 'class="best"'))
    titles = ["".join(th.itertext()) for th in root.find("thead").iter("th")]
    for row in root.find("tbody"):
        values = ["".join(cell.itertext()) for cell in row]
        yield dict(zip(titles, values, strict=False)), row.get("class") == "best"


def test_the_table_has_the_figures():
    entries = [
        entry_of("1F1B"),
        entry_of("ZBV", gap=0.25, figures={"tokens/s": 1234.5, "note": "<&>"}),
        PageEntry(name="VPP", reason="needs memory 9 & more"),
    ]
    rows = list(cells(page_text(entries, time_unit="ms")))
    (base, slow), (fast, best), (none, _) = rows
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


def test_measured_columns_appear_with_measured_timelines():
    one = entry_of("ZBH1")
    two = replace(one, measured=shaken(one.simulated, 0.0), step_measured=200.0)
    ((row, _),) = cells(page_text([two]))
    assert row["step measured"] == "200"
    assert row["bubble measured"] == row["bubble simulated"]
    assert row["measured / simulated"] == f"{200 / step_time(one.simulated):.3f}"


def test_charts_name_every_mode_and_ring_the_chosen_one():
    entries = [entry_of(mode) for mode in ("1F1B", "ZBH1", "auto")]
    series = {"1F1B": [(4, 0.5), (8, 0.25)], "ZBH1": [(4, 0.2), (8, 0.1)]}
    text = page_text(entries, by_microbatches=series)
    scatter, lines = re.findall(r"<svg.*?</svg>", text, re.S)
    drawn = ElementTree.fromstring(scatter)
    names = {n for t in drawn.iter("text") for n in (t.text or "").split(", ")}
    assert {"1F1B", "ZBH1", "auto"} <= names
    (ring,) = (c for c in drawn.iter("circle") if c.get("class") == "ring")
    dots = [c for c in drawn.iter("circle") if c.get("class") == "dot"]
    (own,) = (c for c in dots if "auto" in "".join(c.itertext()))
    assert (ring.get("cx"), ring.get("cy")) == (own.get("cx"), own.get("cy"))
    heights = {dot.get("cy") for dot in dots}
    assert len(heights) == len({round(e.bubble, 6) for e in entries})
    assert len(ElementTree.fromstring(lines).findall("polyline")) == 2
    assert "<svg" not in page_text(entries[:2])


def test_a_page_needs_nothing_else():
    text = page_text([entry_of("ZBV")], command="zbpp plot ZBV --out 'x y.html'")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "http" not in text and "import(" not in text and "fetch(" not in text
    assert "zbpp plot ZBV --out &#x27;x y.html&#x27;" in text


@pytest.mark.parametrize("evil", ["</script><b>&", "<!--<script>", "a<!--b-->"])
def test_names_cannot_break_out_of_the_page(evil):
    text = page_text([replace(entry_of("1F1B"), name=evil, group=evil)], title=evil)
    before, _, after = re.split(r"(<script .*?</script>)", text, maxsplit=1)
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert "<!--" not in text and "<b>" not in before + after
    (panel,) = page_data(text)["panels"]
    assert panel["name"] == evil
    with pytest.raises(RequestError, match="holds no page"):
        page_data("<html></html>")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    write_page([entry_of("1F1B")], tmp_path / "x.html")
    assert page_data((tmp_path / "x.html").read_text(encoding="utf-8"))
    with pytest.raises(RequestError, match=r"no/x\.html: cannot be written"):
        write_page([entry_of("1F1B")], tmp_path / "no" / "x.html")


def test_equal_pages_have_equal_bytes():
    assert page_text([entry_of("ZBV")]) == page_text([entry_of("ZBV")])


@pytest.mark.slow
def test_98304_bars_take_less_than_2_mib():
    """Measured times too, whose last bits cannot be compressed."""
    schedule = plan("ZBH1", n_stages=64, n_microbatches=512, effort="fast")
    timeline = simulate(schedule, COSTS)
    bars = sum(isinstance(s.job, Pass) for row in timeline.rows for s in row)
    assert bars == 98_304
    two = PageEntry(name="x", simulated=timeline, measured=shaken(timeline))
    text = page_text([replace(two, memory=MemoryModel(), costs=COSTS)])
    assert len(text.encode()) < 2 * 2**20
    plain = json.dumps([[str(s.job), s.start, s.end] for r in timeline.rows for s in r])
    assert len(plain) > 2 * 2**20


def test_a_bubble_of_several_steps_is_shown_in_place_of_the_last_one() -> None:
    timeline = simulate(plan("1F1B", n_stages=2, n_microbatches=3))
    last = modes_table([PageEntry(name="x", measured=timeline)])
    median = modes_table(
        [PageEntry(name="x", measured=timeline, bubble_measured=0.125)]
    )
    assert "<td>25.00%</td>" in last and "<td>12.50%</td>" not in last
    assert "<td>12.50%</td>" in median and "<td>25.00%</td>" not in median


def test_a_table_explains_only_the_columns_that_it_has() -> None:
    timeline = simulate(plan("1F1B", n_stages=2, n_microbatches=3))
    without = modes_table([PageEntry(name="x", simulated=timeline)])
    assert "bubble: (longest span" in without and "gap: span over" not in without
    assert "gap: span over" in modes_table(
        [PageEntry(name="x", simulated=timeline, gap=0.1)]
    )
