"""Collectives planned as jobs, on stages that sleep, beside sums at the end of a step.

    python benchmarks/collectives.py --stages 4 --microbatches 8

    planned   a chunk's gradients are summed from its last W on, beside other passes
    at end    all sums begin behind the stage's last pass

Layers and collectives sleep. Both are simulated as well: the step that is measured is
to be the simulated one, and what the plan gains over the other too.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from parts.options import read_options
from parts.runs import in_processes
from parts.table import Table
from parts.turns import spread_of, take_turns

from zbpp.core import Collective, CollectiveKind, Costs, Schedule
from zbpp.emulation.run import emulate
from zbpp.planning import plan
from zbpp.schedules import add_collectives


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    stages: int = 4
    microbatches: int = 8
    job_ms: float = 20.0
    gather_ms: float = 30.0
    """Of a stage's parameters."""
    sum_ms: float = 60.0
    """Of a stage's gradients."""
    runs: int = 3
    steps: int = 5
    modes: tuple[str, ...] = ("1F1B", "ZBH1", "ZBV")


def at_end(schedule: Schedule) -> Schedule:
    """Move all sums behind the last pass of their stage."""
    orders = []
    for order in schedule.orders:
        sums = [
            job
            for job in order
            if isinstance(job, Collective) and job.kind is CollectiveKind.REDUCE_GRAD
        ]
        rest = [job for job in order if job not in sums]
        first = next(
            place
            for place, job in enumerate(rest)
            if isinstance(job, Collective) and job.kind is CollectiveKind.REDUCE_WAIT
        )
        orders.append((*rest[:first], *sums, *rest[first:]))
    return replace(schedule, orders=tuple(orders))


def measure(options: Options, mode: str, file: str) -> None:
    """Run both ways; every rank calls."""
    costs = Costs(
        *(3 * (options.job_ms,)),
        all_gather=options.gather_ms,
        reduce_scatter=options.sum_ms,
    )
    schedule = plan(
        mode,
        n_stages=options.stages,
        n_microbatches=options.microbatches,
        costs=costs,
    )
    planned = add_collectives(schedule, shards=True)
    found = {}
    for name, one in {"planned": planned, "at end": at_end(planned)}.items():
        outcome = emulate(one, costs, n_steps=options.steps)
        found[name] = [outcome.step_ms, outcome.simulated_step_ms]
    if int(os.environ["RANK"]) == 0:
        Path(file).write_text(json.dumps(found))


def main() -> None:
    """Measure all modes and print a table."""
    options = read_options(Options)
    run = in_processes(measure, options, options.stages)
    table = Table(
        f"p={options.stages} m={options.microbatches}, jobs of {options.job_ms:g} ms, "
        f"load {os.getloadavg()[0]:.1f}",
        ("mode", "simulated ms", "planned / simulated", "at end / simulated",
         "gain simulated ms", "gain measured ms"),
    )  # fmt: skip
    for mode, runs in take_turns(options.modes, options.runs, run).items():
        (_, simulated), (_, late) = runs[0]["planned"], runs[0]["at end"]
        gains = [one["at end"][0] - one["planned"][0] for one in runs]
        table.add(
            mode,
            f"{simulated:.0f}",
            spread_of([one["planned"][0] / simulated for one in runs]),
            spread_of([one["at end"][0] / late for one in runs]),
            f"{late - simulated:.0f}",
            spread_of(gains),
        )
    table.show()


if __name__ == "__main__":
    main()
