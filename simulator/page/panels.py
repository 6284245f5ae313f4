"""Timelines on a page: what the scripts draw, and the elements they draw in."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zbpp.core import Check
from zbpp.simulator.critical_path import critical_places
from zbpp.simulator.metrics import step_time, waste
from zbpp.simulator.page.columns import KINDS, encode
from zbpp.simulator.page.entry import PageEntry, memory_unit
from zbpp.simulator.palette import COLOURS, NAMES, ink_on, letter_of, shade

__all__ = ["panels_data", "panels_html"]


def panels_data(
    entries: Sequence[PageEntry],
    panels: Iterable[tuple[PageEntry, str]],
    time_unit: str,
) -> dict[str, Any]:
    """Collect what the scripts read: sizes, colours, and a timeline a panel."""
    name, size = memory_unit(entries)
    tints = [shade(COLOURS[kind], leg) for kind in KINDS for leg in range(4)]
    tints.append(COLOURS["SEND"])
    return {
        "timeUnit": time_unit,
        "memory": {"size": size, "name": name},
        "palette": {
            "tints": tints,
            "inks": [ink_on(tint) for tint in tints],
            "arrows": [COLOURS["F"], COLOURS["BW"]],
            "beside": {kind: COLOURS[kind] for kind in ("UNSHARD", "REDUCE_GRAD")},
        },
        "panels": [_panel(entry, kind) for entry, kind in panels],
    }


def _panel(entry: PageEntry, kind: str) -> dict[str, Any]:
    timeline, memory = entry.timelines[kind], entry.memory
    firsts = [0]
    for row in timeline.rows:
        firsts.append(firsts[-1] + len(row))
    path = critical_places(timeline, entry.costs if kind == "simulated" else None)
    fixed = None if memory is None else list(memory.on(timeline.placement).fixed)
    return {
        "name": entry.name,
        "group": entry.group,
        "of": kind,
        "path": [
            firsts[line] + index for line, index in path if line < len(timeline.rows)
        ],
        "fixed": fixed,
        "peak": entry.peak,
        "limit": entry.limit,
        **encode(timeline, memory),
    }


def panels_html(
    entries: Sequence[PageEntry], panels: Sequence[tuple[PageEntry, str]]
) -> str:
    """Write switches, legend, time axis, and an empty canvas a panel."""
    drawn = [entry for entry in entries if entry.timelines]
    buttons = "".join(
        f'<button type="button" data-entry="{number}" '
        f'aria-pressed="{str(entry.shown).lower()}">{escape(_full_name(entry))}</button>'
        for number, entry in enumerate(drawn)
    )
    sections = []
    for number, (entry, kind) in enumerate(panels):
        hidden = "" if entry.shown else " hidden"
        place = drawn.index(entry)
        sections.append(
            f'<section class="panel" data-panel="{number}" data-of="{place}"{hidden}>'
            f"<header><h3>{escape(_full_name(entry))}</h3>"
            f"<span>{escape(_facts(entry, kind))}</span>"
            '<span class="note"></span></header>'
            '<div class="box"><canvas class="lanes"></canvas>'
            '<canvas class="over"></canvas></div></section>'
        )
    return (
        '<section id="timelines" tabindex="0"><h2>Timelines</h2><div class="tools">'
        + (f"<div>{buttons}</div>" if len(drawn) > 1 else "")
        + f'<div><span class="legend">{_legend(panels)}</span>'
        '<span class="gap"></span>'
        '<button type="button" data-show="path" aria-pressed="false">critical path'
        "</button>"
        '<button type="button" data-show="messages" aria-pressed="false">messages'
        "</button>"
        '<button type="button" data-show="memory" aria-pressed="true">memory</button>'
        '<button type="button" data-zoom="-" aria-label="zoom out">&minus;</button>'
        '<button type="button" data-zoom="+" aria-label="zoom in">+</button>'
        '<button type="button" data-zoom="0">all</button></div>'
        '<div><canvas id="axis" height="24"></canvas></div></div>'
        f"{''.join(sections)}</section>"
    )


def _facts(entry: PageEntry, kind: str) -> str:
    timeline = entry.timelines[kind]
    of, share = waste(timeline)
    facts = [f"{of} {share:.2%}", f"{step_time(timeline):.6g} from start to end"]
    if len(entry.timelines) > 1:
        facts.insert(0, kind)
    if kind == "measured" and (times := entry.times_by_kind()):
        ratios = (f"{name} {two / one:.3f}" for name, (one, two) in times.items())
        facts.append(f"measured / simulated: {', '.join(ratios)}")
        errors = entry.errors_by_kind().items()
        parts = (f"{name} {time:.3g} and {start:.3g}" for name, (time, start) in errors)
        facts.append(f"mean error of times and of starts: {', '.join(parts)}")
    if timeline.clock_error:
        facts.append(f"clocks of the stages within {timeline.clock_error:.3g}")
    return " \N{MIDDLE DOT} ".join(facts)


def _legend(panels: Iterable[tuple[PageEntry, str]]) -> str:
    timelines = [entry.timelines[kind] for entry, kind in panels]
    seen = {
        letter_of(slot.job)
        for timeline in timelines
        for row in (*timeline.rows, *timeline.collectives)
        for slot in row
        if slot.duration > 0 or isinstance(slot.job, Check)
    }
    if any(timeline.sending for timeline in timelines):
        seen.add("SEND")
    items = [
        (f"background:{COLOURS[key]}", name)
        for key, name in NAMES.items()
        if key in seen
    ]
    if any(one.placement.n_chunks > one.placement.n_stages for one in timelines):
        items.append((f"background:{shade(COLOURS['F'], 1)}", "lighter: later chunk"))
    marks = "".join(
        f'<span><i style="{style}"></i>{escape(name)}</span>' for style, name in items
    )
    return f'{marks}<span><i class="idle"></i>idle</span>'


def _full_name(entry: PageEntry) -> str:
    return f"{entry.name}, {entry.group}" if entry.group else entry.name
