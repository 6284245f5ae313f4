"""Pictures, pages and traces draw all boxes of a timeline, whatever jobs it has."""

import json
import re
import sys
from dataclasses import replace

import pytest
from moe import moe_costs
from page_data import boxes_in, panels_of

from zbpp.core import Costs, RequestError, lanes_of
from zbpp.planning import plan
from zbpp.schedules import add_collectives, lay_out, post_validated
from zbpp.simulator import (
    join,
    memory_over_time,
    peak_memory,
    plot,
    plot_comparison,
    simulate,
    simulate_iterations,
    step_time,
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
        slots=tuple(
            tuple(replace(s, start=s.start + 1e4, end=s.end + 1e4) for s in row)
            for row in timeline.slots
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
    "parts": timeline_of(
        "DualPipeV", PARTS, change=lambda x: lay_out(x, PARTS.on(x.placement))
    ),
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
            name = str(getattr(slot.job, "of", slot.job))  # the pass of a part
            for _ in lanes_of(slot.job):
                boxes.append((number % n_stages, start, end, name))
    return boxes


def on_a_page(timeline, path):
    write_page(timeline, path)
    (panel,) = panels_of(path.read_text(encoding="utf-8"))
    return boxes_in(panel)


def events_of(timeline, path, phase, **options):
    write_trace(timeline, path, **options)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event["ph"] in phase]


def in_a_trace(timeline, path):
    return [
        (
            event["tid"] % timeline.placement.n_stages,
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
            re.split(r" of |\.", event["name"])[0],
        )
        for event in events_of(timeline, path, "X")
    ]


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
@pytest.mark.parametrize("medium", [on_a_page, in_a_trace])
def test_every_format_has_every_box_of_a_timeline(medium, name, tmp_path):
    timeline = TIMELINES[name]
    found = medium(timeline, tmp_path / "file")
    check_boxes(found, boxes_of(timeline))
    with pytest.raises(AssertionError):  # another timeline
        check_boxes(found, boxes_of(replace(timeline, slots=timeline.slots[::-1])))


# Traces.


def test_tracks_of_a_trace_have_one_job_at_a_time_and_the_names_of_stages(tmp_path):
    for timeline in TIMELINES.values():
        events, free = events_of(timeline, tmp_path / "t.json", "XM"), {}
        for event in sorted(
            (e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])
        ):
            assert free.get(event["tid"], 0) <= event["ts"] + 1e-2
            free[event["tid"]] = event["ts"] + event["dur"]
        names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
        assert {"stage 0", "stage 1", "stage 2"} <= set(names)
        assert len(names) == len(free) == (6 if max(free) > 2 else 3)


def test_counters_of_a_trace_are_the_memory_of_the_stages(tmp_path):
    costs = Costs(m_fixed=10, peak_b=3)
    timeline = timeline_of("ZBH1")
    events = events_of(timeline, tmp_path / "t.json", "C", costs=costs)
    for stage, curve in enumerate(memory_over_time(timeline, costs)):
        mine = [e for e in events if e["name"] == f"memory of stage {stage}"]
        assert [(e["ts"] / 1e3, e["args"]["memory"]) for e in mine] == curve


@pytest.mark.parametrize(
    ("name", "edges"),
    [("passes", 4), ("joint passes", 5), ("parts", 4), ("iterations", 3 * 2)],
)
def test_arrows_of_a_trace_join_neighbouring_chunks_of_a_micro_batch(
    name, edges, tmp_path
):
    """Of three stages with one chunk 2 edges, of a V with two 4, of VPP 5."""
    events = events_of(TIMELINES[name], tmp_path / "t.json", "Xsf")
    boxes = [event for event in events if event["ph"] == "X"]
    arrows = [event for event in events if event["ph"] != "X"]
    assert len(arrows) == 2 * 2 * edges * 6
    for start, end in zip(arrows[::2], arrows[1::2], strict=True):
        assert start["id"] == end["id"] and start["tid"] != end["tid"]
        assert start["ts"] < end["ts"]
        chunks, kinds, numbers = zip(
            *map(job_at, (boxes, boxes), (start, end)), strict=True
        )
        assert numbers[0] == numbers[1]
        step = 1 if start["name"] == "activation" else -1
        assert int(chunks[1]) - int(chunks[0]) == step
        assert all(("F" in kind) == (step == 1) for kind in kinds)


def job_at(boxes, end):
    """Chunk, kind and micro-batch of the job that an end of an arrow is bound to."""
    (name,) = (
        box["name"]
        for box in boxes
        if box["tid"] == end["tid"] and box["ts"] <= end["ts"] < box["ts"] + box["dur"]
    )
    return re.match(r"(\d+)([A-Z]+)(\d+)", name).groups()


def test_a_trace_counts_in_microseconds_of_the_unit(tmp_path):
    timeline = timeline_of("ZBH1", Costs(18.522, 18.086, 9.337))
    first, *_ = events_of(timeline, tmp_path / "t", "X", microseconds_per_unit=1e6)
    assert (first["ts"], first["dur"]) == (0, pytest.approx(18522e3))


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"no/t\.json: cannot be written"):
        write_trace(timeline_of("ZBH1"), tmp_path / "no" / "t.json")


# Pictures.


def texts_of(figure):
    """All texts of a figure of matplotlib."""
    texts = [x.get_text() for x in figure.findobj(lambda x: hasattr(x, "get_text"))]
    return [line for text in texts for line in text.split("\n")]


def boxes_of_axes(axes):
    """Stage, start, end and colour of the boxes in a timeline's axes."""
    for line in axes.collections:
        if len(line.get_linewidths()) and line.get_linewidths()[0]:  # 0: idle time
            for path, colour in zip(
                line.get_paths(), line.get_facecolors(), strict=True
            ):
                (start, top), (end, _) = path.vertices[0], path.vertices[2]
                yield int(top), start, end, to_hex(colour)


def to_hex(colour):
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour[:3])


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("name", TIMELINES)
def test_a_figure_has_every_box_of_a_timeline(name):
    timeline = TIMELINES[name]
    found = [(*box, "") for *box, _ in boxes_of_axes(plot(timeline).axes[0])]
    expected = [(*box, "") for *box, _ in boxes_of(timeline)]
    check_boxes(found, expected)
    with pytest.raises(AssertionError):
        check_boxes(found[1:] + found[:1] * 2, expected)


@pytest.mark.needs("matplotlib")
def test_boxes_have_numbers_and_a_picture_a_title_and_a_legend():
    for timeline in (TIMELINES["pairs"], timeline_of("ZBV", p=4, m=8)):
        texts = texts_of(plot(timeline, costs=Costs()))
        for row in timeline.rows:
            for slot in row:
                job = re.findall(r"(?<=[A-Z])\d+", str(slot.job))
                assert (" ".join(job) or "O") in texts
    assert "ZBV   4 stages, 8 micro-batches" in texts
    assert "bubble rate 0.00%, peak memory 4 M_B" in texts
    for word in ("F  ", "B  ", "W  ", "O  ", "idle", "lighter:"):
        assert any(text.startswith(word) for text in texts), word
    small = texts_of(plot(timeline, size=(4, 3)))
    assert "7" not in small, "too thin for numbers"


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("takes", [0, 1])
def test_a_v_is_a_box_or_a_line_and_no_waste_between_iterations(takes):
    timeline = validated(2, Costs(optimizer=2, validation=takes))
    figure, pink = plot(timeline), "#cc79a7"
    widths = {b - a for _, a, b, x in boxes_of_axes(figure.axes[0]) if x == pink}
    assert all(0.05 < width <= 1.0001 for width in widths) and widths
    assert "idle 0.00%" in texts_of(figure)
    behind = simulate_iterations(
        plan("ZBH2", n_stages=4, n_microbatches=8), n_iterations=2
    )
    assert f"idle {6 / 54:.2%}" in texts_of(plot(join(behind)))


@pytest.mark.needs("matplotlib")
def test_a_pass_of_no_time_is_no_line():
    boxes = boxes_of_axes(plot(timeline_of("ZBH1", Costs(w=0))).axes[0])
    assert {b - a for _, a, b, x in boxes if x == "#009e73"} == {0.0}


MIB = 2.0**20


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(
    ("costs", "peak"),
    [
        (Costs(memory_limit=5), "4 M_B"),
        (
            Costs(m_b=MIB, m_w=MIB / 2, m_fixed=10 * MIB, memory_limit=20 * MIB),
            "14.0 MiB",
        ),
    ],
)
def test_memory_over_time_is_drawn_below_in_the_largest_unit(costs, peak):
    timeline = timeline_of("ZBH1", p=4, m=8)
    figure = plot(timeline, costs=costs, time_unit="ms")
    texts = texts_of(figure)
    assert "time (ms)" in texts and peak in texts
    _, *curves, limit = figure.axes[-1].lines
    for line, curve in zip(curves, memory_over_time(timeline, costs), strict=True):
        amounts = line.get_ydata()
        assert max(amounts) == max(held for _, held in curve)
        assert amounts[0] == amounts[-1] == costs.m_fixed
    assert set(limit.get_ydata()) == {costs.memory_limit}
    assert max(peak_memory(timeline, costs)) < costs.memory_limit


@pytest.mark.needs("matplotlib")
def test_passes_that_compute_layers_again_are_darker():
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    for recompute, extra in ((None, 0), ((True, False, (0,), False), 2 * 4)):
        figure = plot(simulate(replace(schedule, recompute=recompute)))
        colours = [colour for *_, colour in boxes_of_axes(figure.axes[0])]
        darker = colours.count("#a16f00") + colours.count("#aa9159")
        assert darker == extra
        assert ("darker: recomputes" in texts_of(figure)) == bool(extra)


@pytest.mark.needs("matplotlib")
def test_several_timelines_share_their_time_and_a_legend():
    timelines = [timeline_of("1F1B"), timeline_of("ZBV")]
    figure = plot(timelines, size=(3.3, 3.0), font_size=7)
    assert tuple(figure.get_size_inches()) == (3.3, 3.0)
    length = max(map(step_time, timelines))
    assert [axes.get_xlim() for axes in figure.axes] == [(0, length)] * 2
    places = [axes.get_position() for axes in figure.axes]
    assert places[0].x0 == places[1].x0 and places[0].x1 == places[1].x1
    (legend,) = figure.legends
    assert sum(text.get_text().startswith("BW") for text in legend.get_texts()) == 1


@pytest.mark.needs("matplotlib")
def test_colours_are_chosen_by_kind():
    timeline = timeline_of("ZBV", Costs())
    plain, chosen = (
        {colour for *_, colour in boxes_of_axes(plot(timeline, colors=colors).axes[0])}
        for colors in (None, {"F": "#d62728", "idle": "#ffffff"})
    )
    assert "#d62728" in chosen - plain
    assert len(chosen - plain) == 2, "F of both chunks of a stage"
    with pytest.raises(RequestError, match=r"colors has 'f'; the kinds are F, B,"):
        plot(timeline, colors={"f": "#d62728"})
    with pytest.raises(RequestError, match="colors has 'red' for F; write #rrggbb"):
        plot(timeline, colors={"F": "red"})


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_file_has_the_same_bytes_each_time(suffix, tmp_path):
    path, contents = tmp_path / f"x.{suffix}", []
    for font_size in (9, 9, 7):
        plot(TIMELINES["parts"], path, costs=PARTS, font="serif", font_size=font_size)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] != contents[2]
    assert contents[0][:4] in (b"\x89PNG", b"%PDF", b"<?xm")


@pytest.mark.needs("matplotlib")
def test_modes_at_one_place_share_a_mark_of_the_charts():
    points = {"1F1B": (4.0, 0.3), "ZBV": (4.0, 0.05), "auto": (4.0, 0.05)}
    series = {"1F1B": [(4, 0.5), (8, 0.25)], "ZBV": [(4, 0.25), (8, 0.1)]}
    figure = plot_comparison(points, series, limit=5.0)
    scatter, lines = figure.axes
    legends = [
        [text.get_text() for text in axes.get_legend().get_texts()]
        for axes in (scatter, lines)
    ]
    assert legends == [["1F1B", "ZBV, auto"], ["1F1B", "ZBV"]]
    *dots, limit = scatter.lines
    assert [tuple(map(float, dot.get_xydata()[0])) for dot in dots] == [(4, 30), (4, 5)]
    assert set(limit.get_xdata()) == {5.0}
    assert list(lines.lines[0].get_ydata()) == [50, 25]
    assert "peak memory of a stage" in texts_of(figure)
    in_bytes = {mode: (2**30 * memory, rate) for mode, (memory, rate) in points.items()}
    (axes,) = plot_comparison(in_bytes, {}).axes
    assert axes.xaxis.get_major_formatter()(4 * 2**30) == "4.00 GiB"


def test_pictures_without_matplotlib_name_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: plot(TIMELINES["passes"]),
        lambda: plot_comparison({"1F1B": (1.0, 0.5)}, {}, tmp_path / "x.svg"),
    ):
        with pytest.raises(RequestError, match=r"pip install 'zbpp\[viz\]'"):
            draw()
