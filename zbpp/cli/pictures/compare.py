"""``zbpp compare``: all modes in a table, as data, as charts or as a page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from zbpp.cli.flags import ChunksOf, shown_as
from zbpp.cli.layers_report import comparison_of_splits
from zbpp.cli.outputs import check_outputs, check_picture
from zbpp.cli.pictures.comparison import Comparison, Planned, csv_text
from zbpp.cli.pictures.measured import Run, beside, print_runs, read_runs
from zbpp.cli.pictures.meshes import MeshFlags
from zbpp.cli.pictures.several import command_text, paths_in
from zbpp.cli.report import print_comparison
from zbpp.cli.summary import summarize
from zbpp.core import RequestError
from zbpp.core.files.json_text import write_file
from zbpp.planning import MODES, is_auto, make_plan
from zbpp.simulator import bubble_rate, plot_comparison, simulate
from zbpp.simulator.page import write_page

__all__ = ["Compare"]

_MOST_PASSES = 2048  # stages x micro-batches of a plan for the chart over m


@dataclass(frozen=True, kw_only=True)
class Compare(MeshFlags):
    """Compare all modes in one table, or several: --costs a.json,b.json; or all meshes
    of stages and replicas: --devices."""

    stages: Annotated[int | None, shown_as("INT")] = None
    """Pipeline stages; left out with --devices."""
    microbatches: int
    """Micro-batches in a step; with --devices over all replicas."""
    chunks_per_stage: ChunksOf = None
    out: Annotated[Path | None, shown_as("PATH")] = None
    """Also write a page with table, charts and timelines (.html), or the charts alone
    (.png, .svg, .pdf)."""
    csv: Annotated[Path | None, shown_as("PATH")] = None
    """Also write the table as CSV."""
    measured: Annotated[Path | None, shown_as("PATH")] = None
    """Trace of zbpp bench, of zbpp train --trace or of zbpp.simulator.write_trace: its
    measured timelines stand below the simulated ones, which --costs times in ms."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Print the tables; a mode that cannot be had gives its reason below."""
        if (self.stages is None) == (self.devices is None):
            raise RequestError(
                "give --stages to compare modes, or --devices to compare meshes"
            )
        check_outputs(out=self.out, csv=self.csv)
        if self.out is not None:
            check_picture(self.out)
        if self.devices is not None:
            self._check_meshes()
            self.compare_meshes(self.microbatches, as_json=self.json)
            return
        found = [replace(self, costs=path)._compare() for path in paths_in(self.costs)]
        if self.json:
            data = {
                "n_stages": self.stages,
                "n_microbatches": self.microbatches,
                "command": command_text(self),
                "comparisons": [one.data() for one in found],
            }
            print(json.dumps(data))
        else:
            for one in found:
                self._print(one, one.name if len(found) > 1 else "")
                if one.runs:
                    print_runs(one.runs)
        if self.csv is not None:
            write_file(self.csv, csv_text(found))
        if self.out is not None:
            self._draw(self.out, found)
        written = [path for path in (self.csv, self.out) if path is not None]
        if written and not self.json:
            print(*written, sep="\n")

    def _check_meshes(self) -> None:
        """Refuse flags that say nothing of meshes."""
        for name in ("out", "csv", "chunks_per_stage", "split", "measured"):
            if getattr(self, name) is not None:
                raise RequestError(f"--{name} does not go with --devices; leave it out")
        if self.data_parallel != 1:
            raise RequestError(
                "--data_parallel does not go with --devices, which tries every number "
                "of replicas; leave it out"
            )

    def _compare(self) -> Comparison:
        rows: dict[str, Planned | str] = {}
        for mode in MODES:
            try:
                rows[mode] = self._plan(mode)
            except RequestError as error:
                rows[mode] = str(error).partition("\n")[0]
        name = "" if self.costs is None else str(self.costs)
        comparison = Comparison(name, rows, self.enable_optimizer_post_validation)
        if self.measured is not None:
            comparison = replace(comparison, runs=self._runs(comparison))
        if not comparison.planned:
            raise RequestError(f"no mode can be had: {next(iter(rows.values()))}")
        return comparison

    def _runs(self, comparison: Comparison) -> tuple[Run, ...]:
        """Read the measured runs."""
        if self.costs is None and self.layers is None:
            raise RequestError(
                "--measured needs --costs or --layers in ms, such as zbpp profile "
                "writes: without times nothing can be set beside what was measured"
            )
        assert self.stages is not None
        known = None if self.costs is None else self.chunk_costs()
        runs = read_runs(
            self.measured, n_stages=self.stages, n_microbatches=self.microbatches
        )
        planned = {
            mode: (row.plan.schedule, row.plan.costs)
            for mode, row in comparison.planned.items()
        }
        return tuple(beside(runs, planned, known))

    def _plan(self, mode: str) -> Planned:
        """Plan a mode; with a layers file, split the layers for it."""
        request = self.request(
            mode,
            stages=self.stages,
            microbatches=self.microbatches,
            chunks_per_stage=None if MODES[mode].chunks else self.chunks_per_stage,
        )
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
            memory_unit=comparison.memory_unit,
            steps=None
            if validated is None
            else {mode: row.steady for mode, row in planned.items()},
            post_validation=bool(validated),
        )
        plans = {mode: row.plan for mode, row in planned.items() if row.plan.is_layered}
        if plans:
            print(*comparison_of_splits(plans), sep="\n")

    def _draw(self, out: Path, found: Sequence[Comparison]) -> None:
        """Write a page, or a picture of the charts of the first costs."""
        series = replace(self, costs=paths_in(self.costs)[0])._over_m(found[0])
        if out.suffix.lower() != ".html":
            points = {
                mode: (max(row.summary.peak_memory), row.summary.bubble_rate)
                for mode, row in found[0].planned.items()
            }
            plot_comparison(points, series, out)
            return
        facts = [f"costs {one.name}" for one in found if one.name]
        facts += [f"layers {self.layers}"] if self.layers else []
        write_page(
            [
                entry
                for one in found
                for entry in one.entries(one.name if len(found) > 1 else "")
            ],
            out,
            title=f"{self.stages} stages, {self.microbatches} micro-batches",
            subtitle=", ".join(facts) or "F, B and W take 1 each, messages nothing",
            command=command_text(self),
            by_microbatches=series,
        )

    def _over_m(self, comparison: Comparison) -> dict[str, list[tuple[int, float]]]:
        """Bubble rates for other numbers of micro-batches, by quick plans."""
        p = self.stages or 1
        near = {p * factor // 2 for factor in (1, 2, 4, 8, 16)}
        near = {m for m in near if 0 < m * p <= _MOST_PASSES}
        found: dict[str, list[tuple[int, float]]] = {}
        for mode, row in comparison.planned.items():
            if is_auto(mode):
                continue
            points = {self.microbatches: row.summary.bubble_rate}
            for m in near - {self.microbatches}:
                quick = replace(self, microbatches=m, effort="fast")
                try:
                    other = quick._plan(mode).plan
                except RequestError:  # GPipe's memory grows with m
                    continue
                points[m] = bubble_rate(simulate(other.schedule, other.costs))
            found[mode] = sorted(points.items())
        return found
