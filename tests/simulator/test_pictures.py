"""Pictures, pages and traces draw all boxes of a timeline, whatever jobs it has."""

import json
import re
from dataclasses import replace
from operator import attrgetter
from xml.etree import ElementTree

import pytest
from moe import moe_costs
from page_data import boxes_in, page_data

from zbpp.core import Costs, RequestError, lanes_of, passes_in
from zbpp.planning import plan
from zbpp.schedules import add_collectives, lay_out, post_validated
from zbpp.simulator import (
    PageEntry,
    join,
    memory_over_time,
    messages,
    peak_memory,
    plot,
    read_trace,
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
    return boxes_in(page_data(path.read_text(encoding="utf-8")))


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
    """Without names: those of boxes are their colours."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(40, 4)).add_subplot()
    plot(timeline, axes)
    shapes = [path for gid, paths in shapes_in(axes) if gid != "idle" for path in paths]
    extents = [shape.get_extents() for shape in shapes]
    return [(round((box.y0 + box.y1) / 2), box.x0, box.x1, "") for box in extents]


def shapes_in(axes):
    from matplotlib.collections import PolyCollection

    return [
        (shapes.get_gid(), shapes.get_paths())
        for shapes in axes.collections
        if isinstance(shapes, PolyCollection)
    ]


def check_boxes(found, expected, *, named=True):
    """Boxes of the same names and stages are at the same times."""
    key = {True: lambda box: (box[0], box[3], box[1]), False: lambda box: box[:3]}
    found, expected = sorted(found, key=key[named]), sorted(expected, key=key[named])
    if named:
        assert [box[::3] for box in found] == [box[::3] for box in expected]
    times = [
        [value for box in boxes for value in box[:3]] for boxes in (found, expected)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-6, abs=1e-4)


@pytest.mark.parametrize("name", TIMELINES)
@pytest.mark.parametrize(
    "medium",
    [
        on_a_page,
        in_a_trace,
        pytest.param(in_a_picture, marks=pytest.mark.needs("matplotlib")),
    ],
)
def test_every_medium_has_every_box_of_a_timeline(medium, name, tmp_path):
    timeline = TIMELINES[name]
    found = medium(timeline, tmp_path / "file")
    check_boxes(found, boxes_of(timeline), named=medium is not in_a_picture)
    with pytest.raises(AssertionError):  # another timeline
        other = replace(timeline, rows=timeline.rows[::-1])
        check_boxes(found, boxes_of(other), named=medium is not in_a_picture)


# Traces.


@pytest.mark.parametrize("name", sorted(TIMELINES.keys() - {"iterations", "late"}))
def test_a_trace_is_read_back(name, tmp_path):
    timeline, path = TIMELINES[name], tmp_path / "x.json"
    write_trace([timeline, TIMELINES["passes"]], path, costs=[None, Costs()])
    found, _ = read_trace(path)
    assert replace(found, rows=(), collectives=(), sending=()) == replace(
        timeline, rows=(), collectives=(), sending=()
    )
    assert found.sending == pytest.approx(timeline.sending)
    for line, expected in zip(found.lines, timeline.lines, strict=True):
        assert [slot.job for slot in line] == [slot.job for slot in expected]
        for at in (attrgetter("start"), attrgetter("end")):
            assert [*map(at, line)] == pytest.approx([*map(at, expected)], abs=1e-3)


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
    assert first["args"] == {"chunk": 0, "microbatch": 0}


def test_files_that_are_no_traces_of_one_step_are_refused(tmp_path):
    path = tmp_path / "t.json"
    write_trace(TIMELINES["iterations"], path)
    with pytest.raises(RequestError, match="not the jobs of one step"):
        read_trace(path)
    path.write_text('{"traceEvents": [{"ph": "X", "pid": 1}]}', encoding="utf-8")
    with pytest.raises(RequestError, match=r"t\.json: no trace that zbpp"):
        read_trace(path)
    with pytest.raises(RequestError, match=r"no/t\.json: cannot be written"):
        write_trace(timeline_of("ZBH1"), tmp_path / "no" / "t.json")


# Pictures by matplotlib.

drawn = pytest.mark.needs("matplotlib")


def numbers_in(axes):
    return sorted((round(t.get_position()[1]), t.get_text()) for t in axes.texts)


@drawn
def test_boxes_have_numbers_and_a_picture_a_title_and_a_legend(tmp_path):
    for timeline in (TIMELINES["pairs"], timeline_of("ZBV", p=4, m=8)):
        axes = plot(timeline, tmp_path / "v.svg", costs=Costs()).axes[0]
        numbers = [
            (stage, " ".join(str(p.microbatch) for p in passes_in(s.job)) or "O")
            for stage, row in enumerate(timeline.rows)
            for s in row
        ]
        assert numbers_in(axes) == sorted(numbers)
    assert axes.get_title("left") == "ZBV   4 stages, 8 micro-batches"
    assert axes.get_title("right") == "bubble rate 0.00 %    peak memory 4 M$_B$"
    labels = [text.get_text().split()[0] for text in axes.get_legend().texts]
    assert labels == ["F", "B", "W", "O", "idle", "lighter:"]
    colours = [patch.get_facecolor() for patch in axes.get_legend().get_patches()]
    assert len(set(colours)) == len(labels)


@drawn
@pytest.mark.parametrize("takes", [0, 1])
def test_a_v_is_a_box_or_a_line_and_no_waste_between_iterations(tmp_path, takes):
    timeline = validated(2, Costs(optimizer=2, validation=takes))
    axes = plot(timeline, tmp_path / "v.svg").axes[0]
    counts = {gid: len(paths) for gid, paths in shapes_in(axes)}
    assert counts["V 0"] == counts["O 0"] == 3 * 2
    lines = [c for c in axes.collections if c.get_gid() == "V instants"]
    assert [len(one.get_segments()) for one in lines] == ([] if takes else [3 * 2])
    assert axes.get_title("right").startswith("idle 0.00 %")
    behind = simulate_iterations(
        plan("ZBH2", n_stages=4, n_microbatches=8), n_iterations=2
    )
    axes = plot(join(behind), tmp_path / "v.svg").axes[0]
    assert axes.get_title("right").startswith(f"idle {100 * 6 / 54:.2f} %")


@drawn
def test_a_pass_of_no_time_is_no_line(tmp_path):
    axes = plot(timeline_of("ZBH1", Costs(w=0)), tmp_path / "w.svg").axes[0]
    assert not any("instants" in str(c.get_gid()) for c in axes.collections)


@drawn
def test_bands_take_the_place_of_boxes_too_thin_to_be_seen(tmp_path):
    """Shares of a row's height; together with what is idle they fill it."""
    timeline = timeline_of("ZBH1", Costs(), p=4, m=300)
    shapes = dict(shapes_in(plot(timeline, tmp_path / "thin.svg").axes[0]))
    assert set(shapes) - {"idle", "O 0"} == {f"{kind} 0 bands" for kind in "FBW"}
    for kind in "FBW":
        corners = shapes[f"{kind} 0 bands"][0].vertices
        busy = sum(s.duration for s in timeline.rows[0] if kind in str(s.job))
        assert area(corners) == pytest.approx(busy * 0.86, rel=0.01)
        middle = [y for x, y in corners if abs(x - busy * 3 / 2) < 5]
        assert max(middle) - min(middle) == pytest.approx(0.86 / 3, abs=0.1)


def area(corners):
    """Of a polygon, by the shoelace formula."""
    following = [*corners[1:], corners[0]]
    pairs = zip(corners, following, strict=True)
    return abs(sum(x * b - a * y for (x, y), (a, b) in pairs)) / 2


MIB = 2.0**20


@drawn
@pytest.mark.parametrize(
    ("costs", "unit", "name", "peak"),
    [
        (Costs(memory_limit=5), 1, "M$_B$", "4 M$_B$"),
        (
            Costs(m_b=MIB, m_w=MIB / 2, m_fixed=10 * MIB, memory_limit=20 * MIB),
            MIB,
            "MiB",
            "14.0 MiB",
        ),
    ],
)
def test_memory_over_time_is_drawn_below_in_the_largest_unit(
    tmp_path, costs, unit, name, peak
):
    timeline = timeline_of("ZBH1", p=4, m=8)
    figure = plot(timeline, tmp_path / "m.svg", costs=costs, time_unit="ms")
    assert figure.axes[0].get_title("right").endswith(f"peak memory {peak}")
    below = figure.axes[1]
    labels = below.get_xlabel(), below.get_ylabel()
    assert labels == ("time (ms)", f"memory ({name})")
    curves = {line.get_label(): line for line in below.lines}
    for stage, curve in enumerate(memory_over_time(timeline, costs)):
        amounts = {*curves[f"stage {stage}"].get_ydata()}
        fixed = costs.m_fixed / unit
        assert amounts == {fixed, *(held / unit for _, held in curve)}
    assert {*below.lines[-1].get_ydata()} == {costs.memory_limit / unit}
    bases = [(base.get_y(), base.get_height()) for base in below.patches]
    assert bases == ([(0, costs.m_fixed / unit)] if costs.m_fixed else [])
    assert max(peak_memory(timeline, costs)) < costs.memory_limit


@drawn
def test_an_svg_is_the_same_each_time_and_has_texts(tmp_path):
    timeline = timeline_of("ZBH1", p=2, m=2)
    plot(timeline, tmp_path / "x.svg")
    first = (tmp_path / "x.svg").read_text()
    plot(timeline, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text() == first
    text = "".join(ElementTree.fromstring(first).itertext())
    assert "2 stages, 2 micro-batches" in text


@drawn
def test_passes_that_compute_layers_again_are_hatched(tmp_path):
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    for recompute, hatched in ((None, set()), ((True, False, (0,), False), {"0", "1"})):
        timeline = simulate(replace(schedule, recompute=recompute))
        axes = plot(timeline, tmp_path / "x.svg", costs=Costs()).axes[0]
        found = {c.get_gid().split()[1] for c in axes.collections if c.get_hatch()}
        assert found == hatched
        text = (tmp_path / "x.svg").read_text()
        assert ("hatched: recomputes" in text) == bool(hatched)


# On a user's axes, for the columns of a paper.


def axes_of(width=6.4, height=4.8, rows=2):
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


@drawn
def test_several_timelines_on_as_many_axes_share_their_time_and_a_legend():
    panels = axes_of()
    timelines = [timeline_of("1F1B"), timeline_of("ZBV")]
    plot(timelines, panels)
    labels = [text.get_text() for text in panels[0].get_legend().texts]
    assert [label.split()[0] for label in labels[:4]] == ["F", "B", "W", "BW"]
    assert panels[1].get_legend() is None
    assert [axes.get_title("left").split()[0] for axes in panels] == ["1F1B", "ZBV"]
    limits = [axes.get_xlim() for axes in panels]
    assert limits == [(0, max(map(step_time, timelines)))] * 2
    for wrong in (panels[0], axes_of(rows=3)):
        with pytest.raises(RequestError, match=r"2 timelines cannot .* [13] axes"):
            plot(timelines, wrong)


@drawn
def test_colours_are_chosen_by_kind():
    from matplotlib.colors import to_hex

    def colours_of(axes):
        pairs = ((one.get_gid(), one.get_facecolor()) for one in axes.collections)
        return {gid: to_hex(colours[0]) for gid, colours in pairs}

    colors = {"F": "tab:red", "W": "0.5", "idle": (1, 1, 1)}
    plain, coloured = (axes_of(rows=1)[0] for _ in range(2))
    timeline = timeline_of("ZBV", Costs())
    plot(timeline, plain)
    plot(timeline, coloured, colors=colors)
    before, after = colours_of(plain), colours_of(coloured)
    found = [after[name] for name in ("F 0", "B 0", "W 0", "idle")]
    assert found == ["#d62728", before["B 0"], "#808080", "#ffffff"]
    assert after["F 1"] not in (before["F 1"], after["F 0"])
    marks = coloured.get_legend().get_patches()[:4]
    assert [to_hex(patch.get_facecolor()) for patch in marks] == found
    with pytest.raises(RequestError, match=r"colors has 'f'; the kinds are F, B,"):
        plot(timeline, plain, colors={"f": "red"})


@drawn
def test_titles_and_legend_fit_a_column_of_a_paper():
    from matplotlib import rc_context
    from matplotlib.text import Text

    with rc_context({"font.size": 8}):
        upper, lower = axes_of(3.3, 3.0)
        plot([timeline_of("1F1B"), timeline_of("ZBH1")], [upper, lower])
    upper.figure.draw_without_rendering()
    box, legend = upper.get_window_extent(), upper.get_legend()
    assert legend.texts[0].get_fontsize() == pytest.approx(0.9 * 8)
    assert legend.get_window_extent().x1 <= box.x1 + 1 and box.height > 20
    for axes in (upper, lower):
        texts = {text.get_text(): text for text in axes.findobj(Text)}
        name, facts = (texts[axes.get_title(loc)] for loc in ("left", "right"))
        assert name.get_fontsize() == pytest.approx(1.1 * 8)
        assert name.get_text().endswith("\n"), "too wide for one line"
        ends = name.get_window_extent().x0, facts.get_window_extent().x1
        assert box.x0 - 1 <= ends[0] and ends[1] <= box.x1 + 1
    (wide,) = axes_of(8, 3, rows=1)
    plot(timeline_of("1F1B"), wide)
    assert not wide.get_title("left").endswith("\n")


@drawn
@pytest.mark.parametrize(
    ("m", "bands", "expected"),
    [(24, None, False), (24, True, True), (96, None, True), (96, False, False)],
)
def test_boxes_or_bands(m, bands, expected):
    """A page of a paper is 7 inches wide: 24 micro-batches are boxes."""
    (axes,) = axes_of(7, 2, rows=1)
    plot(timeline_of("ZBV", Costs(), p=8, m=m), axes, bands=bands)
    assert any("bands" in gid for gid, _ in shapes_in(axes)) == expected
