"""Commands and processes that benchmarks run, and plans that the judge replays."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from judge import Verdict, judge

from zbpp.core import Costs, Schedule, schedule_text, write_costs
from zbpp.training.launch import launch

__all__ = ["in_processes", "judged", "run_zbpp"]


def in_processes(
    work: Callable[[Any, str, str], object], options: Any, n: int
) -> Callable[[str, Path], None]:
    """Make a `measure` for `parts.turns.take_turns`: each run in new processes.

    Args:
        work: a process's share, told the options, the mode, and the file that rank 0
            writes its figures to.
        options: handed on.
        n: processes.
    """

    def measure(mode: str, file: Path) -> None:
        launch(work, (options, mode, str(file)), n, device="cpu")

    return measure


def run_zbpp(*words: object) -> None:
    """Run a command of zbpp.

    Raises:
        RuntimeError: it failed; its last words are told.
    """
    command = [sys.executable, "-m", "zbpp", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")


def judged(schedule: Schedule, costs: Costs) -> Verdict:
    """Replay a plan by the judge, which shares no code with zbpp."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        write_costs(costs, path)
        told = json.loads(path.read_text())
    return judge(json.loads(schedule_text(schedule)), told)
