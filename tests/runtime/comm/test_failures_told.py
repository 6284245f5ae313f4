"""A user's own script says on every rank which rank failed first."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import PATIENCE_S, Pool
from small_model import batch, make_pipeline

from zbpp.runtime import PeerError
from zbpp.runtime.comm import failures
from zbpp.runtime.comm.failures import Failures, Note, root_cause
from zbpp.runtime.comm.groups import Groups

pytestmark = pytest.mark.dist

SCRIPT = """
import os, signal, sys, torch
from torch import nn
import zbpp

class Fails(nn.Module):
    def forward(self, x):
        if pipeline.n_steps == 2 and x.requires_grad:
            HOW
        return x

rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def build(layers):
    return [nn.Sequential(nn.Linear(4, 4), *([Fails()] if i == CULPRIT else []))
            for i in layers]
pipeline = zbpp.Pipeline(
    zbpp.layers_from(build, n_layers=n), "ZBH1", loss_fn=nn.functional.mse_loss,
    optimizer=lambda ps: torch.optim.SGD(ps, 0.1), n_microbatches=4, clip_grad_norm=1.0,
    execution=zbpp.Execution(timeout_s=60))
for step in range(5):
    pipeline.step(torch.ones(8, 4), torch.zeros(8, 4))
"""


def write_script(folder: Path, how: str, culprit: int) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("HOW", how).replace("CULPRIT", str(culprit)))
    return str(script)


def environment(**more: object) -> dict[str, str]:
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {name: str(value) for name, value in more.items()}


def run_by_torchrun(folder: Path, script: str, n: int) -> tuple[int, dict[int, str]]:
    """Exit code, and the last words of each rank; torchrun may cut them short."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(n), "--monitor-interval", "5"]
    command += ["--redirects", "2", "--log-dir", str(folder / "log"), script]
    done = subprocess.run(
        command, env=environment(), capture_output=True, timeout=PATIENCE_S
    )
    logs = (folder / "log").rglob("stderr.log")
    return done.returncode, {int(log.parent.name): log.read_text() for log in logs}


def run_by_hand(script: str, n: int) -> dict[int, str]:
    """The last words of each rank; nobody ends a rank that waits for another one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=n,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=store.port,
                TORCHELASTIC_USE_AGENT_STORE=True,  # it is served here
            ),
        )
        for rank in range(n)
    ]
    try:
        words = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode for process in processes)
    return dict(enumerate(words))


NO_GOOD = 'raise ValueError("no good")'
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_exception_in_a_layer(tmp_path: Path) -> None:
    """Rank 0 has no channel to the rank that fails, and names it all the same."""
    words = run_by_hand(write_script(tmp_path, NO_GOOD, 2), 3)
    first = "rank 2 failed first, in 2F0: ValueError: no good"
    for rank, text in words.items():
        assert text.count(first) == 1, text
        assert "PeerError" in text or rank == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_rank(tmp_path: Path) -> None:
    killed, text = run_by_hand(write_script(tmp_path, KILLED, 0), 2).values()
    assert not killed
    assert text.count("rank 0 has left no word") == 1, text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_under_torchrun_no_other_rank_is_blamed(tmp_path: Path) -> None:
    code, words = run_by_torchrun(tmp_path, write_script(tmp_path, NO_GOOD, 1), 2)
    assert code != 0 and sorted(words) == [0, 1]
    assert "rank 1 failed first, in 1F0: ValueError" in words[1]
    assert "rank 0 failed first" not in "".join(words.values())
    assert "rank 0 has left no word" not in "".join(words.values())


def evaluate_alone() -> str:
    pipeline = make_pipeline("1F1B", None, timeout_s=5, first_timeout_s=100)
    for step in range(3):  # in which stages tell one another what they were handed
        pipeline.step(*batch(step))
    try:
        if pipeline.rank == 0:
            pipeline.evaluate(*batch(3))
        else:
            pipeline.step(*batch(3))
    except PeerError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_one_rank_that_evaluates_alone(pool: Pool) -> None:
    """It would have handed the other one an activation that fits."""
    for message in pool.run(evaluate_alone, 2):
        assert "all ranks wait (rank 0: evaluate, rank 1: step 3)" in message


def evaluate_while_another_sleeps() -> str:
    pipeline = make_pipeline("1F1B", None, timeout_s=1, first_timeout_s=100)
    pipeline.step(*batch(0))
    message = "nothing"
    try:
        if pipeline.rank == 0:
            pipeline.evaluate(*batch(1))
    except PeerError as error:
        message = str(error)
    dist.barrier()
    return message


def test_one_rank_that_evaluates_while_the_others_do_not(pool: Pool) -> None:
    first, _ = pool.run(evaluate_while_another_sleeps, 2)
    assert "rank 1 has left no word" in first
    assert "every rank must call evaluate()" in first


def misfit_then_fit() -> list[str]:
    pipeline = make_pipeline("1F1B", None)
    words = []
    if pipeline.rank == 0:
        try:
            pipeline.step(*batch(0, samples=0))
        except ValueError as error:
            words.append(str(error))
    pipeline.step(*batch(0))
    try:
        if pipeline.rank == 1:
            raise OSError("disk full")
        pipeline.step(*batch(1))
    except (OSError, PeerError) as error:
        pipeline.__exit__(type(error), error, None)
        words.append(str(error))
    return words


def test_a_batch_that_does_not_fit_is_forgotten_once_one_fits(pool: Pool) -> None:
    first, second = pool.run(misfit_then_fit, 2)
    assert "no samples" in first[0]
    assert (
        "rank 1 failed first, in code outside of steps: OSError: disk full" in first[1]
    )
    assert second == ["disk full"]


def test_the_earliest_of_several_causes_is_the_culprit() -> None:
    notes = {
        0: Note("step 1", "in 0F0: OSError", order=3),
        1: Note("step 1", lost=[0], order=1),
        2: Note("step 1", "in 2F0: OSError", order=2),
    }
    assert root_cause(notes, [10, 11, 12])[0] == "rank 12 failed first, in 2F0: OSError"


class _GoneStore:
    def add(self, *_: object) -> int:
        raise RuntimeError("the server is gone")

    check = add


class _HungStore:
    def __init__(self) -> None:
        self.answers = threading.Event()

    def add(self, *_: object) -> int:
        self.answers.wait()
        raise RuntimeError("too late")

    check = add


def failures_on(store: Any) -> Failures:
    cpu = torch.device("cpu")
    groups = Groups(True, cpu, Ended(), {}, store)
    return Failures(groups, 0, [0, 1], pipeline=[0, 1], device=cpu, timeout_s=1.0)


class Ended:
    def abort(self) -> None:
        pass


def test_a_store_that_is_gone_hides_nothing() -> None:
    failures = failures_on(_GoneStore())
    assert failures.report(OSError("disk full")) == ""
    error = failures.peer_error("waits for", 1)
    assert str(error) == "stage 0 waits for stage 1: the connection broke"


def test_a_store_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_STORE_S", 0.1)
    monkeypatch.setattr(failures, "_PATIENCE_S", 0.1)
    store = _HungStore()
    assert failures_on(store).report(OSError("disk full")) == ""
    error = failures_on(store).peer_error("waits for", 1)
    assert str(error) == "stage 0 waits for stage 1: the connection broke"
    store.answers.set()
