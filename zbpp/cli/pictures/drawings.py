"""``zbpp plot`` and ``zbpp trace``: one or several schedules, drawn or traced."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zbpp.cli.flags import ScheduleFlags
from zbpp.cli.outputs import check_outputs, check_picture
from zbpp.cli.pictures.several import command_text, schedules_in
from zbpp.cli.summary import summarize
from zbpp.core import Costs, Schedule
from zbpp.simulator import plot, write_trace
from zbpp.simulator.page import PageEntry, write_page

__all__ = ["Plot", "Trace"]


@dataclass(frozen=True, kw_only=True)
class _Several(ScheduleFlags):
    """Schedules, separated by commas."""

    def loaded(self) -> Iterator[tuple[Schedule, Costs]]:
        """Plan or read each schedule."""
        named = self.schedule or self.pipeline_schedule_mode
        if named is None or (self.schedule and self.pipeline_schedule_mode):
            yield self.load()  # which says what is wrong
            return
        for name in schedules_in(named):
            one = replace(self, schedule=name, pipeline_schedule_mode=None)
            yield one.load()


@dataclass(frozen=True, kw_only=True)
class Plot(_Several):
    """Draw timelines; several schedules, 1F1B,ZBV,plan.json, come on one time axis."""

    out: Path
    """Picture (.png, .svg, .pdf), or page to zoom in (.html)."""

    def run(self) -> None:
        """Draw, and name the file."""
        check_outputs(out=self.out)
        check_picture(self.out)
        loaded = list(self.loaded())
        if self.out.suffix.lower() == ".html":
            self._write_page(loaded)
        else:
            timelines = [
                timeline
                for schedule, costs in loaded
                for timeline in self.timelines(schedule, costs)
            ]
            plot(timelines, self.out, costs=loaded[0][1])
        print(self.out)

    def _write_page(self, loaded: list[tuple[Schedule, Costs]]) -> None:
        entries = []
        for schedule, costs in loaded:
            summary = summarize(schedule, costs)
            for timeline in self.timelines(schedule, costs):
                entry = PageEntry(
                    name=timeline.name,
                    schedule=schedule,
                    simulated=timeline,
                    costs=costs,
                    gap=summary.gap if self.iterations == 1 else None,
                )
                entries.append(entry)
        sizes = dict.fromkeys(
            f"{one.n_stages} stages, {one.n_microbatches} micro-batches"
            for one, _ in loaded
        )
        names = dict.fromkeys(one.name for one, _ in loaded)
        facts = [*sizes, *([f"costs {self.costs}"] if self.costs else [])]
        write_page(
            entries,
            self.out,
            title=", ".join(names),
            subtitle="; ".join(facts),
            command=command_text(self),
        )


@dataclass(frozen=True, kw_only=True)
class Trace(_Several):
    """Write timelines for Perfetto; one unit of time is a millisecond."""

    out: Path
    """Trace to write (Chrome's JSON format)."""

    def run(self) -> None:
        """Write, and name the file."""
        check_outputs(out=self.out)
        runs = [
            (timeline, costs)
            for schedule, costs in self.loaded()
            for timeline in self.timelines(schedule, costs)
        ]
        timelines, costs = zip(*runs, strict=True)
        write_trace(timelines, self.out, costs=costs)
        print(self.out)
