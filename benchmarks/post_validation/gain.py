"""Cost of the optimizer's barrier: post-validated steps against steps behind it.

    python benchmarks/post_validation/gain.py emulated      # real runs, sleeping stages
    python benchmarks/post_validation/gain.py published     # the paper's times
    python benchmarks/post_validation/gain.py protocols     # chain against all-reduce
    python benchmarks/post_validation/gain.py rollbacks     # cost of speculation

``emulated``: one job (F, B or W of one chunk) takes ``--job_ms`` under every mode. The
runs take turns, so that a slow spell of the machine hits all of them.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from zbpp.core import ChunkCosts, Costs, MemoryModel, Schedule
from zbpp.emulation.run import emulate
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import simulate, span, steady_step_time
from zbpp.training.launch import launch

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

    part: tyro.conf.Positional[
        Literal["emulated", "published", "protocols", "rollbacks"]
    ] = "emulated"
    stages: tuple[int, ...] = (4, 8)
    modes: tuple[str, ...] = MODES
    job_ms: float = 20.0
    optimizer_ms: float = 20.0
    message_ms: float = 1.0
    runs: int = 5
    steps: int = 10
    pipelines: int = 30


def cases(options: Gain) -> list[tuple[str, int, Schedule, Costs]]:
    """Modes and numbers of stages with their schedule and costs in ms, m = 2p."""
    found = []
    for stages in options.stages:
        for mode in options.modes:
            schedule = plan(mode, n_stages=stages, n_microbatches=2 * stages)
            each = options.job_ms * (schedule.placement.n_chunks // stages)
            costs = Costs(
                each,
                each,
                each,
                comm=options.message_ms,
                optimizer=options.optimizer_ms,
            )
            found.append((mode, stages, schedule, costs))
    return found


def worker(
    schedule: Schedule, costs: Costs, steps: int, validated: bool, out: str
) -> None:
    """One process of a run; rank 0 writes the outcome."""
    outcome = emulate(schedule, costs, n_steps=steps, post_validation=validated)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(outcome.as_dict()))


def run(options: Gain, schedule: Schedule, costs: Costs, validated: bool) -> dict:
    """One run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "outcome.json")
        arguments = (schedule, costs, options.steps, validated, out)
        launch(worker, arguments, schedule.n_stages, device="cpu")
        outcome: dict = json.loads(Path(out).read_text())
        return outcome


def emulated(options: Gain) -> Table:
    """Measured step times against each other and against the simulator."""
    every = cases(options)
    ratios: dict[tuple[int, bool], list[float]] = {}
    simulated: dict[tuple[int, bool], float] = {}
    for _ in range(options.runs):
        for i, (_, _, schedule, costs) in enumerate(every):
            for validated in (False, True):
                outcome = run(options, schedule, costs, validated)
                simulated[i, validated] = outcome["simulated_step_ms"]
                ratios.setdefault((i, validated), []).append(outcome["step_ms"])
    table = Table(
        title=f"m = 2p, jobs of {options.job_ms:g} ms, optimizer "
        f"{options.optimizer_ms:g} ms, messages {options.message_ms:g} ms, median of "
        f"{options.runs} runs of {options.steps} steps"
    )
    for column in ("mode", "p", "barrier ms", "measured / simulated", "V ms",
                   "measured / simulated", "faster", "simulated"):  # fmt: skip
        table.add_column(column, justify="right")
    for i, (mode, stages, *_) in enumerate(every):
        cells = [mode, str(stages)]
        medians = {}
        for validated in (False, True):
            runs, expected = sorted(ratios[i, validated]), simulated[i, validated]
            medians[validated] = statistics.median(runs)
            cells += [
                f"{medians[validated]:.0f}",
                f"{medians[validated] / expected:.3f} "
                f"({runs[0] / expected:.3f}-{runs[-1] / expected:.3f})",
            ]
        cells += [
            f"{medians[False] / medians[True] - 1:+.1%}",
            f"{simulated[i, False] / simulated[i, True] - 1:+.1%}",
        ]
        table.add_row(*cells)
    return table


def published(_: Gain) -> Table:
    """The paper's models, simulated with its times: what is lost to the barrier."""
    rows = json.loads(TABLES.read_text(encoding="utf-8"))["rows"]
    table = Table(title="ZB-2p, times of arXiv 2401.10241, messages as there")
    for column in ("model", "p", "m", "span ms", "V ms", "barrier ms", "simulated",
                   "published"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
        memory = MemoryModel(1.0, row["m_w_over_m_b"])
        sizes = {"n_stages": row["p"], "n_microbatches": row["m"]}
        schedule = plan("ZBH2", **sizes, costs=costs, memory=memory)
        barrier = steady_step_time(schedule, costs)
        validated = steady_step_time(post_validated(schedule), costs)
        fast, slow = PUBLISHED[row["model"]]
        smallest = row["m"] == 3 * row["p"]
        table.add_row(
            row["model"],
            str(row["p"]),
            str(row["m"]),
            f"{span(simulate(schedule, costs)):.0f}",
            f"{validated:.0f}",
            f"{barrier:.0f}",
            f"{barrier / validated - 1:+.1%}",
            f"{fast / slow - 1:+.1%}" if smallest else "",
        )
    return table


def chain(times: ChunkCosts, ends: Sequence[float]) -> tuple[list[float], list[float]]:
    """The published protocol: partial sums go down the stages, the whole sum up.

    O of a stage waits for the sum over the stages before it; V for the whole sum, which
    the last stage sends back, stage by stage (arXiv 2401.10241, section 4).
    """
    hop, last = max(times.hops, default=0.0), len(ends) - 1
    steps: list[float] = []
    for stage, end in enumerate(ends):
        steps.append(max(end, steps[-1] + hop) if stage else end)
    return steps, [steps[last] + (last - stage) * hop for stage in range(last + 1)]


def protocols(options: Gain) -> Table:
    """The published protocol against ours, simulated on stages that differ."""
    table = Table(
        title=f"{options.pipelines} pipelines of 4 or 8 stages +-30 %, m = 2p, no "
        "optimizer time"
    )
    for column in ("mode", "message", "chain / all-reduce", "barrier / all-reduce"):
        table.add_column(column, justify="right")
    for mode, message in product(options.modes, (0.0, 0.1, 0.5, 1.0)):
        generator = random.Random(0)
        steps = [
            protocol_steps(mode, message, generator) for _ in range(options.pipelines)
        ]
        cells = [mode, f"{message:g} F"]
        for other in (0, 1):
            found = sorted(step[other] / step[2] for step in steps)
            mean = statistics.mean(found)
            cells.append(f"{mean:.3f} ({found[0]:.3f}-{found[-1]:.3f})")
        table.add_row(*cells)
    return table


def protocol_steps(
    mode: str, message: float, generator: random.Random
) -> tuple[float, float, float]:
    """Steady steps of a random pipeline: chain, barrier, all-reduce."""
    stages = generator.choice((4, 8))
    sizes = {"n_stages": stages, "n_microbatches": 2 * stages, "effort": "fast"}
    n_chunks = plan(mode, **sizes).placement.n_chunks
    times = tuple(generator.uniform(0.7, 1.3) for _ in range(n_chunks))
    costs = Costs(times, times, times, message)
    schedule = plan(mode, **sizes, costs=costs)
    checked = post_validated(schedule)
    return (
        steady_step_time(checked, costs, protocol=chain),
        steady_step_time(schedule, costs),
        steady_step_time(checked, costs),
    )


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
        title=f"m = 3p, F = B = W = 1, messages 0.1, plain optimizer step {plain:g}"
    )
    for column in ("mode", "p", *ways):
        table.add_column(column, justify="right")
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
        table.add_row(*cells)
    return table


def main() -> None:
    """Print one table."""
    options = tyro.cli(Gain, use_underscores=True)
    parts = {
        part.__name__: part for part in (emulated, published, protocols, rollbacks)
    }
    Console(width=110).print(parts[options.part](options))


if __name__ == "__main__":
    main()
