"""``zbpp show``: schedules as text, as a picture, as a page, or as a trace."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zbpp.cli.compare import Comparison, Planned
from zbpp.cli.flags import ScheduleFlags
from zbpp.cli.outputs import Drawing
from zbpp.cli.report import print_report
from zbpp.cli.summary import steady, summarize
from zbpp.core import RequestError
from zbpp.planning import Plan
from zbpp.simulator import plot, write_page, write_trace
from zbpp.training.options import Switch


@dataclass(frozen=True, kw_only=True)
class Show(ScheduleFlags):
    """Show a schedule as text: picture, bubble rate, memory, gap to the lower bound; or
    schedules as a picture, a page or a trace: -o x.svg, x.html, x.json.
    """

    out: Drawing | None = None
    """Write .png, .svg, .pdf, a page (.html), a trace for Perfetto (.json)."""
    json: Switch = False
    """Print one JSON object instead."""

    def run(self, words: Sequence[str]) -> None:
        """Print the report, or write the file and name it."""
        plans = self.load()
        if self.out is not None:
            self._draw(plans, self.out, shlex.join(["zbpp", *words]))
            print(self.out)
            return
        if len(plans) > 1:
            raise RequestError(
                "several schedules are named; with --out they are drawn on one time "
                "axis, and zbpp compare has figures of them"
            )
        (plan,) = plans
        schedule, costs = plan.schedule, plan.costs
        if self.json:
            summary, among = summarize(schedule, costs), steady(schedule, costs)
            print(json.dumps(asdict(summary) | asdict(among)))
        else:
            timelines = self.timelines(schedule, costs) if self.iterations > 1 else ()
            print_report(schedule, costs, timelines, costs_name=self.costs_name(plan))

    def _draw(self, plans: Sequence[Plan], out: Path, command: str) -> None:
        """Draw schedules on one time axis, as the name of the file ends.

        In a trace a unit of time is a millisecond.
        """
        drawn = [
            (plan, timeline)
            for plan in plans
            for timeline in self.timelines(plan.schedule, plan.costs)
        ]
        timelines = [timeline for _, timeline in drawn]
        if out.suffix.lower() == ".json":
            write_trace(timelines, out, costs=[plan.costs for plan, _ in drawn])
            return
        if out.suffix.lower() != ".html":
            plot(timelines, out, costs=plans[0].costs)
            return
        rows = {plan.schedule.name: Planned(plan) for plan in plans}
        schedules = [plan.schedule for plan in plans]
        facts = [
            f"{x.n_stages} stages, {x.n_microbatches} micro-batches" for x in schedules
        ]
        facts += [f"costs {self.costs}"] if self.costs else []
        write_page(
            timelines,
            out,
            costs=[plan.costs for plan, _ in drawn],
            above=Comparison("", rows).elements("Modes"),
            title=", ".join(dict.fromkeys(x.name for x in schedules)),
            subtitle="; ".join(dict.fromkeys(facts)),
            command=command,
        )
