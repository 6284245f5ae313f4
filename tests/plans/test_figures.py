"""Timelines on a user's axes: for the columns of a paper, in its fonts and colours."""

import pytest

import zbpp
from zbpp.simulator import plot, simulate, step_time

pytestmark = pytest.mark.needs("matplotlib")


def timeline_of(mode, p=4, m=8):
    return simulate(zbpp.plan(mode, n_stages=p, n_microbatches=m), zbpp.Costs())


def axes_of(*size, rows=2):
    from matplotlib.figure import Figure

    figure = Figure(size or None, layout="constrained")
    return list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


def colours_of(axes):
    """Of the boxes or bands, by kind and place of the chunk."""
    from matplotlib.colors import to_hex

    return {
        shape.get_gid(): to_hex(shape.get_facecolor()[0]) for shape in axes.collections
    }


def title_of(axes, loc):
    from matplotlib.text import Text

    return next(t for t in axes.findobj(Text) if t.get_text() == axes.get_title(loc))


def width_of(artist):
    box = artist.get_window_extent()
    return box.x0, box.x1


def test_axes_that_share_their_time_show_the_longest_timeline_whole():
    upper, lower = axes_of()
    plot(timeline_of("ZBH1"), upper)
    size, span = upper.texts[0].get_fontsize(), upper.get_xlim()[1]
    plot(timeline_of("1F1B"), lower, time_unit="ms")
    longest = step_time(timeline_of("1F1B"))
    assert upper.get_xlim() == lower.get_xlim() == (0, longest)
    expected = size * min(1, span / longest)  # the numbers fit into narrower boxes
    assert upper.texts[0].get_fontsize() == pytest.approx(expected)
    assert lower.get_xlabel() == "time (ms)"


def test_several_timelines_on_as_many_axes_share_a_legend():
    panels = axes_of()
    timelines = [timeline_of("1F1B"), timeline_of("ZBV")]
    plot(timelines, panels)
    labels = [text.get_text() for text in panels[0].get_legend().texts]
    assert [label.split()[0] for label in labels[:4]] == ["F", "B", "W", "BW"]
    assert panels[1].get_legend() is None
    assert [axes.get_title("left").split()[0] for axes in panels] == ["1F1B", "ZBV"]
    for wrong in (panels[0], axes_of(rows=3)):
        with pytest.raises(zbpp.RequestError, match=r"2 timelines cannot .* [13] axes"):
            plot(timelines, wrong)


def test_colours_are_chosen_by_kind():
    colors = {"F": "tab:red", "W": "0.5", "idle": (1, 1, 1)}
    plain, coloured = (axes_of(rows=1)[0] for _ in range(2))
    plot(timeline_of("ZBV"), plain)
    plot(timeline_of("ZBV"), coloured, colors=colors)
    before, after = colours_of(plain), colours_of(coloured)
    assert (after["F 0"], after["W 0"], after["idle"]) == (
        "#d62728",
        "#808080",
        "#ffffff",
    )
    assert after["B 0"] == before["B 0"] and after["B 1"] == before["B 1"]
    lighter = [int(after["F 1"][i : i + 2], 16) for i in (1, 3, 5)]
    assert all(x > y for x, y in zip(lighter, (0xD6, 0x27, 0x28), strict=True))
    from matplotlib.colors import to_hex

    marks = [to_hex(p.get_facecolor()) for p in coloured.get_legend().get_patches()]
    assert marks[:4] == [after["F 0"], after["B 0"], after["W 0"], after["idle"]]
    with pytest.raises(zbpp.RequestError, match=r"colors has 'f'; the kinds are F, B,"):
        plot(timeline_of("ZBV"), plain, colors={"f": "red"})


def test_titles_and_legend_fit_a_column_of_a_paper():
    from matplotlib import rc_context

    with rc_context({"font.size": 8}):
        upper, lower = axes_of(3.3, 3.0)
        plot([timeline_of("1F1B"), timeline_of("ZBH1")], [upper, lower])
    upper.figure.draw_without_rendering()
    left, right = width_of(upper)
    legend = upper.get_legend()
    assert legend.texts[0].get_fontsize() == pytest.approx(0.9 * 8)
    assert width_of(legend)[1] <= right + 1
    for axes in (upper, lower):
        name, facts = title_of(axes, "left"), title_of(axes, "right")
        assert name.get_fontsize() == pytest.approx(1.1 * 8)
        assert width_of(name)[1] > width_of(facts)[0]  # too wide for one line
        assert name.get_text().endswith("\n")
        assert left - 1 <= width_of(name)[0] and width_of(facts)[1] <= right + 1
    assert (
        title_of(upper, "right").get_window_extent().y0 > legend.get_window_extent().y1
    )
    assert upper.get_window_extent().height > 20

    (wide,) = axes_of(8, 3, rows=1)
    plot(timeline_of("1F1B"), wide)
    assert not wide.get_title("left").endswith("\n")


@pytest.mark.parametrize(
    ("m", "bands", "expected"),
    [(24, None, False), (24, True, True), (96, None, True), (96, False, False)],
)
def test_boxes_or_bands(m, bands, expected):
    """A page of a paper is 7 inches wide: 24 micro-batches are boxes."""
    (axes,) = axes_of(7, 2, rows=1)
    plot(timeline_of("ZBV", p=8, m=m), axes, bands=bands)
    assert any("bands" in name for name in colours_of(axes)) == expected
