"""Figures of a schedule, as text for a terminal."""

import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from zbpp.cli.outputs import Terminal
from zbpp.cli.summary import Summary, short_memory, steady, summarize
from zbpp.core import KINDS, Collective, Costs, Schedule, Timeline, draw, kind_of
from zbpp.core.timeline import extent
from zbpp.simulator import (
    critical_path,
    idle,
    simulate,
    stage_span,
    step_time,
    work,
)
from zbpp.simulator.page import Table

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
    figures are those of one iteration, unless labelled. ``costs_name`` is the source of
    the costs.
    """
    summary = summarize(schedule, costs)
    among = steady(schedule, costs)
    timeline = simulate(schedule, costs)
    width = shutil.get_terminal_size((100, 24)).columns
    print(
        f"{summary.mode}: {summary.n_stages} stages, "
        f"{summary.n_microbatches} micro-batches"
    )
    picture = _pictures(drawn or [timeline], summary.mode)
    for line in picture:
        print(line if len(line) <= width else line[: width - 4].rstrip() + " ...")
    longest = max(map(len, picture))
    if longest > width:
        print(
            f"(the first {width} of {longest} columns; COLUMNS={longest} zbpp show "
            "prints all of them, -o x.svg draws them)"
        )
    print()
    table = _stage_table(timeline, summary)
    Terminal(width=width, highlight=False).print(table.for_terminal())
    limit = summary.memory_bound
    if isinstance(limit, list):
        within = "the memory limits"
    else:
        within = f"memory {short_memory(limit)} a stage"
    lines = {
        "costs": costs_name,
        "bubble rate": f"{summary.bubble_rate:.2%} of the longest span is beyond "
        "the work of the busiest stage",
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
    if schedule.recomputing:
        lines["recompute"] = recompute_text(schedule)
    if collectives := _collectives_text(schedule, timeline, costs):
        lines["collectives"] = collectives
    for name, text in lines.items():
        print(f"{name:14} {text}")


def _collectives_text(schedule: Schedule, timeline: Timeline, costs: Costs) -> str:
    """Count the collectives of replicas, and tell by how much they delay a step."""
    jobs = Counter(
        job.kind for order in schedule.orders for job in order if kind_of(job).is_async
    )
    if not jobs:
        return ""
    counts = ", ".join(f"{number} {kind}" for kind, number in jobs.items())
    alone = step_time(simulate(schedule.without(Collective), costs))
    return f"{counts}; they add {max(step_time(timeline) - alone, 0.0):.6g} to a step"


def recompute_text(schedule: Schedule) -> str:
    """Name the chunks, or layers, that B computes again: ``layers 0 2 of chunk 4``.

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
    """The difference of a step from that of even chunks: ``3.1% shorter``."""
    return f"{abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'}"


def _pictures(timelines: Sequence[Timeline], name: str) -> list[str]:
    """Draw timelines in cells of one size, with titles where names differ."""
    slots = chain(*(row for timeline in timelines for row in timeline.rows))
    durations = sorted(slot.duration for slot in slots if slot.duration > 0)
    if not durations:
        return ["(no job takes time)"]
    # one cell is the shortest job, unless that one is much shorter than most
    usual = durations[len(durations) // 2]
    unit = max(durations[0], usual / 4)
    longest = max(extent(chain(*timeline.rows)) for timeline in timelines)
    if longest > _MOST_CELLS * unit:
        return [
            f"(no picture: the longest job takes {durations[-1]:.6g}, half of all at "
            f"most {usual:.6g}; zbpp show -o x.svg draws it)"
        ]
    lines = []
    for timeline in timelines:
        lines += [f"{timeline.name}:"] if timeline.name != name else []
        lines += draw(timeline, unit=unit).splitlines()
    return lines


def _stage_table(timeline: Timeline, summary: Summary) -> Table:
    busy, waiting = work(timeline), idle(timeline)
    table = Table(["stage", "chunks", "span", "busy", "idle", "peak memory"], left=0)
    for stage, chunks in enumerate(timeline.placement.chunks_of):
        table.add(
            str(stage),
            " ".join(map(str, chunks)),
            f"{stage_span(timeline, stage):.6g}",
            f"{busy[stage]:.6g}",
            f"{max(waiting[stage], 0.0):.6g}",
            short_memory(summary.peak_memory[stage]),
        )
    return table


def _path_text(schedule: Schedule, costs: Costs) -> str:
    path = critical_path(schedule, costs)
    times = {str(kind): path.time_of(kind) for kind in KINDS}
    times["messages"] = path.time_in_messages
    parts = [f"{name} {time:.6g}" for name, time in times.items() if time]
    return f"{len(path.slots)} jobs, {path.length:.6g}: {', '.join(parts)}"
