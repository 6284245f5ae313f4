"""Measured timelines of trace files beside the simulation, for ``zbpp compare``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zbpp.cli.outputs import Terminal
from zbpp.cli.several import paths_in
from zbpp.core import (
    Check,
    Costs,
    Pass,
    RequestError,
    Schedule,
    Timeline,
    passes_in,
)
from zbpp.core.timeline import extent
from zbpp.simulator import read_trace, simulate, span, step_time
from zbpp.simulator.page import PageEntry
from zbpp.simulator.tables import Table

__all__ = ["Run", "beside", "print_runs", "read_runs"]

_SIMULATED, _MEASURED = ", simulated", ", measured"
_FIGURES = {"measured_over_simulated": "f", "time_error": "g", "start_error": "g"}


@dataclass(frozen=True)
class Run:
    """A measured step, beside the simulation of the same order where that can be had.

    Args:
        name: of the run.
        mode: the planned mode whose order it has; None: none.
        entry: both timelines.
    """

    name: str
    mode: str | None
    entry: PageEntry

    def data(self) -> dict[str, Any]:
        """The figures as values for JSON; times in ms."""
        entry, kinds = self.entry, self.entry.errors_by_kind()
        return {
            "name": self.name,
            "mode": self.mode,
            "bubble_rate": entry.measured_bubble,
            "bubble_rate_simulated": entry.bubble,
            "span": span(entry.measured) if entry.measured else None,
            "span_simulated": span(entry.simulated) if entry.simulated else None,
            "kinds": {
                kind: {
                    "measured_over_simulated": measured / simulated,
                    "time_error": kinds[kind][0],
                    "start_error": kinds[kind][1],
                }
                for kind, (simulated, measured) in entry.times_by_kind().items()
            },
        }


def read_runs(
    path: Path | None, *, n_stages: int, n_microbatches: int
) -> list[Timeline]:
    """Read the measured timelines of trace files, separated by commas.

    Raises:
        RequestError: a file has none, or one of other sizes.
    """
    timelines: list[Timeline] = []
    for file in paths_in(path):
        if file is None:
            continue
        runs = [run for run in read_trace(file) if not run.name.endswith(_SIMULATED)]
        if not runs:
            raise RequestError(f"{file}: there is no measured timeline in it")
        for run in runs:
            sizes = run.placement.n_stages, run.n_microbatches
            if sizes != (n_stages, n_microbatches):
                raise RequestError(
                    f"{file}: {run.name} has {sizes[0]} stages and {sizes[1]} "
                    f"micro-batches; compare with --stages {sizes[0]} --microbatches "
                    f"{sizes[1]}"
                )
            name = run.name.removesuffix(_MEASURED)
            if name in (timeline.name for timeline in timelines):
                name = f"{name} ({file.stem})"
            timelines.append(replace(run, name=name))
    return timelines


def beside(
    runs: Sequence[Timeline],
    planned: Mapping[str, tuple[Schedule, Costs]],
    costs: Costs | None,
) -> list[Run]:
    """Put a simulation beside each run: the mode's of the same order, or its own.

    Args:
        runs: in ms.
        planned: modes with their costs.
        costs: in ms, for orders that no mode has; None: these are not simulated.
    """
    paired_runs = []
    for run in runs:
        mode = next(
            (
                mode
                for mode, (schedule, _) in planned.items()
                if mode.lower() == run.name.partition(" (")[0].lower()
                and schedule.placement == run.placement
                and _passes(schedule) == _passes(run)
            ),
            None,
        )
        schedule, of = (_order(run), costs) if mode is None else planned[mode]
        simulated = None if of is None else _simulated(schedule, of)
        name = f"{run.name}, as run" if mode is None and run.name in planned else ""
        entry = PageEntry(
            name=name or run.name,
            schedule=schedule,
            simulated=simulated,
            measured=run,
            costs=None if simulated is None else of,
            step_measured=_step(run),
        )
        paired_runs.append(Run(entry.name, mode, entry))
    return paired_runs


def print_runs(runs: Sequence[Run]) -> None:
    """Print a table of runs."""
    table = Table(
        [
            "run",
            "bubble (simulated)",
            "span (simulated)",
            "jobs",
            "ratio",
            "error of times",
            "of starts",
        ],
        title="measured",
        caption="simulated: the same order; jobs: their measured time over the "
        "simulated one, and the mean error of a job's time and of its start",
    )
    for run in runs:
        data = run.data()
        kinds = data["kinds"]
        table.add(
            run.name,
            _both(data, "bubble_rate", ".1%"),
            _both(data, "span", ".4g"),
            "\n".join(kinds),
            *(
                "\n".join(f"{figures[name]:.3{form}}" for figures in kinds.values())
                for name, form in _FIGURES.items()
            ),
        )
    Terminal(highlight=False).print(table.for_terminal())


def _both(data: dict[str, Any], name: str, form: str) -> str:
    simulated = data[f"{name}_simulated"]
    simulated_text = "" if simulated is None else f" ({simulated:{form}})"
    return f"{data[name]:{form}}{simulated_text}"


def _passes(order: Schedule | Timeline) -> list[list[Pass]]:
    if isinstance(order, Timeline):
        orders = [[slot.job for slot in row] for row in order.rows]
    else:
        orders = [list(row) for row in order.orders]
    return [[part for job in row for part in passes_in(job)] for row in orders]


def _order(run: Timeline) -> Schedule:
    orders = tuple(tuple(slot.job for slot in row) for row in run.rows)
    return Schedule(run.name, run.placement, run.n_microbatches, orders)


def _simulated(schedule: Schedule, costs: Costs) -> Timeline | None:
    """The timeline; None where the costs are those of other chunks."""
    try:
        return simulate(schedule, costs)
    except RequestError:
        return None


def _step(run: Timeline) -> float:
    """Time of a step among many: behind V's the longest of a stage, else of all."""
    validated = any(isinstance(slot.job, Check) for row in run.rows for slot in row)
    return max(map(extent, run.rows)) if validated else step_time(run)
