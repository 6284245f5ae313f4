"""``zbpp train`` as a user starts it: who is named, what is left, what is saved."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import heed_ctrl_c
from pool import PATIENCE_S

from zbpp.cli import main

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SIZES = "--microbatches 4 --microbatch_size 1 --seq 16 --size tiny --device cpu"


def words_of(folder: Path, n_steps: int, *more: str) -> list[str]:
    flags = f"{SIZES} --steps {n_steps} --data {__file__} --clip_grad_norm 0.5"
    return ["train", *flags.split(), "--metrics", str(folder / "metrics"), *more]


class Run:
    """``zbpp train`` with two stages in the background."""

    def __init__(self, folder: Path, n_steps: int = 100_000, *more: str) -> None:
        self.metrics = folder / "metrics"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zbpp", *words_of(folder, n_steps, *more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        )

    def wait_for_steps(self, n_steps: int) -> list[psutil.Process]:
        """Wait until so many steps have been done; return the ranks and all else."""
        while not self.metrics.exists() or lines_in(self.metrics) < n_steps:
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.01)
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, words = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, words


def lines_in(path: Path) -> int:
    return path.read_text().count("\n")


def rank_of(process: psutil.Process) -> str | None:
    return process.environ().get("RANK")


def assert_gone(processes: list[psutil.Process]) -> None:
    """A zombie is gone too: only init has not looked at it yet."""
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs; what a test leaves is killed."""
    started = []

    def start(*args: Any) -> Run:
        started.append(Run(tmp_path, *args))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()


def test_a_killed_worker_is_named(run: Callable[..., Run]) -> None:
    running = run(100_000, "--stages", "2")
    children = running.wait_for_steps(3)
    (worker,) = (child for child in children if rank_of(child) == "1")
    worker.kill()
    code, _, words = running.end()
    assert (code, words) == (1, "zbpp: rank 1 was killed by SIGKILL\n")
    assert_gone(children)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all(
    number: signal.Signals, run: Callable[..., Run]
) -> None:
    running = run(100_000, "--stages", "2")
    children = running.wait_for_steps(3)
    running.process.send_signal(number)
    assert running.end()[0] == (130 if number is signal.SIGINT else -number)
    assert_gone(children)


def steps_of(metrics: Path) -> tuple[list[dict[str, Any]], str]:
    """All that does not depend on time, and the hash of the parameters."""
    *steps, final = map(json.loads, metrics.read_text().splitlines())
    timed = ("tokens_per_s", "rollbacks")
    kept = [{k: v for k, v in one.items() if k not in timed} for one in steps]
    return kept, final["params_sha256"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_saves_and_the_run_goes_on(
    number: signal.Signals, code: int, run: Callable[..., Run], tmp_path: Path
) -> None:
    n_steps = 16
    more = ["--save_dir", str(tmp_path / "run")]
    running = run(n_steps, *more, "--stages", "2")
    children = running.wait_for_steps(5)
    running.process.send_signal(number)
    found, out, _ = running.end()
    assert found == code, out
    assert "by a signal, and saved in" in out
    assert_gone(children)
    assert main(words_of(tmp_path, n_steps, *more, "--stages", "1")) == 0
    (tmp_path / "whole").mkdir()
    assert main(words_of(tmp_path / "whole", n_steps, "--stages", "1")) == 0
    assert steps_of(running.metrics) == steps_of(tmp_path / "whole" / "metrics")
