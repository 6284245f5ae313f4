"""The table of modes, as HTML; columns that nobody has figures for are left out."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape

from zbpp.core import format_memory
from zbpp.simulator.page.entry import PageEntry

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


def modes_table(entries: Sequence[PageEntry], *, time_unit: str = "") -> str:
    """Tabulate entries; the shortest step is bold."""
    steps = _steps(entries)
    least = min((step for step in steps if step is not None), default=0.0)
    columns = _columns(entries, time_unit)
    head = "".join(
        f'<th scope="col">{escape(name)}</th>' for name in ("mode", *columns)
    )
    rows = []
    for entry, step in zip(entries, steps, strict=True):
        name = f'<th scope="row">{escape(entry.name)}</th>'
        if entry.reason:
            short = entry.reason.partition(";")[0]
            why = (
                f'<td class="why" colspan="{len(columns)}" '
                f'title="{escape(entry.reason)}"><div>{escape(short)}</div></td>'
            )
            rows.append(f"<tr>{name}{why}</tr>")
            continue
        best = step is not None and step <= least * (1 + _ROUNDING)
        cells = "".join(f"<td>{column(entry)}</td>" for column in columns.values())
        rows.append(f"<tr{' class=best' if best else ''}>{name}{cells}</tr>")
    return (
        f'<div class="wide"><table class="modes"><caption>{_caption(columns)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _caption(columns: Iterable[str]) -> str:
    """Explain the columns that there are."""
    names = list(columns)
    return " ".join(
        f"{word}: {text}."
        for word, text in _CAPTIONS.items()
        if any(name.startswith(word) for name in names)
    )


_Column = Callable[[PageEntry], str]


def _columns(entries: Sequence[PageEntry], time_unit: str) -> dict[str, _Column]:
    """The columns for which at least one entry has a figure."""
    unit = f", {time_unit}" if time_unit else ""
    step_of = dict(zip(map(id, entries), _steps(entries), strict=True))
    base = {one.group: step_of[id(one)] for one in entries if one.name == _BASELINE}
    held = [entry.peak for entry in entries if entry.peak is not None]
    limits = [entry.limit for entry in entries if entry.limit is not None]
    measured = any(entry.measured_step is not None for entry in entries)

    def faster(entry: PageEntry) -> str:
        baseline, step = base.get(entry.group), step_of[id(entry)]
        return f"{baseline / step:.3f}" if baseline and step else ""

    def memory(entry: PageEntry) -> str:
        if entry.peak is None:
            return ""
        text = escape(format_memory(float(f"{entry.peak:.4g}"), [*held, *limits]))
        return text + _meter(entry.peak, entry.limit)

    def limit(entry: PageEntry) -> str:
        if entry.limit is None:
            return ""
        return escape(format_memory(float(f"{entry.limit:.4g}"), [*held, *limits]))

    simulated = " simulated" if measured else ""
    columns: dict[str, _Column] = {
        "chunks a stage": _chunks,
        f"step{simulated}{unit}": lambda one: _number(one.simulated_step),
        f"step measured{unit}": lambda one: _number(one.measured_step),
        "measured / simulated": _ratio,
        f"speed-up over {_BASELINE}": faster,
        f"bubble{simulated}": lambda one: _share(one.bubble),
        "bubble measured": lambda one: _share(one.measured_bubble),
        "gap to the bound": lambda one: _share(one.gap),
        "peak memory": memory,
        "memory limit": limit,
    }
    for entry in entries:
        for name in entry.figures:
            columns.setdefault(name, partial(_figure, name))
    return {
        name: column
        for name, column in columns.items()
        if any(column(entry) for entry in entries)
    }


def _steps(entries: Sequence[PageEntry]) -> list[float | None]:
    """Keys that entries are compared by: measured steps if all were, else simulated."""
    timed = [one for one in entries if one.measured_step or one.simulated_step]
    if all(one.measured_step is not None for one in timed):
        return [one.measured_step for one in entries]
    return [one.simulated_step for one in entries]


def _chunks(entry: PageEntry) -> str:
    timeline = entry.any_timeline
    if entry.schedule is not None:
        placement = entry.schedule.placement
    elif timeline is not None:
        placement = timeline.placement
    else:
        return ""
    return f"{placement.n_chunks / placement.n_stages:.4g}"


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
    return escape(value) if isinstance(value, str) else f"{value:.6g}"


def _meter(amount: float, limit: float | None) -> str:
    if not limit:
        return ""
    share = min(amount / limit, 1.0)
    return f'<span class="meter"><i style="width:{100 * share:.1f}%"></i></span>'
