"""A worker that dies or raises ends the run: clearly and without orphans."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import heed_ctrl_c, torchrun

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 200
"""Less than the 600 s for which stages wait: a run that ends has seen the failure."""
SIZES = "--microbatches 4 --microbatch_size 1 --seq 16 --size tiny --steps 100000"


class Run:
    """A training in the background, and what it leaves.

    A fault (`faults`) needs torchrun, which starts the script that brings it.
    """

    def __init__(self, data: Path, mode: str = "ZBH1", fault: str = "") -> None:
        start, environment = [sys.executable, "-m", "zbpp"], dict(os.environ)
        if fault:
            start, environment = torchrun("faulty_train.py", fault)
        flags = [*SIZES.split(), "--data", str(data), "--stages", "2"]
        self.process = subprocess.Popen(
            [*start, "train", mode, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"TMPDIR": str(data.parent)},
            preexec_fn=heed_ctrl_c,
        )

    def wait_for_step(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("step:") and int(line.split()[1]) >= step:
                return
        raise AssertionError(self.process.communicate()[1])

    def everyone(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        (process,) = (
            child
            for child in self.everyone()
            if child.environ().get("RANK") == str(number)
        )
        return process

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stderr


@pytest.fixture
def data(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("zero bubble pipeline " * 2000)
    return text


@pytest.fixture
def run(data: Path) -> Iterator[Callable[..., Run]]:
    """Start runs; whatever a test forgets is killed."""
    started = []

    def start(*args: str, **more: Any) -> Run:
        started.append(Run(data, *args, **more))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()


def assert_gone(processes: list[psutil.Process]) -> None:
    """A zombie is gone too: only init has not looked at it yet."""
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_killed_worker(run: Callable[..., Run]) -> None:
    running = run()
    running.wait_for_step(10)
    everyone = running.everyone()
    running.rank(1).kill()
    code, stderr = running.end()
    assert code == 1
    assert stderr == "zbpp: rank 1 was killed by SIGKILL\n"
    assert_gone(everyone)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher(
    run: Callable[..., Run], number: signal.Signals
) -> None:
    running = run()
    running.wait_for_step(10)
    everyone = running.everyone()
    running.process.send_signal(number)
    code, _ = running.end()
    assert code != 0
    assert_gone(everyone)


@pytest.mark.parametrize(
    ("mode", "job", "kind"),
    [
        ("ZBV", "0F0", "kill"),
        ("1F1B", "1F3", "raise"),
        ("ZBV", "1B1", "raise"),
        ("1F1B", "1BW2", "kill"),
        ("ZBV", "0W3", "kill"),
        ("ZBV", "O", "raise"),
    ],
)
def test_faults_at_every_kind_of_job(
    run: Callable[..., Run], mode: str, job: str, kind: str
) -> None:
    rank = int(job.startswith("1"))
    code, stderr = run(mode, fault=f"{kind}:{rank}:2:{job}").end()
    assert code == 1
    words = f"zbpp: rank {rank}: RuntimeError: a fault that the test asks for (in {job}"
    cause = "exitcode  : -9" if kind == "kill" else words
    assert cause in stderr and f"rank      : {rank} (local_rank: {rank})" in stderr
