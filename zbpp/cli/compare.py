"""``zbpp compare``: all modes in a table, as data, as charts or as a page."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from zbpp.cli.flags import PlanFlags
from zbpp.cli.outputs import Picture, Terminal
from zbpp.cli.report import gain_text
from zbpp.cli.summary import Steady, Summary, short_memory, steady, summarize
from zbpp.core import Costs, PassKind, RequestError, Timeline
from zbpp.planning import BASELINE, MODES, Plan, canonical, is_auto, is_file
from zbpp.planning.modes import AUTO
from zbpp.simulator import (
    Table,
    bubble_rate,
    charts_html,
    plot_comparison,
    simulate,
    write_page,
)
from zbpp.training.options import LIST, Microbatches, Names, Stages, Switch
from zbpp.training.options import MODES as MODES_FLAG

Series = Mapping[str, Sequence[tuple[int, float]]]

_MOST_PASSES = 2048  # stages x micro-batches of a plan for the chart over m
_FEWEST_POINTS = 3  # of a chart: two modes are compared in the table
_CAPTION = (
    "gap: span over the lower bound for the same placement and, unless a limit is "
    "given, the same memory"
)


@dataclass(frozen=True)
class Planned:
    """A mode with its plan and figures."""

    plan: Plan

    @cached_property
    def summary(self) -> Summary:
        """Figures of one step."""
        return summarize(self.plan.schedule, self.plan.costs)

    @cached_property
    def steady(self) -> Steady:
        """Times of one step among many."""
        return steady(self.plan.schedule, self.plan.costs)


Rows = Mapping[str, Planned | str]
"""Each mode's plan, or why there is none."""


def planned_rows(modes: Iterable[str], plan: Callable[[str], Plan]) -> Rows:
    """Plan modes; a mode without a plan has the first line of its error as reason."""
    rows: dict[str, Planned | str] = {}
    for mode in modes:
        try:
            rows[mode] = Planned(plan(mode))
        except RequestError as error:
            rows[mode] = str(error).partition("\n")[0]
    return rows


@dataclass(frozen=True)
class Comparison:
    """Modes that were planned for the same costs.

    Args:
        name: of the costs; empty for those that stand if none are given.
        rows: each mode's plan, or why there is none.
        post_validation: how steps follow one another; None: validated later where the
            backward is split, else behind a barrier, as `zbpp.Pipeline` does it.
    """

    name: str
    rows: Rows
    post_validation: bool | None = None

    @property
    def planned(self) -> dict[str, Planned]:
        """The modes that have a plan."""
        return {
            mode: row for mode, row in self.rows.items() if not isinstance(row, str)
        }

    def step(self, mode: str) -> float:
        """Time of a step of a planned mode, one among many."""
        row = self.planned[mode]
        validates = self.post_validation
        if validates is None:
            validates = row.plan.schedule.runs(PassKind.W)
        if validates:
            return row.steady.step_time_post_validation
        return row.steady.step_time_barrier

    def data(self) -> dict[str, Any]:
        """The figures as values for JSON."""
        return {
            "costs": self.name or None,
            "modes": [self._mode_data(mode, row) for mode, row in self.rows.items()],
        }

    def _mode_data(self, mode: str, row: Planned | str) -> dict[str, Any]:
        if isinstance(row, str):
            return {"mode": mode, "reason": row}
        data = asdict(row.summary) | asdict(row.steady)
        data |= {"mode": mode, "step": self.step(mode)}
        if BASELINE in self.planned and self.step(mode) > 0:
            data["speed_up"] = self.step(BASELINE) / self.step(mode)
        return data

    @property
    def points(self) -> dict[str, tuple[float, float]]:
        """Peak memory and bubble rate of each planned mode."""
        return {
            mode: (max(row.summary.peak_memory), row.summary.bubble_rate)
            for mode, row in self.planned.items()
        }

    def table(self, title: str, *, with_steps: bool = False) -> Table:
        """Tabulate modes; the shortest span is bold. Steps take longer to simulate."""
        steps = ["step", f"speed-up over {BASELINE}"] * with_steps
        heads = ["mode", "chunks", *steps, "bubble", "span", "makespan"]
        table = Table([*heads, "peak memory", "gap"], title=title, caption=_CAPTION)
        shortest = min(row.summary.span for row in self.planned.values())
        for mode, row in self.rows.items():
            if isinstance(row, str):
                table.add(mode, look="dim", note=row)
                continue
            figures, times = row.summary, []
            if with_steps:
                data = self._mode_data(mode, row)
                speed_up = f"{data['speed_up']:.3f}" if "speed_up" in data else ""
                times = [f"{data['step']:.6g}", speed_up]
            table.add(
                mode,
                str(len(figures.placement)),
                *times,
                f"{figures.bubble_rate:.2%}",
                f"{figures.span:.6g}",
                f"{figures.makespan:.6g}",
                short_memory(max(figures.peak_memory)),
                f"{figures.gap:.2%}",
                look="bold" if figures.span <= shortest * (1 + 1e-9) else "",
            )
        return table

    def elements(self, title: str, series: Series | None = None) -> list[str]:
        """Table and charts, for a page."""
        elements = [self.table(title, with_steps=True).html()]
        limits = {row.plan.costs.memory_limit for row in self.planned.values()}
        limit = limits.pop() if len(limits) == 1 else None
        if series or len(self.points) >= _FEWEST_POINTS:
            limit = limit if isinstance(limit, int | float) else None
            elements.append(charts_html(self.points, series or {}, limit=limit))
        return elements

    def drawn(self, group: str = "") -> Iterator[tuple[Timeline, Costs]]:
        """A timeline of each mode: the baseline, `auto`, then the fastest first."""
        modes = (BASELINE, AUTO, *sorted(self.planned, key=self.step))
        for mode in dict.fromkeys(mode for mode in modes if mode in self.planned):
            plan = self.planned[mode].plan
            name = f"{mode}, {group}" if group else mode
            yield replace(simulate(plan.schedule, plan.costs), name=name), plan.costs


@dataclass(frozen=True, kw_only=True)
class Compare(PlanFlags):
    """Compare modes in one table, or in several: --costs a.json,b.json."""

    stages: Stages = field()
    """Pipeline stages."""
    microbatches: Microbatches = field()
    """Micro-batches of a step."""
    modes: Annotated[Names, MODES_FLAG] = field(default=(*MODES,), kw_only=False)
    costs: Annotated[tuple[Path, ...], LIST] = ()  # type: ignore[assignment]
    """Costs files, a table each; without one F, B and W take 1 each."""
    out: Picture | None = None
    """Also write a page (.html), or the charts alone (.png, .svg, .pdf)."""
    json: Switch = False
    """Print one JSON object instead of tables."""

    def run(self, words: Sequence[str]) -> None:
        """Print the tables; below, the reasons of impossible modes."""
        command = shlex.join(["zbpp", *words])
        paths: Sequence[Path | None] = self.costs or (None,)
        comparisons = [self._compare(path) for path in paths]
        if self.json:
            data = {
                "n_stages": self.stages,
                "n_microbatches": self.microbatches,
                "command": command,
                "comparisons": [comparison.data() for comparison in comparisons],
            }
            print(json.dumps(data))
        else:
            for comparison in comparisons:
                self._print(comparison)
        if self.out is not None:
            self._draw(self.out, comparisons, command)
            if not self.json:
                print(self.out)

    def _compare(self, path: Path | None) -> Comparison:
        modes = [name if is_file(name) else canonical(name) for name in self.modes]
        rows = planned_rows(modes, self._for(path)._plan)
        validates = self.enable_optimizer_post_validation
        comparison = Comparison("" if path is None else str(path), rows, validates)
        if not comparison.planned:
            raise RequestError(f"no mode is possible: {next(iter(rows.values()))}")
        return comparison

    def _for(self, path: Path | None) -> "Compare":
        """The flags with one costs file."""
        return replace(self, costs=path)  # type: ignore[arg-type]

    def _plan(self, mode: str) -> Plan:
        """Plan a mode, or read a file; with a layers file, split the layers for it."""
        has_chunks = is_file(mode) or MODES[mode].chunks is not None
        chunks = None if has_chunks else self.chunks_per_stage
        return replace(self, chunks_per_stage=chunks).plan(mode)

    def _title(self, comparison: Comparison | None = None) -> str:
        title = f"{self.stages} stages, {self.microbatches} micro-batches"
        several = comparison is not None and len(self.costs) > 1
        return f"{title}, {comparison.name}" if comparison and several else title

    def _print(self, comparison: Comparison) -> None:
        table = comparison.table(self._title(comparison))
        Terminal(highlight=False).print(table.for_terminal())
        for mode, row in comparison.rows.items():
            if isinstance(row, str):
                print(row if row.startswith(mode) else f"{mode}: {row}")
        planned = comparison.planned
        if AUTO in planned:
            print(planned[AUTO].plan.schedule.name)
        plans = {mode: row.plan for mode, row in planned.items() if row.plan.is_layered}
        widest = max(map(len, plans), default=0)
        for mode, plan in plans.items():
            split = " ".join(map(str, plan.split or ()))
            gain = plan.gain
            than = "" if gain is None else f": {gain_text(gain)} than even chunks"
            print(f"{mode:{widest}}  split {split}{than}")

    def _draw(self, out: Path, comparisons: Sequence[Comparison], command: str) -> None:
        """Write a page, or a picture of the charts of the first costs."""
        series = self._over_m(comparisons[0])
        if out.suffix.lower() != ".html":
            plot_comparison(comparisons[0].points, series, out)
            return
        facts = [f"costs {path}" for path in self.costs]
        facts += [f"layers {self.layers}"] if self.layers else []
        groups = [x.name if len(comparisons) > 1 else "" for x in comparisons]
        drawn = chain(*map(Comparison.drawn, comparisons, groups))
        timelines, costs = zip(*drawn, strict=True)
        write_page(
            list(timelines),
            out,
            costs=costs,
            above=[
                element
                for comparison in comparisons
                for element in comparison.elements(
                    self._title(comparison),
                    series if comparison is comparisons[0] else None,
                )
            ],
            title=self._title(),
            subtitle=", ".join(facts) or "F, B and W take 1 each, messages nothing",
            command=command,
        )

    def _over_m(self, comparison: Comparison) -> dict[str, list[tuple[int, float]]]:
        """Bubble rates for other numbers of micro-batches, by quick plans."""
        p = self.stages
        near = {p * factor // 2 for factor in (1, 2, 4, 8, 16)}
        near = {m for m in near if 0 < m * p <= _MOST_PASSES}
        path = Path(comparison.name) if comparison.name else None
        series: dict[str, list[tuple[int, float]]] = {}
        for mode, row in comparison.planned.items():
            if is_auto(mode) or is_file(mode):
                continue
            points = {self.microbatches: row.summary.bubble_rate}
            for m in near - {self.microbatches}:
                quick = replace(self._for(path), microbatches=m, effort="fast")
                try:
                    plan = quick._plan(mode)
                except RequestError:  # GPipe's memory grows with m
                    continue
                points[m] = bubble_rate(simulate(plan.schedule, plan.costs))
            series[mode] = sorted(points.items())
        return series
