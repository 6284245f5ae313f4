"""A worker that dies, raises or hangs ends the run: clearly and without orphans."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import heed_ctrl_c
from faulty import train_with_a_fault

from zbpp.core import WorkerError
from zbpp.runtime.support.fault_injection import Fault, requested_fault
from zbpp.training.options import Train
from zbpp.training.start import start_worker

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

TIMEOUT_S = 600
"""A run that waited for this would not end within `PATIENCE_S`: it saw the failure."""

PATIENCE_S = 200
SHORT_TIMEOUT_S = 20
TRAIN = (
    sys.executable, "-m", "zbpp", "train", "--stages", "2", "--steps", "100000",
    "--log_every", "1", "--microbatches", "4",
    "--microbatch_size", "1", "--seq", "16", "--dim", "16", "--n_blocks", "2",
    "--n_heads", "2", "--hidden", "16",
)  # fmt: skip


class Run:
    """A training run in the background, and what it leaves."""

    def __init__(
        self,
        data: Path,
        mode: str = "ZBH1",
        *,
        timeout_s: int = TIMEOUT_S,
        **environment: str,
    ) -> None:
        settings = ("--pipeline_schedule_mode", mode, "--timeout_s", str(timeout_s))
        self.process = subprocess.Popen(
            [*TRAIN, "--data", str(data), *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(data.parent)} | environment,
            preexec_fn=heed_ctrl_c,
        )

    def wait_for_step(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("step:") and int(line.split()[1]) >= step:
                return
        raise AssertionError(self.process.communicate()[1])

    def ranks(self) -> list[psutil.Process]:
        """The worker processes, by rank (they start in that order)."""
        everyone = psutil.Process(self.process.pid).children(recursive=True)
        busy = [p for p in everyone if p.parent() and p.num_threads() > 1]
        workers = [p for p in busy if "fork" in " ".join(p.cmdline())]
        return sorted(workers, key=lambda p: p.create_time())[-2:]

    def everyone(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

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


def hit(process: psutil.Process, number: signal.Signals) -> None:
    os.kill(process.pid, number)


@pytest.mark.slow
def test_a_killed_worker(run: Callable[..., Run]) -> None:
    running = run()
    running.wait_for_step(3)
    everyone, ranks = running.everyone(), running.ranks()
    hit(ranks[1], signal.SIGKILL)
    code, stderr = running.end()
    assert code == 1
    assert stderr == "zbpp: rank 1 was killed by SIGKILL\n"
    assert_gone(everyone)


@pytest.mark.slow
def test_a_raising_worker(run: Callable[..., Run]) -> None:
    running = run(ZBPP_FAULT="raise:1:5:1B2")
    running.wait_for_step(3)
    everyone = running.everyone()
    code, stderr = running.end()
    assert code == 1
    lines = stderr.splitlines()
    assert len(lines) == 1
    assert "rank 1 failed: RuntimeError: a fault that ZBPP_FAULT asked for" in lines[0]
    assert "in 1B2" in lines[0]
    log = Path(lines[0].split("traceback: ")[1].removesuffix(")"))
    assert "Traceback" in log.read_text()
    assert_gone(everyone)


@pytest.mark.slow
def test_a_stopped_worker(run: Callable[..., Run]) -> None:
    running = run(timeout_s=SHORT_TIMEOUT_S)
    running.wait_for_step(3)
    everyone, ranks = running.everyone(), running.ranks()
    hit(ranks[1], signal.SIGSTOP)
    code, stderr = running.end()
    assert code == 1
    assert len(stderr.splitlines()) == 1
    assert "stage 0 waits at" in stderr and "rank 1 has left no word" in stderr
    assert f"no answer in {SHORT_TIMEOUT_S} s" in stderr
    assert_gone(everyone)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher(
    run: Callable[..., Run], number: signal.Signals
) -> None:
    running = run()
    running.wait_for_step(3)
    everyone = running.everyone()
    running.process.send_signal(number)
    code, _ = running.end()
    assert code != 0
    assert_gone(everyone)


@pytest.mark.slow
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
    data: Path, mode: str, job: str, kind: str
) -> None:
    """Here the launcher is this process: the others are forked, not imported."""
    rank = int(job.startswith("1"))
    options = Train(
        pipeline_schedule_mode=mode, stages=2, steps=3, microbatches=4,
        microbatch_size=1, seq=16, dim=16, n_blocks=2, n_heads=2, hidden=16, data=data,
    )  # fmt: skip
    faulty = partial(train_with_a_fault, f"{kind}:{rank}:2:{job}")
    with pytest.raises(WorkerError) as caught:
        start_worker(faulty, options, check=None)
    how = "was killed by SIGKILL" if kind == "kill" else "failed: RuntimeError: a fault"
    assert str(caught.value).startswith(f"rank {rank} {how}")


def test_the_fault_is_read_and_strikes_only_at_its_place() -> None:
    fault = requested_fault({"ZBPP_FAULT": "raise:1:3:0F2"})
    assert fault == Fault("raise", 1, 3, "0F2")
    fault.inject(0, 3, "0F2")
    fault.inject(1, 2, "0F2")
    with pytest.raises(RuntimeError, match="ZBPP_FAULT"):
        fault.inject(1, 3, "0F2")
    with pytest.raises(ValueError, match="kind:rank:step:job"):
        requested_fault({"ZBPP_FAULT": "explode:1:3:0F2"})
    assert requested_fault({}) is None
