"""Two charts of modes: bubble against memory, and against micro-batches.

    bubble |  o 1F1B                 bubble |\\
           |      o ZBH1                    | \\____ 1F1B
           |           (o) auto             |\\_____ ZBH1
           |_________________ memory        |________ m
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.core.files.json_text import write_file
from zbpp.simulator.boxes import DARK
from zbpp.simulator.plot import figure_bytes, picture_suffix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["comparison_figure", "plot_comparison"]

_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", ":")
_WIDTH_PT, _HEIGHT_PT = 200, 235
"""About how far the outermost marks lie apart, and the highest from the axis."""
_LETTER_PT, _LINE_PT = 5, 9
"""About the size of a letter of a label."""
_HEIGHTS = (4, 15, -12, 26, 37)
"""Places of a label above its mark, the best first."""

Points = Mapping[str, tuple[float, float]]
Series = Mapping[str, Sequence[tuple[int, float]]]


def plot_comparison(
    points: Points, series: Series, path: str | Path, *, chosen: str = "auto"
) -> "Figure":
    """Draw modes into a file (png, svg, pdf by its suffix).

    Args:
        points: for each mode its peak memory and bubble rate (0 to 1).
        series: for each mode pairs of micro-batches and bubble rate.
        path: the file to write.
        chosen: the mode that has a ring.

    Returns:
        The figure, for further changes.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    suffix = picture_suffix(path)
    figure = comparison_figure(points, series, chosen=chosen)
    write_file(path, figure_bytes(figure, suffix))
    return figure


def comparison_figure(
    points: Points,
    series: Series,
    *,
    chosen: str = "auto",
    unit: str = "",
    limit: float | None = None,
) -> "Figure":
    """Draw both charts, side by side; without points or series the other one.

    Args:
        points: as for `plot_comparison`.
        series: as there.
        chosen: as there.
        unit: of the memory.
        limit: of the memory, a dashed line.
    """
    from matplotlib.figure import Figure

    n_charts = bool(points) + bool(series)
    figure = Figure((5.5 * n_charts, 4.2), layout="constrained")
    charts = list(figure.subplots(1, n_charts, squeeze=False)[0])
    if points:
        _scatter(charts[0], points, chosen)
        charts[0].set_xlabel(f"peak memory of a stage{f' ({unit})' if unit else ''}")
        if limit is not None:
            charts[0].axvline(limit, color=DARK, linewidth=1, linestyle="--")
    if series:
        _lines(charts[-1], series)
    for axes in charts:
        axes.set_ylim(bottom=0)
        axes.set_ylabel("bubble rate (%)")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _scatter(axes: "Axes", points: Points, chosen: str) -> None:
    marks: dict[tuple[float, float], list[str]] = {}
    for mode, (memory, bubble) in points.items():
        marks.setdefault((round(memory, 9), round(100 * bubble, 7)), []).append(mode)
    for (x, y), modes in marks.items():
        axes.plot(x, y, "o", color=_CYCLE[0], markersize=6, clip_on=False)
        if chosen in modes:
            axes.plot(
                x,
                y,
                "o",
                markersize=12,
                markerfacecolor="none",
                markeredgecolor=DARK,
                clip_on=False,
            )
    axes.margins(x=0.25, y=0.1)
    names = {at: ", ".join(modes) for at, modes in sorted(marks.items())}
    for at, height in _label_heights(names).items():
        axes.annotate(
            names[at],
            at,
            xytext=(9, height),
            textcoords="offset points",
            fontsize=8,
        )


def _label_heights(
    names: Mapping[tuple[float, float], str],
) -> dict[tuple[float, float], int]:
    """Say how many points above its mark each label stands, so that none overlap."""
    memories = [x for x, _ in names]
    across = _WIDTH_PT / (max(memories) - min(memories) or 1)
    up = _HEIGHT_PT / (max(y for _, y in names) or 1)
    taken = [(across * x - 4, across * x + 4, up * y) for x, y in names]
    heights = {}
    for (x, y), name in names.items():
        begin, end = across * x + 9, across * x + 9 + _LETTER_PT * len(name)
        for height in _HEIGHTS:
            middle = up * y + height
            if not any(
                begin < right and left < end and abs(middle - level) < _LINE_PT
                for left, right, level in taken
            ):
                break
        taken.append((begin, end, middle))
        heights[x, y] = height
    return heights


def _lines(axes: "Axes", series: Series) -> None:
    every = sorted({m for points in series.values() for m, _ in points})
    names: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for mode, points in series.items():  # what lies on one another is one line
        names.setdefault(tuple((m, round(b, 6)) for m, b in points), []).append(mode)
    for number, (points, modes) in enumerate(names.items()):
        axes.plot(
            [m for m, _ in points],
            [100 * bubble for _, bubble in points],
            _DASHES[number // len(_CYCLE) % len(_DASHES)],
            color=_CYCLE[number % len(_CYCLE)],
            linewidth=1.6,
            label=", ".join(modes),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [str(m) for m in every])
    axes.minorticks_off()
    axes.set_xlabel("micro-batches in a step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
