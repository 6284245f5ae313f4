"""Measured against simulated step time, on stages that sleep.

    python benchmarks/emulated.py --stages 4 --microbatches 8 --job_ms 20 --runs 5

One job (F, B or W of one chunk) takes ``--job_ms``, whatever the mode. The modes take
turns, run after run, so that a slow spell of the machine hits all of them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

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


def measure(options: Emulated, mode: str, folder: Path) -> dict[str, float]:
    """One run of ``zbpp train --emulate``."""
    schedule = plan(mode, n_stages=options.stages, n_microbatches=options.microbatches)
    chunks = schedule.placement.n_chunks // options.stages
    time = options.job_ms * chunks
    costs, metrics = folder / "costs.json", folder / "metrics.json"
    costs.write_text(json.dumps({"f": time, "b": time, "w": time}))
    command = [
        sys.executable, "-m", "zbpp", "train", "--emulate", costs,
        "--pipeline_schedule_mode", mode, "--stages", options.stages,
        "--microbatches", options.microbatches, "--steps", options.steps,
        "--metrics", metrics,
    ]  # fmt: skip
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    result: dict[str, float] = json.loads(metrics.read_text())
    return result


def main() -> None:
    """Measure all modes and print a table."""
    options = tyro.cli(Emulated, use_underscores=True)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.runs):
            for mode in options.modes:
                found[mode].append(measure(options, mode, Path(folder)))
    table = Table(
        title=f"p={options.stages} m={options.microbatches}, jobs of "
        f"{options.job_ms:g} ms, median of {options.runs} runs"
    )
    for column in ("mode", "simulated ms", "measured / simulated", "min", "max",
                   "bubble simulated", "bubble measured"):  # fmt: skip
        table.add_column(column, justify="right")
    for mode, runs in found.items():
        ratios = [run["step_ms"] / run["simulated_step_ms"] for run in runs]
        table.add_row(
            mode,
            f"{runs[0]['simulated_step_ms']:.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f}",
            f"{max(ratios):.3f}",
            f"{runs[0]['simulated_bubble_rate']:.1%}",
            f"{statistics.median(run['bubble_rate'] for run in runs):.1%}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
