"""Cost of the optimizer's barrier: post-validated steps against steps behind it.

    python benchmarks/post_validation/gain.py emulated      # real runs, sleeping stages
    python benchmarks/post_validation/gain.py published     # the paper's times
    python benchmarks/post_validation/gain.py rollbacks     # cost of speculation

``emulated``: one job (F, B or W of one chunk) takes ``--job_ms`` under every mode. The
runs take turns, so that a slow spell of the machine hits all of them.
"""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))

from parts.options import read_options
from parts.runs import in_processes
from parts.table import Table
from parts.turns import spread_of, take_turns

from zbpp.core import Costs, MemoryModel, Schedule
from zbpp.emulation.run import emulate
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import simulate, span, steady_step_time

TABLES = Path(__file__).parents[2] / "tests" / "data" / "paper_tables.json"
MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV")

# arXiv 2401.10241, the table on post-validation: samples per GPU and second under
# ZB-2p, post-validated and behind an all-reduce.
PUBLISHED = {
    "1.5B": (14.5, 13.11),
    "6.2B": (4.32, 4.00),
    "14.6B": (1.81, 1.68),
    "28.3B": (0.99, 0.91),
}


@dataclass(frozen=True)
class Gain:
    """Options of the measurement."""

    part: Literal["emulated", "published", "rollbacks"] = "emulated"
    stages: tuple[int, ...] = (4, 8)
    modes: tuple[str, ...] = MODES
    job_ms: float = 20.0
    optimizer_ms: float = 20.0
    message_ms: float = 1.0
    runs: int = 5
    steps: int = 10


def case_of(options: Gain, mode: str, stages: int) -> tuple[Schedule, Costs]:
    """A mode's schedule and costs in ms, m = 2p."""
    schedule = plan(mode, n_stages=stages, n_microbatches=2 * stages)
    each = options.job_ms * (schedule.placement.n_chunks // stages)
    message, step = options.message_ms, options.optimizer_ms
    return schedule, Costs(each, each, each, comm=message, optimizer=step)


def work(options: Gain, name: str, out: str) -> None:
    """One process of a run; rank 0 writes the outcome."""
    mode, stages, how = name.split("-")
    schedule, costs = case_of(options, mode, int(stages))
    outcome = emulate(
        schedule, costs, n_steps=options.steps, post_validation=how == "validated"
    )
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(outcome.as_dict()))


def emulated(options: Gain) -> Table:
    """Measured step times against each other and against the simulator."""
    table = Table(
        f"m = 2p, jobs of {options.job_ms:g} ms, optimizer {options.optimizer_ms:g} "
        f"ms, messages {options.message_ms:g} ms, median of {options.runs} runs of "
        f"{options.steps} steps",
        ("mode", "p", "barrier ms", "measured / simulated", "V ms",
         "measured / simulated", "faster", "simulated"),
    )  # fmt: skip
    for stages in options.stages:
        names = [
            f"{mode}-{stages}-{how}"
            for mode in options.modes
            for how in ("barrier", "validated")
        ]
        found = take_turns(names, options.runs, in_processes(work, options, stages))
        for mode in options.modes:
            cells, measured, simulated = [], [], []
            for how in ("barrier", "validated"):
                runs = found[f"{mode}-{stages}-{how}"]
                simulated.append(runs[0]["simulated_step_ms"])
                measured.append(statistics.median(run["step_ms"] for run in runs))
                ratios = [run["step_ms"] / simulated[-1] for run in runs]
                cells += [f"{measured[-1]:.0f}", spread_of(ratios)]
            gains = (f"{one[0] / one[1] - 1:+.1%}" for one in (measured, simulated))
            table.add(mode, stages, *cells, *gains)
    return table


def published(_: Gain) -> Table:
    """The paper's models, simulated with its times: what is lost to the barrier."""
    rows = json.loads(TABLES.read_text(encoding="utf-8"))["rows"]
    table = Table(
        "ZB-2p, times of arXiv 2401.10241, messages as there",
        ("model", "p", "m", "span ms", "V ms", "barrier ms", "simulated", "published"),
    )
    for row in rows:
        costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
        memory = MemoryModel(1.0, row["m_w_over_m_b"])
        sizes = {"n_stages": row["p"], "n_microbatches": row["m"]}
        schedule = plan("ZBH2", **sizes, costs=costs.with_memory(memory))
        barrier = steady_step_time(schedule, costs)
        validated = steady_step_time(post_validated(schedule), costs)
        fast, slow = PUBLISHED[row["model"]]
        smallest = row["m"] == 3 * row["p"]
        table.add(
            row["model"],
            row["p"],
            row["m"],
            f"{span(simulate(schedule, costs)):.0f}",
            f"{validated:.0f}",
            f"{barrier:.0f}",
            f"{barrier / validated - 1:+.1%}",
            f"{fast / slow - 1:+.1%}" if smallest else "",
        )
    return table


def rollbacks(options: Gain) -> Table:
    """Gain if speculative steps and V's take their real times, simulated.

    The times in plain optimizer steps are those of `cost.py`, on a CPU.
    """
    ways = {
        "free": (1.0, 0.0),
        "deferred": (1.6, 1.1),
    }
    plain = options.optimizer_ms / options.job_ms
    table = Table(
        f"m = 3p, F = B = W = 1, messages 0.1, plain optimizer step {plain:g}",
        ("mode", "p", *ways),
    )
    for stages, mode in product(options.stages, (*options.modes, "VHalf", "VMin")):
        cells = [mode, str(stages)]
        barrier = Costs(comm=0.1, optimizer=plain)
        schedule = plan(mode, n_stages=stages, n_microbatches=3 * stages, costs=barrier)
        checked = post_validated(schedule)
        for step, check in ways.values():
            early = replace(barrier, optimizer=step * plain, validation=check * plain)
            gain = steady_step_time(schedule, barrier) / steady_step_time(
                checked, early
            )
            cells.append(f"{gain - 1:+.1%}")
        table.add(*cells)
    return table


def main() -> None:
    """Print one table."""
    options = read_options(Gain)
    parts = {part.__name__: part for part in (emulated, published, rollbacks)}
    parts[options.part](options).show()


if __name__ == "__main__":
    main()
