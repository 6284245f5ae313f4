"""Pictures, pages and traces hold all boxes of a timeline, whatever jobs there are."""

from itertools import pairwise

import pytest
from moe import moe_costs
from timeline_page import boxes_in, boxes_of_timeline, page_data, page_text, same_boxes

from zbpp.core import Costs, Lane, passes_in
from zbpp.core import lanes_of as lanes_of_job
from zbpp.planning import plan
from zbpp.schedules import add_collectives, lay_out, post_validated
from zbpp.simulator import (
    PageEntry,
    join,
    plot,
    read_trace,
    simulate,
    simulate_iterations,
    trace_events,
    write_trace,
)


def timeline_of(mode, costs, *, p=3, m=6, change=lambda schedule: schedule):
    return simulate(change(plan(mode, n_stages=p, n_microbatches=m)), costs)


def gathered(schedule):
    return add_collectives(schedule, shards=True)


GATHERS = Costs(2, 2, 2, comm=0.25, all_gather=1.5, reduce_scatter=0.7, optimizer=1)
PARTS = moe_costs(0.5, comm=0.25, optimizer=1)
TIMELINES = {
    "passes": timeline_of("ZBV", Costs(18.522, 18.086, 9.337, 0.601, 3.3)),
    "joint passes": timeline_of("VPP", Costs(3, 2, 1, 0.5)),
    "collectives": timeline_of("ZBV", GATHERS, change=gathered),
    "pairs": timeline_of("DualPipeV", Costs(2, 2, 2, comm=0.25, optimizer=1, fb=4.5)),
    "parts": timeline_of("DualPipeV", PARTS, change=lambda x: lay_out(x, PARTS)),
    "sends": timeline_of("1F1B", Costs(comm=2.0, send_occupies=0.5, optimizer=1.0)),
    "iterations": join(
        simulate_iterations(
            post_validated(plan("ZBH2", n_stages=3, n_microbatches=6)),
            Costs(3, 2, 1, 0.5, 2, validation=1),
            3,
        )
    ),
}
everything = pytest.mark.parametrize("name", TIMELINES)


def lanes_of(timeline):
    """Slots by lane and stage: a job is on each of the lanes that it occupies."""
    n, lanes = timeline.placement.n_stages, {}
    for line, row in enumerate((*timeline.rows, *timeline.collectives)):
        for slot in row:
            for lane in lanes_of_job(slot.job):
                place = list(Lane).index(lane), line % n
                lanes.setdefault(place, []).append(slot)
    return lanes


@everything
def test_a_page_holds_every_box(name):
    timeline = TIMELINES[name]
    data = page_data(page_text([PageEntry(name="x", simulated=timeline)]))
    (panel,) = data["panels"]
    boxes = boxes_in(data, panel)
    if timeline.sending:
        jobs = [[box for box in line if "SEND" not in box[0]] for line in boxes]
        assert [len(line) for line in jobs] == [len(row) for row in timeline.rows]
        row, sends = timeline.rows[1], [box for box in boxes[1] if "SEND" in box[0]]
        assert [end for _, _, end in sends] == [
            slot.end for slot in row if timeline.sending_of(slot.job)
        ]
    else:
        assert same_boxes(boxes, boxes_of_timeline(timeline))
    assert panel["stages"] == 3 and len(panel["lines"]) % 3 == 0


@everything
def test_a_trace_holds_every_box_one_at_a_time_on_a_track(name, tmp_path):
    timeline = TIMELINES[name]
    events = [e for e in trace_events(timeline) if e["ph"] == "X"]
    for (lane, stage), slots in lanes_of(timeline).items():
        track = [e for e in events if e["tid"] == 3 * lane + stage]
        jobs = [e for e in track if e["cat"] != "SEND"]
        assert [e["name"] for e in jobs] == [str(slot.job) for slot in slots]
        starts = [slot.start * 1e3 for slot in slots]
        assert [e["ts"] for e in jobs] == pytest.approx(starts, abs=1e-3)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(track))
        ends = [slot.end * 1e3 for slot in slots]
        last = {e["name"].removeprefix("send of "): e["ts"] + e["dur"] for e in track}
        assert [last[e["name"]] for e in jobs][-1] == pytest.approx(ends[-1], abs=1e-2)
    if name != "iterations":
        write_trace(timeline, tmp_path / "x.json")
        (again,) = read_trace(tmp_path / "x.json")
        for row, read in zip(
            lanes_of(timeline).values(), lanes_of(again).values(), strict=True
        ):
            for slot, same in zip(row, read, strict=True):
                assert slot.job == same.job
                assert (slot.start, slot.end) == pytest.approx((same.start, same.end))
        assert again.sending == pytest.approx(timeline.sending)


@everything
def test_a_picture_holds_every_box(name):
    pytest.importorskip("matplotlib")
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    axes, timeline = Figure(figsize=(40, 4)).add_subplot(), TIMELINES[name]
    plot(timeline, axes)
    drawn = [
        path.get_extents()
        for shapes in axes.collections
        if isinstance(shapes, PolyCollection) and shapes.get_gid() != "idle"
        for path in shapes.get_paths()
    ]
    expected = sorted(
        (stage, slot.start, slot.end - timeline.sending_of(slot.job))
        for (_, stage), slots in lanes_of(timeline).items()
        for slot in slots
    )
    sends = sorted(
        (stage, slot.end - timeline.sending_of(slot.job), slot.end)
        for (_, stage), slots in lanes_of(timeline).items()
        for slot in slots
        if timeline.sending_of(slot.job)
    )
    found = sorted((round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in drawn)
    assert found == [pytest.approx(place) for place in sorted(expected + sends)]
    if name in ("passes", "pairs"):  # in the middle, those of both passes of a pair
        places = [(*text.get_position(), text.get_text()) for text in axes.texts]
        assert sorted((round(y), round(x, 6), text) for x, y, text in places) == sorted(
            (stage, round((slot.start + slot.end) / 2, 6), number_of(slot))
            for stage, row in enumerate(timeline.rows)
            for slot in row
        )


def number_of(slot):
    parts = [str(part.microbatch) for part in passes_in(slot.job)]
    return " ".join(parts) or str(slot.job)
