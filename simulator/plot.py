"""Pictures of timelines and of modes, by matplotlib: svg, png, pdf, and in notebooks.

    ZBH1   2 stages, 3 micro-batches        bubble rate 9.09 %
    stage 0  |F F F B W B ...
    stage 1  |  F B F B W ...
              0    5    10

One row a stage, one box a job with its micro-batch number where it fits. Grey is idle
time within a stage's span: the bubble. Memory over time goes below.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.core import Costs, RequestError, Timeline
from zbpp.core.files.json_text import write_file
from zbpp.simulator.arguments import takes_timelines
from zbpp.simulator.boxes import PALETTE, Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "check_suffix", "plot", "plot_comparison"]

FORMATS = ("png", "svg", "pdf")

Points = Mapping[str, tuple[float, float]]
Series = Mapping[str, Sequence[tuple[int, float]]]


@takes_timelines
def plot(
    timeline: Timeline | Sequence[Timeline],
    path: str | Path | None = None,
    *,
    costs: Costs | None = None,
    time_unit: str = "",
    colors: Mapping[str, str] | None = None,
    font: str = "sans-serif",
    font_size: float = 9.0,
    size: tuple[float, float] | None = None,
    title: bool = True,
    legend: bool = True,
) -> "Figure":
    """Draw timelines below one another on one time axis.

    Args:
        timeline: simulated or measured.
        path: of a file to write: .svg, .png or .pdf.
        costs: of the schedule; adds the peak of the memory to the title and, for one
            timeline, memory over time below.
        time_unit: for the label of the time axis.
        colors: as ``#rrggbb``, by kind of job (``F``, ``B``, ``W``, ``BW``, ``O``,
            ``V``, ...) and for ``idle``; later chunks of a stage are lighter.
        font: family of all texts.
        font_size: in points.
        size: width and height in inches; None: wide enough for the numbers in boxes.
        title: write mode, sizes, bubble rate and peak above each timeline.
        legend: explain the colours at the top.

    Returns:
        A figure of matplotlib, with axes for each timeline and for the memory;
        notebooks show it.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, the file
            cannot be written, or a colour is for no kind of job.
    """
    _check_matplotlib()
    if path is not None:
        check_suffix(path)
    from zbpp.simulator.figures import draw_timelines

    timelines = [timeline] if isinstance(timeline, Timeline) else timeline
    figure = draw_timelines(
        [Drawing(each) for each in timelines],
        costs=costs,
        palette=_palette(colors),
        time_unit=time_unit,
        font=font,
        font_size=font_size,
        size=size,
        has_titles=title,
        has_legend=legend,
    )
    if path is not None:
        _write(figure, path)
    return figure


def _palette(colors: Mapping[str, str] | None) -> dict[str, str]:
    for kind, colour in (colors or {}).items():
        if kind not in PALETTE:
            raise RequestError(
                f"colors has {kind!r}; the kinds are {', '.join(PALETTE)}"
            )
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", colour):
            raise RequestError(f"colors has {colour!r} for {kind}; write #rrggbb")
    return PALETTE | dict(colors or {})


def plot_comparison(
    points: Points,
    series: Series,
    path: str | Path | None = None,
    *,
    chosen: str = "auto",
    unit: str = "",
    limit: float | None = None,
) -> "Figure":
    """Draw bubble against memory and against micro-batches, side by side.

    Args:
        points: for each mode its peak memory and bubble rate (0 to 1).
        series: for each mode pairs of micro-batches and bubble rate.
        path: of a file to write: .svg, .png or .pdf.
        chosen: the mode that has a ring.
        unit: of the memory.
        limit: of the memory, a dashed line.

    Returns:
        A figure of matplotlib with axes for each chart that has data.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    _check_matplotlib()
    if path is not None:
        check_suffix(path)
    from zbpp.simulator.figures import draw_comparison

    figure = draw_comparison(points, series, chosen=chosen, unit=unit, limit=limit)
    if path is not None:
        _write(figure, path)
    return figure


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"pictures need matplotlib ({error}); install it: pip install "
            "'zbpp[viz]', or write .html, which needs nothing"
        ) from None


def check_suffix(path: str | Path) -> None:
    """Check the name of a picture's file.

    Raises:
        RequestError: it ends like none of `FORMATS`, or matplotlib is missing.
    """
    if Path(path).suffix.lower().lstrip(".") not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise RequestError(
            f"{path}: the name of a picture must end in {endings}; the commands also "
            "write pages (.html)"
        )
    _check_matplotlib()


def _write(figure: "Figure", path: str | Path) -> None:
    """Write a figure into a file, the same bytes each time."""
    from matplotlib import rc_context

    suffix = Path(path).suffix.lower().lstrip(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zbpp"}):
        figure.savefig(buffer, format=suffix, dpi=160, metadata=dates.get(suffix))
    write_file(path, buffer.getvalue())
