"""``zbpp compare``: all modes in a table, as data, as charts or as a page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zbpp.cli.flags import PlanFlags
from zbpp.cli.outputs import check_outputs, check_picture
from zbpp.cli.pictures.comparison import Comparison, Planned, csv_text
from zbpp.cli.report import gain_text, print_comparison
from zbpp.cli.several import command_text, paths_in, schedules_in
from zbpp.cli.summary import summarize
from zbpp.core import RequestError
from zbpp.core.files.json_text import write_file
from zbpp.planning import MODES, canonical, is_auto, is_file, make_plan
from zbpp.planning.modes import AUTO
from zbpp.simulator import bubble_rate, plot_comparison, simulate
from zbpp.simulator.page import write_page
from zbpp.training.options import MODES_FLAG, flag

__all__ = ["Compare"]

_MOST_PASSES = 2048  # stages x micro-batches of a plan for the chart over m


@dataclass(frozen=True, kw_only=True)
class Compare(PlanFlags):
    """Compare modes in one table, or in several: --costs a.json,b.json."""

    stages: int = flag("pipeline stages")
    microbatches: int = flag("micro-batches of a step")
    modes: str = flag(
        "modes and schedule files to compare; left out: all modes",
        ",".join(MODES),
        **MODES_FLAG,
    )
    costs: Path | None = flag(
        "costs files, a table each; without one F, B and W take 1 each",
        None,
        metavar="PATH,..",
        many=True,
    )
    out: Path | None = flag(
        "also write a page with table, charts and timelines (.html), or the charts "
        "alone (.png, .svg, .pdf)",
        None,
    )
    csv: Path | None = flag("also write the table as CSV", None)
    json: bool = flag("print one JSON object instead of tables", False, pair=False)

    def run(self) -> None:
        """Print the tables; a mode that cannot be had gives its reason below."""
        check_outputs(out=self.out, csv=self.csv)
        if self.out is not None:
            check_picture(self.out)
        comparisons = [
            replace(self, costs=path)._compare() for path in paths_in(self.costs)
        ]
        if self.json:
            data = {
                "n_stages": self.stages,
                "n_microbatches": self.microbatches,
                "command": command_text(self),
                "comparisons": [comparison.data() for comparison in comparisons],
            }
            print(json.dumps(data))
        else:
            for comparison in comparisons:
                self._print(comparison, comparison.name if len(comparisons) > 1 else "")
        if self.csv is not None:
            write_file(self.csv, csv_text(comparisons))
        if self.out is not None:
            self._draw(self.out, comparisons)
        written = [path for path in (self.csv, self.out) if path is not None]
        if written and not self.json:
            print(*written, sep="\n")

    def _compare(self) -> Comparison:
        rows: dict[str, Planned | str] = {}
        for name in schedules_in(self.modes):
            mode = name if is_file(name) else canonical(name)
            try:
                rows[mode] = self._plan(mode)
            except RequestError as error:
                rows[mode] = str(error).partition("\n")[0]
        name = "" if self.costs is None else str(self.costs)
        comparison = Comparison(name, rows, self.enable_optimizer_post_validation)
        if not comparison.planned:
            raise RequestError(f"no mode can be had: {next(iter(rows.values()))}")
        return comparison

    def _plan(self, mode: str) -> Planned:
        """Plan a mode, or read a file; with a layers file, split the layers for it."""
        has_chunks = is_file(mode) or MODES[mode].chunks is not None
        chunks = None if has_chunks else self.chunks_per_stage
        request = replace(self, chunks_per_stage=chunks).request(mode)
        plan = make_plan(request)
        plan = replace(plan, schedule=self.with_collectives(plan.schedule))
        return Planned(plan, summarize(plan.schedule, plan.costs))

    def _print(self, comparison: Comparison, name: str) -> None:
        validated = self.enable_optimizer_post_validation
        rows, planned = comparison.rows, comparison.planned
        title = f"{self.stages} stages, {self.microbatches} micro-batches"
        print_comparison(
            [
                (mode, row if isinstance(row, str) else row.summary)
                for mode, row in rows.items()
            ],
            title=f"{title}, {name}" if name else title,
            steps=None
            if validated is None
            else {mode: row.steady for mode, row in planned.items()},
            post_validation=bool(validated),
        )
        if AUTO in planned:
            print(planned[AUTO].plan.schedule.name)
        plans = {mode: row.plan for mode, row in planned.items() if row.plan.is_layered}
        widest = max(map(len, plans), default=0)
        for mode, plan in plans.items():
            split = " ".join(map(str, plan.split or ()))
            gain = plan.gain
            than = "" if gain is None else f": {gain_text(gain)} than even chunks"
            print(f"{mode:{widest}}  split {split}{than}")

    def _draw(self, out: Path, comparisons: Sequence[Comparison]) -> None:
        """Write a page, or a picture of the charts of the first costs."""
        series = replace(self, costs=paths_in(self.costs)[0])._over_m(comparisons[0])
        if out.suffix.lower() != ".html":
            points = {
                mode: (max(row.summary.peak_memory), row.summary.bubble_rate)
                for mode, row in comparisons[0].planned.items()
            }
            plot_comparison(points, series, out)
            return
        facts = [
            f"costs {comparison.name}" for comparison in comparisons if comparison.name
        ]
        facts += [f"layers {self.layers}"] if self.layers else []
        write_page(
            [
                entry
                for comparison in comparisons
                for entry in comparison.entries(
                    comparison.name if len(comparisons) > 1 else ""
                )
            ],
            out,
            title=f"{self.stages} stages, {self.microbatches} micro-batches",
            subtitle=", ".join(facts) or "F, B and W take 1 each, messages nothing",
            command=command_text(self),
            by_microbatches=series,
        )

    def _over_m(self, comparison: Comparison) -> dict[str, list[tuple[int, float]]]:
        """Bubble rates for other numbers of micro-batches, by quick plans."""
        p = self.stages
        near = {p * factor // 2 for factor in (1, 2, 4, 8, 16)}
        near = {m for m in near if 0 < m * p <= _MOST_PASSES}
        series: dict[str, list[tuple[int, float]]] = {}
        for mode, row in comparison.planned.items():
            if is_auto(mode) or is_file(mode):
                continue
            points = {self.microbatches: row.summary.bubble_rate}
            for m in near - {self.microbatches}:
                quick = replace(self, microbatches=m, effort="fast")
                try:
                    plan = quick._plan(mode).plan
                except RequestError:  # GPipe's memory grows with m
                    continue
                points[m] = bubble_rate(simulate(plan.schedule, plan.costs))
            series[mode] = sorted(points.items())
        return series
