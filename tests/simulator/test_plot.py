"""Pictures: what is drawn, not only that something is."""

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from matplotlib.collections import PolyCollection

from zbpp.core import (
    Costs,
    RequestError,
)
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import (
    join,
    memory_over_time,
    plot,
    simulate,
    simulate_iterations,
    step_time,
)


def timeline_of(mode, p=4, m=8, costs=None):
    return simulate(
        plan(mode, n_stages=p, n_microbatches=m), costs or Costs(optimizer=2)
    )


def boxes(axes):
    """Number of boxes by letter and leg, such as {"F 0": 32}."""
    return {
        collection.get_gid(): len(collection.get_paths())
        for collection in axes.collections
        if isinstance(collection, PolyCollection)
    }


@pytest.mark.parametrize("takes", [0, 1])
def test_a_v_is_a_box_or_a_line_and_has_its_own_colour(tmp_path, takes):
    schedule = post_validated(plan("ZBH2", n_stages=3, n_microbatches=5))
    costs = Costs(optimizer=2, validation=takes)
    timeline = join(simulate_iterations(schedule, costs, 2), name="twice")
    figure = plot(timeline, tmp_path / "v.png", costs=Costs())
    axes = figure.axes[0]
    assert boxes(axes)["V 0"] == boxes(axes)["O 0"] == 3 * 2
    lines = [c for c in axes.collections if c.get_gid() == "V instants"]
    assert [len(one.get_segments()) for one in lines] == ([] if takes else [3 * 2])
    entries = [text.get_text()[:1] for text in axes.get_legend().texts]
    assert entries == ["F", "B", "W", "O", "V", "i"]
    assert axes.get_title("right").startswith("idle 0.00 %")
    colours = [patch.get_facecolor() for patch in axes.get_legend().get_patches()]
    assert len(set(colours)) == len(entries)
    if not takes:
        starts = sorted(
            (slot.start, stage - 0.5)
            for stage, row in enumerate(timeline.rows)
            for slot in row
            if str(slot.job) == "V"
        )
        drawn = sorted(tuple(segment[0]) for segment in lines[0].get_segments())
        assert drawn == starts


def test_only_a_v_of_no_time_is_a_line(tmp_path):
    timeline = timeline_of("ZBH1", 2, 2, Costs(w=(0, 1)))
    axes = plot(timeline, tmp_path / "w.png").axes[0]
    assert boxes(axes)["F 0"] == 4
    assert not any("instants" in str(c.get_gid()) for c in axes.collections)


def test_numbers_title_and_legend(tmp_path):
    figure = plot(timeline_of("ZBV"), tmp_path / "v.png", costs=Costs())
    axes = figure.axes[0]
    numbers = [text.get_text() for text in axes.texts]
    assert sorted(numbers) == sorted([str(i) for i in range(8)] * 24 + ["O"] * 4)
    assert axes.get_title("left") == "ZBV   4 stages, 8 micro-batches"
    assert axes.get_title("right") == "bubble rate 0.00 %    peak memory 4 M$_B$"
    assert [text.get_text()[:2].strip() for text in axes.get_legend().texts] == [
        "F",
        "B",
        "W",
        "O",
        "id",
        "li",
    ]


def test_bands_take_the_place_of_boxes_too_thin_to_be_seen(tmp_path):
    """Shares of a row's height; together with what is idle they fill it."""
    timeline = timeline_of("ZBH1", p=4, m=300, costs=Costs())
    axes = plot(timeline, tmp_path / "thin.png").axes[0]
    bands = {
        c.get_gid(): c.get_paths() for c in axes.collections if "bands" in c.get_gid()
    }
    assert set(bands) == {"F 0 bands", "B 0 bands", "W 0 bands"}
    for kind in "FBW":
        (path, *_) = bands[f"{kind} 0 bands"]
        busy = sum(s.duration for s in timeline.rows[0] if kind in str(s.job))
        assert area(path.vertices) == pytest.approx(busy * 0.86, rel=0.01)
        middle = [y for x, y in path.vertices if abs(x - busy * 3 / 2) < 5]
        assert max(middle) - min(middle) == pytest.approx(0.86 / 3, abs=0.1)
    few = plot(timeline_of("ZBH1"), tmp_path / "few.png").axes[0]
    assert not any("bands" in str(c.get_gid()) for c in few.collections)


def area(corners):
    """Of a polygon, by the shoelace formula."""
    following = [*corners[1:], corners[0]]
    pairs = zip(corners, following, strict=True)
    return abs(sum(x * b - a * y for (x, y), (a, b) in pairs)) / 2


def test_memory_over_time_is_drawn_below(tmp_path):
    timeline, memory = timeline_of("ZBH1"), Costs(memory_limit=5)
    figure = plot(timeline, tmp_path / "m.png", costs=memory, time_unit="ms")
    below = figure.axes[1]
    assert below.get_xlabel() == "time (ms)"
    *stages, limit = below.lines
    assert list(limit.get_ydata()) == [5, 5]
    assert len(stages) == 4
    for line, curve in zip(stages, memory_over_time(timeline, memory), strict=True):
        drawn = list(zip(*line.get_data(), strict=True))
        assert set(drawn) <= {(0, 0), (step_time(timeline), 0), *curve}
        assert {held for _, held in drawn} == {0, *(held for _, held in curve)}


def test_memory_in_bytes_stands_on_what_is_fixed(tmp_path):
    gib = 2.0**30
    memory = Costs(
        m_b=gib,
        m_w=gib / 2,
        m_fixed=10 * gib,
        memory_limit=20 * gib,
    )
    figure = plot(timeline_of("ZBH1"), tmp_path / "m.png", costs=memory)
    assert figure.axes[0].get_title("right").endswith("peak memory 14.0 GiB")
    below = figure.axes[1]
    assert below.get_ylabel() == "memory (GiB)"
    heights = [{*line.get_ydata()} for line in below.lines]
    assert min(min(one) for one in heights) == 10
    assert max(max(one) for one in heights[:-1]) == 14
    assert heights[-1] == {20}
    (base,) = below.patches
    assert (base.get_label(), base.get_y(), base.get_height()) == ("fixed", 0, 10)
    plain = plot(timeline_of("ZBH1"), tmp_path / "m.png", costs=Costs())
    assert not plain.axes[1].patches


def test_several_timelines_share_one_time_axis(tmp_path):
    timelines = [timeline_of("1F1B"), timeline_of("ZBH1")]
    figure = plot(timelines, tmp_path / "two.png", costs=Costs())
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() == (0, step_time(timelines[0]))
    assert lower.get_title("left").startswith("ZBH1")


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        ("png", b"\x89PNG"),
        ("svg", b"<?xml"),
        ("pdf", b"%PDF"),
        ("PNG", b"\x89PNG"),
    ],
)
def test_the_suffix_chooses_the_format(tmp_path, suffix, start):
    path = tmp_path / f"picture.{suffix}"
    plot(timeline_of("ZBH1"), path)
    assert path.read_bytes().startswith(start)


def test_an_svg_is_xml_with_searchable_text_and_the_same_bytes_each_time(tmp_path):
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        plot(timeline_of("ZBH1"), path)
    assert first.read_bytes() == second.read_bytes()
    text = "".join(ElementTree.fromstring(first.read_text()).itertext())
    assert "4 stages, 8 micro-batches" in text


def test_ten_thousand_jobs_are_drawn_as_few_things(tmp_path):
    """A box of its own for each would take minutes."""
    timeline = timeline_of("ZBV", p=16, m=104)
    assert sum(map(len, timeline.rows)) > 9_900
    figure = plot(timeline, tmp_path / "big.png", costs=Costs())
    assert len(figure.findobj()) < 1_000


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"must end in \.png, \.svg, \.pdf;"):
        plot(timeline_of("ZBH1"), tmp_path / "x.gif")
    with pytest.raises(RequestError, match="cannot be written: No such file"):
        plot(timeline_of("ZBH1"), tmp_path / "missing" / "x.png")


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"pip install 'zbpp\[viz\]'"):
        plot(timeline_of("ZBH1"), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_boxes_that_compute_layers_again_are_hatched(tmp_path):
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    again = replace(schedule, recompute=(True, False, (0,), False))
    for one, expected in ((schedule, set()), (again, {"B 0", "B 1"})):
        figure = plot(simulate(one), tmp_path / "x.svg", costs=Costs())
        found = {
            str(shape.get_gid()).removesuffix(" recomputed")
            for shape in figure.axes[0].collections
            if shape.get_hatch()
        }
        assert found == expected
        text = (tmp_path / "x.svg").read_text()
        assert ("hatched: recomputes" in text) == bool(expected)
