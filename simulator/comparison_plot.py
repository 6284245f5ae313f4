"""Two charts for documents: bubble against memory, and against micro-batches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.simulator.plot import picture_suffix, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_comparison"]

_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", ":")


def plot_comparison(
    points: Mapping[str, tuple[float, float]],
    series: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    chosen: str = "auto",
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
    from matplotlib.figure import Figure

    figure = Figure((11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _scatter(left, points, chosen)
    _lines(right, series)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_ylabel("bubble rate (%)")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, Path(path), suffix)
    return figure


def _scatter(
    axes: "Axes", points: Mapping[str, tuple[float, float]], chosen: str
) -> None:
    marks: dict[tuple[float, float], list[str]] = {}
    for mode, point in points.items():
        marks.setdefault((round(point[0], 9), round(point[1], 9)), []).append(mode)
    for number, ((memory, bubble), modes) in enumerate(sorted(marks.items())):
        axes.plot(
            *(memory, 100 * bubble, "o"), color=_CYCLE[0], markersize=6, clip_on=False
        )
        if chosen in modes:
            axes.plot(
                *(memory, 100 * bubble, "o"),
                markersize=12,
                markerfacecolor="none",
                markeredgecolor="#222222",
                clip_on=False,
            )
        axes.annotate(
            ", ".join(modes),
            (memory, 100 * bubble),
            xytext=(9, 4 + 11 * (number % 2)),
            textcoords="offset points",
            fontsize=8,
        )
    axes.margins(x=0.25, y=0.1)
    axes.set_xlabel("peak memory of a stage")


def _lines(axes: "Axes", series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
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
    if series:
        axes.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8
        )
