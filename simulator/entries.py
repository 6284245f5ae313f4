"""A mode on a page: timelines, and figures that follow from them or are given.

Columns of the table of modes for which no entry has a figure are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zbpp.core import Costs, Schedule, Timeline, format_memory
from zbpp.simulator.metrics import bubble_rate, memory_scale, peak_memory, step_time
from zbpp.simulator.tables import Table

__all__ = ["PageEntry", "modes_table", "unit_of_memory"]

_ROUNDING = 1e-9  # relative
_BASELINE = "1F1B"
_CAPTIONS = {
    "step": "one among many, optimizer included",
    "bubble": "(longest span - work of the busiest stage) / longest span",
    "gap": "span over its proven lower bound for the same placement and memory",
    "peak memory": "of the stage that holds most",
}
"""By the first word of the columns that they explain."""


@dataclass(frozen=True, kw_only=True)
class PageEntry:
    """One row of the table, and up to two timelines.

    Args:
        name: the mode, for people; unique within its group.
        schedule: the order; its chunks are counted in the table.
        simulated: timeline by the simulator.
        measured: timeline of a real run in the same unit of time; its clock may start
            anywhere.
        costs: of the simulation; their messages' delays are on the critical path, and
            they add memory to the timelines, and peak and limit to the table.
        step: time of a step among many; None: of the simulated timeline alone.
        step_measured: the same of the run; None: of the measured timeline.
        bubble_measured: bubble rate of the run, 0 to 1; None: of the measured timeline
            alone.
        gap: span over its lower bound, less 1.
        figures: more columns of the table by their titles, such as tokens/s.
        group: entries of one group share a table, such as those of one costs file.
        reason: why there are no figures.
        shown: False leaves the timelines out of sight until they are asked for.
    """

    name: str
    schedule: Schedule | None = None
    simulated: Timeline | None = None
    measured: Timeline | None = None
    costs: Costs | None = None
    step: float | None = None
    step_measured: float | None = None
    bubble_measured: float | None = None
    gap: float | None = None
    figures: Mapping[str, float | str] = field(default_factory=dict)
    group: str = ""
    reason: str = ""
    shown: bool = True

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The timelines by ``simulated`` and ``measured``, in this order."""
        both = {"simulated": self.simulated, "measured": self.measured}
        return {
            name: timeline for name, timeline in both.items() if timeline is not None
        }

    @property
    def title(self) -> str:
        """Name and group."""
        return f"{self.name}, {self.group}" if self.group else self.name

    @property
    def any_timeline(self) -> Timeline | None:
        """The simulated timeline, else the measured one."""
        return self.simulated or self.measured

    @cached_property
    def simulated_step(self) -> float | None:
        """`step`, or that of the timeline alone."""
        if self.step is None and self.simulated is not None:
            return step_time(self.simulated)
        return self.step

    @cached_property
    def measured_step(self) -> float | None:
        """`step_measured`, or that of the timeline alone."""
        if self.step_measured is None and self.measured is not None:
            return step_time(self.measured)
        return self.step_measured

    @cached_property
    def bubble(self) -> float | None:
        """Bubble rate of the simulated timeline, 0 to 1."""
        return None if self.simulated is None else bubble_rate(self.simulated)

    @cached_property
    def measured_bubble(self) -> float | None:
        """`bubble_measured`, or that of the timeline alone."""
        if self.bubble_measured is None and self.measured is not None:
            return bubble_rate(self.measured)
        return self.bubble_measured

    @cached_property
    def peak(self) -> float | None:
        """Most memory that a stage holds, in the unit of the costs."""
        if self.costs is None or self.any_timeline is None:
            return None
        return max(peak_memory(self.any_timeline, self.costs))

    @property
    def limit(self) -> float | None:
        """Largest memory that a stage may hold; None: any."""
        if self.costs is None or self.costs.memory_limit is None:
            return None
        limit = self.costs.memory_limit
        return float(max(limit)) if isinstance(limit, tuple) else float(limit)


def unit_of_memory(entries: Sequence[PageEntry]) -> tuple[str, float]:
    """Name and size of the unit in which the entries' memory is shown."""
    peaks = [entry.peak for entry in entries if entry.peak is not None]
    costs = [entry.costs for entry in entries if entry.costs is not None]
    return memory_scale(max(peaks, default=0.0), costs)


def modes_table(entries: Sequence[PageEntry], *, time_unit: str = "") -> Table:
    """Tabulate the entries of a group; the shortest step is bold."""
    steps = _steps(entries)
    least = min((step for step in steps if step is not None), default=0.0)
    by_name = {entry.name: step for entry, step in zip(entries, steps, strict=True)}
    baseline = by_name.get(_BASELINE)
    unit = f", {time_unit}" if time_unit else ""
    beside = any(entry.measured_step is not None for entry in entries)
    rows = [
        _cells(entry, step, baseline, unit, beside=beside)
        for entry, step in zip(entries, steps, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) for row in rows)]
    captions = (
        f"{word}: {text}."
        for word, text in _CAPTIONS.items()
        if any(name.startswith(word) for name in columns)
    )
    table = Table(["mode", *columns], caption=" ".join(captions))
    for entry, step, row in zip(entries, steps, rows, strict=True):
        if entry.reason:
            table.add(entry.name, note=entry.reason)
            continue
        best = step is not None and step <= least * (1 + _ROUNDING)
        cells = (row.get(name, "") for name in columns)
        table.add(entry.name, *cells, look="bold" if best else "")
    return table


def _steps(entries: Sequence[PageEntry]) -> list[float | None]:
    """Keys that entries are compared by: measured steps if all were, else simulated."""
    timed = [entry for entry in entries if entry.measured_step or entry.simulated_step]
    if all(entry.measured_step is not None for entry in timed):
        return [entry.measured_step for entry in entries]
    return [entry.simulated_step for entry in entries]


def _cells(
    entry: PageEntry,
    step: float | None,
    baseline: float | None,
    unit: str,
    *,
    beside: bool,
) -> dict[str, str]:
    """The figures of an entry by the heads of their columns; empty: it has none."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def ratio(value: float | None, divisor: float | None) -> str:
        return f"{value / divisor:.3f}" if value and divisor else ""

    def memory(amount: float | None) -> str:
        if amount is None or entry.costs is None:
            return ""
        return format_memory(float(f"{amount:.4g}"))

    order, simulated = entry.schedule or entry.any_timeline, " simulated" * beside
    placement = None if order is None else order.placement
    chunks = None if placement is None else placement.n_chunks / placement.n_stages
    cells = {
        "chunks a stage": text(chunks, ".4g"),
        f"step{simulated}{unit}": text(entry.simulated_step, ".6g"),
        f"step measured{unit}": text(entry.measured_step, ".6g"),
        "measured / simulated": ratio(entry.measured_step, entry.simulated_step),
        f"speed-up over {_BASELINE}": ratio(baseline, step),
        f"bubble{simulated}": text(entry.bubble, ".2%"),
        "bubble measured": text(entry.measured_bubble, ".2%"),
        "gap to the bound": text(entry.gap, ".2%"),
        "peak memory": memory(entry.peak),
        "memory limit": memory(entry.limit),
    }
    for name, value in entry.figures.items():
        cells.setdefault(name, value if isinstance(value, str) else f"{value:.6g}")
    return cells
