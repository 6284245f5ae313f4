"""The table of modes; columns for which no entry has a figure are left out."""

from collections.abc import Callable, Sequence
from functools import partial

from zbpp.core import format_memory
from zbpp.simulator.page.entry import PageEntry
from zbpp.simulator.tables import Table

__all__ = ["modes_table"]

_ROUNDING = 1e-9  # relative
_BASELINE = "1F1B"
_CAPTIONS = {
    "step": "one among many, optimizer included",
    "bubble": "(longest span - work of the busiest stage) / longest span",
    "gap": "span over its proven lower bound for the same placement and memory",
    "peak memory": "of the stage that holds most",
}
"""By the first word of the columns that they explain."""

_Column = Callable[[PageEntry], str]


def modes_table(entries: Sequence[PageEntry], *, time_unit: str = "") -> Table:
    """Tabulate entries; the shortest step is bold."""
    steps = _steps(entries)
    least = min((step for step in steps if step is not None), default=0.0)
    columns = {
        name: column
        for name, column in _columns(entries, time_unit).items()
        if any(column(entry) for entry in entries)
    }
    captions = (
        f"{word}: {text}."
        for word, text in _CAPTIONS.items()
        if any(name.startswith(word) for name in columns)
    )
    table = Table(["mode", *columns], caption=" ".join(captions))
    for entry, step in zip(entries, steps, strict=True):
        if entry.reason:
            table.add(entry.name, note=entry.reason)
            continue
        best = step is not None and step <= least * (1 + _ROUNDING)
        cells = (column(entry) for column in columns.values())
        table.add(entry.name, *cells, look="bold" if best else "")
    return table


def _columns(entries: Sequence[PageEntry], time_unit: str) -> dict[str, _Column]:
    unit = f", {time_unit}" if time_unit else ""
    simulated = (
        " simulated" if any(e.measured_step is not None for e in entries) else ""
    )
    columns: dict[str, _Column] = {
        "chunks a stage": _chunks,
        f"step{simulated}{unit}": lambda entry: _number(entry.simulated_step),
        f"step measured{unit}": lambda entry: _number(entry.measured_step),
        "measured / simulated": _ratio,
        f"speed-up over {_BASELINE}": _speed_up(entries),
        f"bubble{simulated}": lambda entry: _share(entry.bubble),
        "bubble measured": lambda entry: _share(entry.measured_bubble),
        "gap to the bound": lambda entry: _share(entry.gap),
        "peak memory": _memory(lambda entry: entry.peak),
        "memory limit": _memory(lambda entry: entry.limit),
    }
    for entry in entries:
        for name in entry.figures:
            columns.setdefault(name, partial(_figure, name))
    return columns


def _steps(entries: Sequence[PageEntry]) -> list[float | None]:
    """Keys that entries are compared by: measured steps if all were, else simulated."""
    timed = [entry for entry in entries if entry.measured_step or entry.simulated_step]
    if all(entry.measured_step is not None for entry in timed):
        return [entry.measured_step for entry in entries]
    return [entry.simulated_step for entry in entries]


def _speed_up(entries: Sequence[PageEntry]) -> _Column:
    steps = dict(zip(map(id, entries), _steps(entries), strict=True))
    baselines = {e.group: steps[id(e)] for e in entries if e.name == _BASELINE}

    def column(entry: PageEntry) -> str:
        baseline, step = baselines.get(entry.group), steps[id(entry)]
        return f"{baseline / step:.3f}" if baseline and step else ""

    return column


def _memory(amount_of: Callable[[PageEntry], float | None]) -> _Column:
    def column(entry: PageEntry) -> str:
        amount = amount_of(entry)
        if amount is None or entry.costs is None:
            return ""
        return format_memory(float(f"{amount:.4g}"), entry.costs.memory_unit)

    return column


def _chunks(entry: PageEntry) -> str:
    order = entry.schedule or entry.any_timeline
    if order is None:
        return ""
    return f"{order.placement.n_chunks / order.placement.n_stages:.4g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _ratio(entry: PageEntry) -> str:
    if not entry.measured_step or not entry.simulated_step:
        return ""
    return f"{entry.measured_step / entry.simulated_step:.3f}"


def _figure(name: str, entry: PageEntry) -> str:
    value = entry.figures.get(name, "")
    return value if isinstance(value, str) else f"{value:.6g}"
