"""Memory over time, one curve a stage, above what is there all the time.

GiB |     _      _              a pass may hold more inside than it leaves
    |  __| |____| |__ ______
    | |                     |
    |_|_____________________|_  dotted: fixed of a stage; grey: of all stages
    |#########################
"""

from typing import TYPE_CHECKING

from zbpp.core import MemoryModel, Timeline, format_memory
from zbpp.simulator.boxes import origin
from zbpp.simulator.metrics import memory_over_time, peak_memory, step_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_memory", "memory_text"]

_BYTES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20}


def memory_text(amount: float, memory: MemoryModel) -> str:
    """Write an amount with its unit, if it has one; M_B if a stage's F leaves 1."""
    unit = " M$_B$" if _is_plain(memory) else ""
    return format_memory(float(f"{amount:.4g}")) + unit


def _is_plain(memory: MemoryModel) -> bool:
    return memory.m_b == 1.0


def _scale(most: float, memory: MemoryModel) -> tuple[float, str]:
    """The size of a unit of the axis, and its name."""
    for name, size in _BYTES.items():
        if most >= size:
            return size, f"memory ({name})"
    return 1.0, "memory (M$_B$)" if _is_plain(memory) else "memory"


def draw_memory(axes: "Axes", timeline: Timeline, memory: MemoryModel) -> None:
    """Draw the curves, the fixed memory, and the limit if all stages have one."""
    from matplotlib import colormaps

    start = origin(timeline)
    n_stages = timeline.placement.n_stages
    shades = colormaps["viridis"]
    unit, label = _scale(max(peak_memory(timeline, memory)), memory)
    fixed = [one / unit for one in memory.on(timeline.placement).fixed]
    for stage, curve in enumerate(memory_over_time(timeline, memory)):
        # Of changes at the same time, the last one counts: no zero-width spikes.
        held = {0.0: fixed[stage]}
        held |= {time - start: amount / unit for time, amount in curve}
        held.setdefault(step_time(timeline), fixed[stage])
        color = shades(0.88 * stage / max(n_stages - 1, 1))
        axes.step(
            list(held.keys()),
            list(held.values()),
            where="post",
            color=color,
            linewidth=1.4,
            label=f"stage {stage}",
        )
        if fixed[stage]:
            axes.axhline(fixed[stage], color=color, linewidth=0.8, linestyle=":")
    if any(fixed):
        axes.axhspan(0, min(fixed), color="#dddddd", linewidth=0, label="fixed")
    if isinstance(memory.limit, int | float):
        limit = memory.limit / unit
        axes.axhline(limit, color="#222222", linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    if n_stages <= 8:
        axes.legend(
            loc="upper right", fontsize=8, ncols=2, frameon=False, handlelength=1.2
        )
