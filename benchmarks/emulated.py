"""Measured against simulated step time, on stages that sleep.

    python benchmarks/emulated.py --stages 4 --microbatches 8 --job_ms 20 --runs 5

One job (F, B or W of one chunk) takes ``--job_ms``, whatever the mode. The modes take
turns, run after run, so that a slow spell of the machine hits all of them.
"""

import json
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parts.options import read_options
from parts.runs import run_zbpp
from parts.table import Table
from parts.turns import spread_of, take_turns

from zbpp.planning import plan


@dataclass(frozen=True)
class Emulated:
    """Options of the measurement."""

    stages: int = 4
    microbatches: int = 8
    job_ms: float = 20.0
    runs: int = 5
    steps: int = 5
    modes: tuple[str, ...] = ("1F1B", "ZBH1", "ZBH2", "ZBV")


def measure(options: Emulated, mode: str, metrics: Path) -> None:
    """One run of ``zbpp train --emulate``."""
    schedule = plan(mode, n_stages=options.stages, n_microbatches=options.microbatches)
    chunks = schedule.placement.n_chunks // options.stages
    time = options.job_ms * chunks
    costs = metrics.with_name("costs.json")
    costs.write_text(json.dumps({"f": time, "b": time, "w": time}))
    run_zbpp(
        "train", "--emulate", costs, "--pipeline_schedule_mode", mode,
        "--stages", options.stages, "--microbatches", options.microbatches,
        "--steps", options.steps, "--metrics", metrics,
    )  # fmt: skip


def main() -> None:
    """Measure all modes and print a table."""
    options = read_options(Emulated)
    found = take_turns(options.modes, options.runs, partial(measure, options))
    table = Table(
        f"p={options.stages} m={options.microbatches}, jobs of {options.job_ms:g} ms, "
        f"median of {options.runs} runs",
        ("mode", "simulated step", "measured / simulated", "bubble simulated",
         "bubble measured"),
    )  # fmt: skip
    for mode, runs in found.items():
        ratios = [run["step_ms"] / run["simulated_step_ms"] for run in runs]
        table.add(
            mode,
            f"{runs[0]['simulated_step_ms']:.0f} ms",
            spread_of(ratios),
            f"{runs[0]['simulated_bubble_rate']:.1%}",
            f"{statistics.median(run['bubble_rate'] for run in runs):.1%}",
        )
    table.show()


if __name__ == "__main__":
    main()
