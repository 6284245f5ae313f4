"""``zbpp show -o``: schedules as a picture, as a page, or as a trace."""

from pathlib import Path

from zbpp.cli.flags import ScheduleFlags
from zbpp.cli.several import command_text
from zbpp.cli.summary import summarize
from zbpp.core import Costs, Schedule, Timeline
from zbpp.simulator import PageEntry, plot, write_page, write_trace

__all__ = ["draw_file"]


def draw_file(
    flags: ScheduleFlags,
    loaded: list[tuple[Schedule, Costs]],
    out: Path,
) -> None:
    """Draw schedules on one time axis, as the name of the file ends.

    Args:
        flags: of the command.
        loaded: the schedules, and the costs that they are simulated with.
        out: .png, .svg, .pdf, .html, or .json: a trace, a unit of time a millisecond.
    """
    runs = [
        (schedule, costs, flags.timelines(schedule, costs))
        for schedule, costs in loaded
    ]
    drawn = [
        (timeline, costs) for _, costs, timelines in runs for timeline in timelines
    ]
    if out.suffix.lower() == ".json":
        timelines, costs = zip(*drawn, strict=True)
        write_trace(timelines, out, costs=costs)
    elif out.suffix.lower() == ".html":
        _write_page(flags, runs, out)
    else:
        plot([timeline for timeline, _ in drawn], out, costs=loaded[0][1])


def _write_page(
    flags: ScheduleFlags, runs: list[tuple[Schedule, Costs, list[Timeline]]], out: Path
) -> None:
    entries = []
    for schedule, costs, timelines in runs:
        summary = summarize(schedule, costs)
        for timeline in timelines:
            entry = PageEntry(
                name=timeline.name,
                schedule=schedule,
                simulated=timeline,
                costs=costs,
                gap=summary.gap if flags.iterations == 1 else None,
            )
            entries.append(entry)
    sizes = dict.fromkeys(
        f"{schedule.n_stages} stages, {schedule.n_microbatches} micro-batches"
        for schedule, *_ in runs
    )
    names = dict.fromkeys(schedule.name for schedule, *_ in runs)
    facts = [*sizes, *([f"costs {flags.costs}"] if flags.costs else [])]
    write_page(
        entries,
        out,
        title=", ".join(names),
        subtitle="; ".join(facts),
        command=command_text(flags),
    )
