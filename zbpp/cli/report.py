"""Figures of a schedule, as text for a terminal."""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from zbpp.cli.outputs import Terminal
from zbpp.cli.summary import Steady, Summary, short_memory, steady, summarize
from zbpp.core import (
    KINDS,
    Collective,
    Costs,
    Schedule,
    Scope,
    Timeline,
    draw,
    kind_of,
)
from zbpp.core.timeline import extent
from zbpp.schedules import without_collectives
from zbpp.simulator import (
    critical_path,
    idle,
    sending,
    simulate,
    stage_span,
    step_time,
    work,
)
from zbpp.simulator.tables import Table

__all__ = ["gain_text", "print_comparison", "print_report", "recompute_text"]

_ROUNDING = 1e-9  # relative
_MOST_CELLS = 1e6  # of a picture's line before it is cropped


def print_report(
    schedule: Schedule,
    costs: Costs,
    drawn: Sequence[Timeline] = (),
    *,
    costs_name: str,
) -> None:
    """Print the picture, a table of the stages and the figures of a schedule.

    ``drawn``: what the picture shows in place of one iteration; the table and the
    figures are those of one, unless they say otherwise. ``costs_name`` says where the
    costs come from.
    """
    summary = summarize(schedule, costs)
    among = steady(schedule, costs)
    timeline = simulate(schedule, costs)
    print(
        f"{summary.mode}: {summary.n_stages} stages, "
        f"{summary.n_microbatches} micro-batches"
    )
    print(_pictures(drawn or [timeline], summary.mode))
    print()
    _console().print(_stage_table(timeline, summary).for_terminal())
    limit = summary.memory_bound
    if isinstance(limit, list):
        within = "the memory limits"
    else:
        within = f"memory {short_memory(limit)} a stage"
    lines = {
        "costs": costs_name,
        "bubble rate": f"{summary.bubble_rate:.2%} of the longest span is beyond "
        "the work of the busiest stage",
        "overhead": f"{summary.overhead:.2%} (the same over that work)",
        "span": f"{summary.span:.6g}, the longest of a stage",
        "makespan": f"{summary.makespan:.6g}, first start to last end of a pass",
        "step time": f"{summary.step_time:.6g}, optimizer included",
        "steady step": f"{among.step_time_post_validation:.6g} post-validated (a "
        f"rollback adds {among.rollback_time:.6g}), "
        f"{among.step_time_barrier:.6g} behind a barrier",
        "peak memory": short_memory(max(summary.peak_memory)),
        "critical path": _path_text(schedule, costs),
        "lower bound": f"{summary.lower_bound:.6g} for the span "
        f"(proof: {summary.lower_bound_by}), within {within}; gap {summary.gap:.2%}",
    }
    if timeline.sending:
        lines["bubble rate"] += ", sends included"
    if schedule.recomputing:
        lines["recompute"] = recompute_text(schedule)
    if any(isinstance(job, Collective) for order in schedule.orders for job in order):
        lines["collectives"] = _collectives_text(schedule, timeline, costs)
    for name, text in lines.items():
        print(f"{name:14} {text}")


def _collectives_text(schedule: Schedule, timeline: Timeline, costs: Costs) -> str:
    """Count what replicas gather and add up; their time, and how much of it shows."""
    jobs = Counter(
        job.kind for order in schedule.orders for job in order if kind_of(job).is_async
    )
    counts = ", ".join(f"{number} {kind}" for kind, number in jobs.items())
    lanes = timeline.collectives
    busy = max((sum(slot.duration for slot in lane) for lane in lanes), default=0.0)
    alone = step_time(simulate(without_collectives(schedule), costs))
    return (
        f"{counts}; {busy:.6g} on the busiest stage, the step is "
        f"{max(step_time(timeline) - alone, 0.0):.6g} longer for them"
    )


def recompute_text(schedule: Schedule) -> str:
    """Say which chunks, or layers of them, B computes again: ``layers 0 2 of chunk 4``.

    Layers are counted from 0 in their chunk.
    """
    whole: list[list[int]] = []
    parts = []
    for chunk in sorted(schedule.recomputing):
        which = schedule.recompute[chunk] if schedule.recompute else True
        if which is not True and which is not False:
            parts.append(f"layers {' '.join(map(str, which))} of chunk {chunk}")
        elif whole and whole[-1][-1] == chunk - 1:
            whole[-1].append(chunk)
        else:
            whole.append([chunk])
    runs = [f"{a[0]}-{a[-1]}" if len(a) > 1 else str(a[0]) for a in whole]
    return ", ".join([f"chunks {' '.join(runs)}"] * bool(runs) + parts)


def gain_text(gain: float) -> str:
    """Say how much shorter, or longer, a step is than that of even chunks."""
    return f"{abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'}"


def print_comparison(
    rows: list[tuple[str, Summary | str]],
    *,
    title: str,
    steps: Mapping[str, Steady] | None = None,
    post_validation: bool = False,
) -> None:
    """Print a table of modes; below it, why a mode has no figures.

    ``steps`` adds their steady step times behind a barrier, and with
    ``post_validation`` those of post-validated steps.
    """
    shown = {} if steps is None else dict(list(_STEPS.items())[: 1 + post_validation])
    table = _comparison_table(rows, title, shown, steps or {})
    if steps is not None:
        table.caption += (
            "\nstep: the time of one among many, optimizer included, behind a barrier "
            "or post-validated (V)"
        )
    _console().print(table.for_terminal())
    for mode, row in rows:
        if isinstance(row, str):
            print(row if row.startswith(mode) else f"{mode}: {row}")


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "chunks": lambda row: str(len(row.placement)),
    "bubble": lambda row: f"{row.bubble_rate:.2%}",
    "span": lambda row: f"{row.span:.6g}",
    "makespan": lambda row: f"{row.makespan:.6g}",
    "peak memory": lambda row: short_memory(max(row.peak_memory)),
    "gap": lambda row: f"{row.gap:.2%}",
}
_Steps = dict[str, Callable[[Steady], str]]
_STEPS: _Steps = {
    "step, barrier": lambda among: f"{among.step_time_barrier:.6g}",
    "step, V": lambda among: f"{among.step_time_post_validation:.6g}",
}


def _comparison_table(
    rows: list[tuple[str, Summary | str]],
    title: str,
    shown: _Steps,
    steps: Mapping[str, Steady],
) -> Table:
    """Tabulate modes; the shortest span is bold."""
    spans = [row.span for _, row in rows if isinstance(row, Summary)]
    table = Table(["mode", *_COLUMNS, *shown], title=title)
    table.caption = (
        "gap: span over the lower bound for the same placement and, unless a limit is "
        "given, the same memory"
    )
    for mode, row in rows:
        if isinstance(row, str):
            table.add(mode, look="dim", note=row)
            continue
        table.add(
            mode,
            *(text(row) for text in _COLUMNS.values()),
            *(text(steps[mode]) for text in shown.values()),
            look="bold" if row.span <= min(spans) * (1 + _ROUNDING) else "",
        )
    return table


def _console() -> Terminal:
    return Terminal(width=_terminal_width(), highlight=False)


def _terminal_width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _pictures(timelines: Sequence[Timeline], name: str) -> str:
    """Draw timelines in cells of one size, under their names if these say more."""
    lasting = sorted(
        slot.duration
        for timeline in timelines
        for row in timeline.rows
        for slot in row
        if slot.duration > 0
    )
    if not lasting:
        return "(no job takes time)"
    # One cell is the shortest job, unless that one is much shorter than most.
    unit = max(lasting[0], lasting[len(lasting) // 2] / 4)
    if (
        max(extent(chain(*timeline.rows)) for timeline in timelines)
        > _MOST_CELLS * unit
    ):
        return (
            f"(no picture: the longest job takes {lasting[-1]:.6g}, half of all at "
            f"most {lasting[len(lasting) // 2]:.6g}; zbpp show -o x.svg draws it)"
        )
    return "\n".join(
        _picture(timeline, unit)
        if timeline.name == name
        else f"{timeline.name}:\n{_picture(timeline, unit)}"
        for timeline in timelines
    )


def _picture(timeline: Timeline, unit: float) -> str:
    """Draw a timeline as text, cropped to the terminal."""
    lines = draw(timeline, unit=unit).splitlines()
    width = _terminal_width()
    longest = max(map(len, lines))
    if longest <= width:
        return "\n".join(lines)
    cropped = [
        line if len(line) <= width else line[: width - 4].rstrip() + " ..."
        for line in lines
    ]
    note = (
        f"(the first {width} of {longest} columns; COLUMNS={longest} zbpp show prints "
        "all of them, -o x.svg draws them)"
    )
    return "\n".join([*cropped, note])


def _stage_table(timeline: Timeline, summary: Summary) -> Table:
    busy, waiting, sent = work(timeline), idle(timeline), sending(timeline)
    sends = ["sends"] if any(sent) else []
    table = Table(
        ["stage", "chunks", "span", "busy", *sends, "idle", "peak memory"], left=0
    )
    for stage, chunks in enumerate(timeline.placement.chunks_of):
        table.add(
            str(stage),
            " ".join(map(str, chunks)),
            f"{stage_span(timeline, stage):.6g}",
            f"{busy[stage]:.6g}",
            *(f"{sent[stage]:.6g}" for _ in sends),
            f"{max(waiting[stage], 0.0):.6g}",
            short_memory(summary.peak_memory[stage]),
        )
    return table


def _path_text(schedule: Schedule, costs: Costs) -> str:
    path = critical_path(schedule, costs)
    times = {
        kind: path.time_of(kind)
        for kind in dict.fromkeys(slot.job.kind for slot in path.slots)
        if KINDS[kind].scope is not Scope.STAGE and not KINDS[kind].is_async
    }
    parts = [f"{kind} {times[kind]:.6g}" for kind in KINDS if times.get(kind)]
    rest = path.length - sum(times.values())
    for name, time in (
        ("messages", path.time_in_messages),
        ("collectives", path.time_in_collectives),
    ):
        if time > _ROUNDING * path.length:
            parts.append(f"{name} {time:.6g}")
            rest -= time
    if rest > _ROUNDING * path.length:
        parts.append(f"optimizer {rest:.6g}")
    return f"{len(path.slots)} jobs, {path.length:.6g}: {', '.join(parts)}"
