"""A timeline as a picture: png, svg or pdf.

One row a stage, one box a job with its micro-batch number where it fits. Grey is idle
time within a stage's span: the bubble. Memory over time goes below.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.core import MemoryModel, RequestError, Timeline
from zbpp.simulator.boxes import (
    draw_jobs,
    durations,
    legend_handles,
    write_numbers,
)
from zbpp.simulator.memory_panel import draw_memory, memory_text
from zbpp.simulator.metrics import peak_memory, step_time, waste

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "picture_suffix", "plot", "save_figure"]

FORMATS = ("png", "svg", "pdf")
_MEMORY_HEIGHT = 1.5  # inches, as all sizes here


def plot(
    timeline: Timeline | Sequence[Timeline],
    target: "str | Path | Axes",
    *,
    memory: MemoryModel | None = None,
    time_unit: str = "",
) -> "Figure":
    """Draw a timeline into a file (png, svg, pdf by its suffix) or on axes.

    `zbpp.simulator.page` writes pages to zoom in.

    Args:
        timeline: simulated or measured; several are drawn below one another on one
            time axis (into a file only).
        target: the file to write, or axes to draw the timeline on.
        memory: adds the peak to the title and, for one timeline in a file, memory
            over time below.
        time_unit: for the label of the time axis.

    Returns:
        The figure, for further changes.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    suffix = picture_suffix(target) if isinstance(target, str | Path) else ""
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    if isinstance(target, str | Path):
        figure = _new_figure(timelines, memory, time_unit)
        save_figure(figure, Path(target), suffix)
    else:
        figure = _draw_on([target], timelines, memory)
    return figure


def _new_figure(
    timelines: Sequence[Timeline], memory: MemoryModel | None, time_unit: str
) -> "Figure":
    """Lay out a figure whose boxes are wide enough for their numbers, if it can."""
    from matplotlib.figure import Figure

    length = max(step_time(timeline) for timeline in timelines)
    lasting = sorted(d for timeline in timelines for d in durations(timeline))
    typical = lasting[len(lasting) // 2] if lasting else 1.0
    least = 10.0 if any(timeline.recomputing for timeline in timelines) else 8.0
    least += 4.0 if any(timeline.collectives for timeline in timelines) else 0.0
    least += 1.2 if any(timeline.sending for timeline in timelines) else 0.0
    width = min(max(0.215 * length / typical + 1.2, least), 18.0)  # least: the legend
    heights = [_rows_height(timeline.placement.n_stages) for timeline in timelines]
    with_memory = memory is not None and len(timelines) == 1
    if with_memory:
        heights.append(_MEMORY_HEIGHT)
    figure = Figure(
        (width, sum(heights) + 0.55 * len(timelines) + 0.6), layout="constrained"
    )
    panels = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    )
    every = list(panels[:, 0])
    if memory is not None and with_memory:
        draw_memory(every[-1], timelines[0], memory)
    for axes in every[:-1]:
        axes.tick_params(axis="x", length=0)
        axes.spines["bottom"].set_visible(False)
    every[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time")
    _draw_on(every[: len(timelines)], timelines, memory)
    return figure


def _rows_height(n_stages: int) -> float:
    return max(n_stages * min(0.42, max(0.16, 6.0 / n_stages)), 0.8)


def _draw_on(
    panels: "Sequence[Axes]", timelines: Sequence[Timeline], memory: MemoryModel | None
) -> "Figure":
    from matplotlib.transforms import offset_copy

    figure = panels[0].get_figure(root=True)
    assert figure is not None
    for axes, timeline in zip(panels, timelines, strict=True):
        draw_jobs(axes, timeline)
        _write_title(axes, timeline, memory, pad=24 if axes is panels[0] else 6)
    panels[0].set_xlim(0, max(step_time(timeline) for timeline in timelines) or 1.0)
    handles = legend_handles(timelines)
    above = offset_copy(panels[0].transAxes, figure, y=5, units="points")
    panels[0].legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        bbox_transform=above,
        borderpad=0,
        borderaxespad=0,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    figure.draw_without_rendering()  # only the finished layout tells what fits
    for axes, timeline in zip(panels, timelines, strict=True):
        write_numbers(axes, timeline)
    return figure


def _write_title(
    axes: "Axes", timeline: Timeline, memory: MemoryModel | None, *, pad: float
) -> None:
    name, share = waste(timeline)
    facts = [f"{name} {100 * share:.2f} %"]
    if memory is not None:
        peak = max(peak_memory(timeline, memory))
        facts.append(f"peak memory {memory_text(peak, memory)}")
    sizes = (
        f"{timeline.placement.n_stages} stages, {timeline.n_microbatches} micro-batches"
    )
    axes.set_title(
        f"{timeline.name}   {sizes}",
        loc="left",
        fontsize=11,
        fontweight="bold",
        pad=pad,
    )
    axes.set_title("    ".join(facts), loc="right", fontsize=11, pad=pad)


def picture_suffix(path: str | Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        RequestError: it is none of `FORMATS`, or matplotlib is missing.
    """
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise RequestError(
            f"{path}: the name of a picture must end in {known}; the commands also "
            "write pages (.html)"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"plots need matplotlib ({error}); install it: pip install 'zbpp[viz]', "
            "or write a page (.html), which needs nothing"
        ) from None
    return suffix


def save_figure(figure: "Figure", path: Path, suffix: str) -> None:
    """Write a figure, the same bytes each time.

    Raises:
        RequestError: the file cannot be written.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with rc_context({"svg.hashsalt": "zbpp", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)
    try:
        path.write_bytes(buffer.getvalue())
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None
