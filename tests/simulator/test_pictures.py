"""Pictures, pages and traces draw all boxes of a timeline, whatever jobs it has."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from moe import moe_costs
from page_data import boxes_in, panels_of

from zbpp.core import Costs, RequestError, lanes_of
from zbpp.planning import plan
from zbpp.schedules import add_collectives, lay_out, post_validated
from zbpp.simulator import (
    PageEntry,
    join,
    memory_over_time,
    messages,
    peak_memory,
    plot,
    simulate,
    simulate_iterations,
    step_time,
    trace_events,
    write_page,
    write_trace,
)

GATHERS = Costs(2, 2, 2, comm=0.25, all_gather=1.5, reduce_scatter=0.7, optimizer=1)
PARTS = moe_costs(0.5, comm=0.25, optimizer=1)


def timeline_of(mode, costs=None, *, p=3, m=6, change=lambda schedule: schedule):
    schedule = plan(mode, n_stages=p, n_microbatches=m)
    return simulate(change(schedule), costs or Costs(optimizer=2))


def validated(n_iterations, costs):
    schedule = post_validated(plan("ZBH2", n_stages=3, n_microbatches=6))
    return join(simulate_iterations(schedule, costs, n_iterations))


def late(timeline):
    """As clocks of measured runs, which start anywhere."""
    return replace(
        timeline,
        rows=tuple(
            tuple(replace(s, start=s.start + 1e4, end=s.end + 1e4) for s in row)
            for row in timeline.rows
        ),
    )


TIMELINES = {
    "passes": timeline_of("ZBV", Costs(18.522, 18.086, 9.337, 0.601, 3.3)),
    "late": late(timeline_of("1F1B")),
    "joint passes": timeline_of("VPP", Costs(3, 2, 1, 0.5)),
    "collectives": timeline_of(
        "ZBV", GATHERS, change=lambda x: add_collectives(x, shards=True)
    ),
    "pairs": timeline_of("DualPipeV", Costs(2, 2, 2, comm=0.25, optimizer=1, fb=4.5)),
    "parts": timeline_of("DualPipeV", PARTS, change=lambda x: lay_out(x, PARTS)),
    "sends": timeline_of("1F1B", Costs(comm=2.0, send_occupies=0.5, optimizer=1.0)),
    "iterations": validated(3, Costs(3, 2, 1, 0.5, 2, validation=1)),
}


# The law: all media have the same boxes.


def boxes_of(timeline):
    """Stage, start, end and name of every box: one on each lane that a job occupies."""
    n_stages, boxes = timeline.placement.n_stages, []
    origin = min(slot.start for line in timeline.lines for slot in line)
    for number, line in enumerate(timeline.lines):
        for slot in line:
            start, end = slot.start - origin, slot.end - origin
            sends = timeline.sending_of(slot.job)
            name = str(getattr(slot.job, "of", slot.job))  # the pass of a part
            for _ in lanes_of(slot.job):
                boxes.append((number % n_stages, start, end - sends, name))
                if sends:
                    boxes.append((number % n_stages, end - sends, end, "send"))
    return boxes


def on_a_page(timeline, path):
    write_page([PageEntry(name="x", simulated=timeline)], path)
    ((_, panel),) = panels_of(path.read_text(encoding="utf-8"))
    return boxes_in(panel)


def in_a_trace(timeline, path):
    write_trace(timeline, path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        (
            event["tid"] % timeline.placement.n_stages,
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
            re.split(r" of |\.", event["name"])[0],
        )
        for event in events
        if event["ph"] == "X"
    ]


def in_a_picture(timeline, path):
    plot(timeline, path.with_suffix(".svg"))
    return boxes_in(path.with_suffix(".svg").read_text(encoding="utf-8"))


def check_boxes(found, expected):
    """Boxes of the same names and stages are at the same times."""
    found, expected = (
        sorted(boxes, key=lambda box: (box[0], box[3], box[1]))
        for boxes in (found, expected)
    )
    assert [box[::3] for box in found] == [box[::3] for box in expected]
    times = [
        [value for box in boxes for value in box[:3]] for boxes in (found, expected)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("name", TIMELINES)
@pytest.mark.parametrize("medium", [on_a_page, in_a_trace, in_a_picture])
def test_every_medium_has_every_box_of_a_timeline(medium, name, tmp_path):
    timeline = TIMELINES[name]
    found = medium(timeline, tmp_path / "file")
    check_boxes(found, boxes_of(timeline))
    with pytest.raises(AssertionError):  # another timeline
        check_boxes(found, boxes_of(replace(timeline, rows=timeline.rows[::-1])))


# Traces.


def test_tracks_of_a_trace_have_one_job_at_a_time_and_the_names_of_stages():
    for timeline in TIMELINES.values():
        events, free = trace_events(timeline), {}
        for event in sorted(
            (e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])
        ):
            assert free.get(event["tid"], 0) <= event["ts"] + 1e-2
            free[event["tid"]] = event["ts"] + event["dur"]
        names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
        assert {"stage 0", "stage 1", "stage 2"} <= set(names)
        assert len(names) == len(free) == (6 if max(free) > 2 else 3)


def test_counters_of_a_trace_are_the_memory_of_the_stages():
    costs = Costs(m_fixed=10, peak_b=3)
    timeline = timeline_of("ZBH1")
    events = [e for e in trace_events(timeline, costs=costs) if e["ph"] == "C"]
    for stage, curve in enumerate(memory_over_time(timeline, costs)):
        mine = [e for e in events if e["name"] == f"memory of stage {stage}"]
        assert [(e["ts"] / 1e3, e["args"]["held"]) for e in mine] == curve


@pytest.mark.parametrize("name", ["passes", "joint passes", "iterations"])
def test_every_arrow_of_a_trace_joins_the_jobs_of_its_message(name):
    timeline = TIMELINES[name]
    events = [e for e in trace_events(timeline) if e["ph"] in "sf"]
    sent = list(messages(timeline))
    assert len(events) == 2 * len(sent) > 0
    for number, message in enumerate(sent):
        ends = [e for e in events if e["id"] == f"0.{number}"]
        for end, (stage, index) in zip(
            sorted(ends, key=lambda e: e["ph"], reverse=True),
            (message.source, message.target),
            strict=True,
        ):
            slot = timeline.rows[stage][index]
            assert end["tid"] == stage
            assert slot.start * 1e3 - 1e-2 <= end["ts"] < slot.end * 1e3 + 1e-2
    half = len(timeline.rows[0]) // 3
    if name == "iterations":  # messages stay within an iteration
        for message in sent:
            assert message.source[1] // half == message.target[1] // half


def test_a_trace_counts_in_microseconds_of_the_unit():
    timeline = timeline_of("ZBH1", Costs(18.522, 18.086, 9.337))
    events = trace_events(timeline, microseconds_per_unit=1e6)
    first = next(event for event in events if event["ph"] == "X")
    assert (first["ts"], first["dur"]) == (0, pytest.approx(18522e3))


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"no/t\.json: cannot be written"):
        write_trace(timeline_of("ZBH1"), tmp_path / "no" / "t.json")


# Pictures.


def texts_of(picture):
    """The texts of a picture's marks; those of boxes by their middles."""
    root = ElementTree.fromstring(picture.svg())
    return [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def shapes_of(picture):
    """Rectangles of the timelines in a picture by the names of their jobs."""
    return {
        shape.labels["name"]: shape
        for area in picture.areas
        for shape in area.shapes
        if getattr(shape, "labels", None)
    }


def test_boxes_have_numbers_and_a_picture_a_title_and_a_legend():
    for timeline in (TIMELINES["pairs"], timeline_of("ZBV", p=4, m=8)):
        texts = texts_of(plot(timeline, costs=Costs()))
        for row in timeline.rows:
            for slot in row:
                job = re.findall(r"(?<=[A-Z])\d+", str(slot.job))
                assert (" ".join(job) or "O") in texts
    assert "ZBV   4 stages, 8 micro-batches" in texts
    assert "bubble rate 0.00 %    peak memory 4 M_B" in texts
    for word in ("F  ", "B  ", "W  ", "O  ", "idle", "lighter:"):
        assert any(text.startswith(word) for text in texts), word
    bare = texts_of(plot(timeline, title=False, legend=False))
    assert not any("stages" in text or "idle" in text for text in bare)
    small = texts_of(plot(timeline, title=False, legend=False, size=(2, 1)))
    assert "7" not in small, "too thin for numbers"


@pytest.mark.parametrize("takes", [0, 1])
def test_a_v_is_a_box_or_a_line_and_no_waste_between_iterations(takes):
    timeline = validated(2, Costs(optimizer=2, validation=takes))
    picture = plot(timeline)
    shapes = shapes_of(picture)
    assert len(shapes["V"].boxes) == len(shapes["O"].boxes) == 3 * 2
    lines = [s for area in picture.areas for s in area.shapes if hasattr(s, "points")]
    assert len(lines) == (0 if takes else 3 * 2)
    assert "idle 0.00 %" in texts_of(picture)
    behind = simulate_iterations(
        plan("ZBH2", n_stages=4, n_microbatches=8), n_iterations=2
    )
    assert f"idle {100 * 6 / 54:.2f} %" in texts_of(plot(join(behind)))


def test_a_pass_of_no_time_is_no_line():
    picture = plot(timeline_of("ZBH1", Costs(w=0)))
    assert all(not hasattr(s, "points") for area in picture.areas for s in area.shapes)


MIB = 2.0**20


@pytest.mark.parametrize(
    ("costs", "peak"),
    [
        (Costs(memory_limit=5), "4 M_B"),
        (
            Costs(m_b=MIB, m_w=MIB / 2, m_fixed=10 * MIB, memory_limit=20 * MIB),
            "14 MiB",
        ),
    ],
)
def test_memory_over_time_is_drawn_below_in_the_largest_unit(costs, peak):
    timeline = timeline_of("ZBH1", p=4, m=8)
    picture = plot(timeline, costs=costs, time_unit="ms")
    texts = texts_of(picture)
    assert "time (ms)" in texts and peak in texts
    below = picture.areas[-1]
    top = below.view[3]
    curves = [shape for shape in below.shapes if hasattr(shape, "points")]
    *curves, limit = curves
    for shape, curve in zip(curves, memory_over_time(timeline, costs), strict=True):
        amounts = [top - y for _, y in shape.points]
        assert max(amounts) == pytest.approx(max(held for _, held in curve))
        assert amounts[0] == amounts[-1] == costs.m_fixed
    assert {top - y for _, y in limit.points} == {costs.memory_limit}
    assert max(peak_memory(timeline, costs)) < costs.memory_limit


def test_an_svg_is_the_same_each_time_and_has_texts(tmp_path):
    timeline = timeline_of("ZBH1", p=2, m=2)
    plot(timeline, tmp_path / "x.svg")
    first = (tmp_path / "x.svg").read_text()
    plot(timeline, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text() == first
    text = "".join(ElementTree.fromstring(first).itertext())
    assert "2 stages, 2 micro-batches" in text


def test_passes_that_compute_layers_again_have_a_strip():
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    for recompute, extra in ((None, 0), ((True, False, (0,), False), 2)):
        timeline = simulate(replace(schedule, recompute=recompute))
        picture = plot(timeline)
        rows = picture.areas[-1].shapes
        unnamed = [shape for shape in rows if not shape.labels]
        assert len(unnamed) == 1 + extra, "idle, and strips"
        assert ("strip: recomputes" in texts_of(picture)) == bool(extra)


def test_several_timelines_share_their_time_and_a_legend():
    timelines = [timeline_of("1F1B"), timeline_of("ZBV")]
    picture = plot(timelines, size=(3.3, 3.0), font_size=7)
    assert (picture.width, picture.height) == pytest.approx((3.3 * 72, 3 * 72))
    rows = [area for area in picture.areas if area.view != (0, 0, 1, 1)]
    assert [area.view[2] for area in rows] == [max(map(step_time, timelines))] * 2
    assert len({(area.x, area.width) for area in rows}) == 1
    texts = texts_of(picture)
    assert sum(text.startswith("BW") for text in texts) == 1


def test_colours_are_chosen_by_kind():
    timeline = timeline_of("ZBV", Costs())
    plain = shapes_of(plot(timeline))
    chosen = shapes_of(plot(timeline, colors={"F": "#d62728", "idle": "#ffffff"}))
    assert chosen["0F*"].colour == "#d62728"
    assert chosen["0B*"].colour == plain["0B*"].colour
    assert chosen["5F*"].colour not in (plain["5F*"].colour, chosen["0F*"].colour)
    with pytest.raises(RequestError, match=r"colors has 'f'; the kinds are F, B,"):
        plot(timeline, colors={"f": "#d62728"})
    with pytest.raises(RequestError, match="colors has 'red' for F; write #rrggbb"):
        plot(timeline, colors={"F": "red"})


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_matplotlib_draws_the_same_picture_each_time(suffix, tmp_path):
    path, contents = tmp_path / f"x.{suffix}", []
    for font_size in (9, 9, 7):
        plot(TIMELINES["parts"], path, costs=PARTS, font="serif", font_size=font_size)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] != contents[2]
    assert contents[0][:4] in (b"\x89PNG", b"%PDF")
