"""A save in the background is there as a whole, or not at all."""

import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pool import PRELOAD, Pool
from saved_runs import (
    make,
    make_constant,
    save_for_ever,
    step_and_fill,
)
from small_model import batch
from torch import nn

import zbpp
from zbpp.checkpoint import CheckpointError, newest, read_model
from zbpp.core import RequestError


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_the_last_ones_stay_and_the_newest_counts(tmp_path) -> None:
    pipeline, _ = make("ZBV", 2)
    for step in range(5):
        pipeline.step(*batch(step))
        pipeline.save(tmp_path, keep=2)
    pipeline.close()
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    folder = tmp_path / "step-00000005"
    assert newest(tmp_path) == folder
    file = folder / "stage-0.safetensors"
    assert file.stat().st_mode & 0o777 == folder.stat().st_mode & 0o666


def test_the_state_of_its_moment_is_saved_while_steps_go_on(
    tmp_path, monkeypatch
) -> None:
    """Writing waits until the parameters have changed twice."""
    pipeline, _ = make("1F1B", 1)
    have_changed = threading.Event()
    save_file = safetensors.torch.save_file

    def save_late(*arguments):
        have_changed.wait()
        save_file(*arguments)

    monkeypatch.setattr(safetensors.torch, "save_file", save_late)
    pipeline.step(*batch(0))
    then = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    pipeline.save(tmp_path)
    for step in range(1, 3):
        pipeline.step(*batch(step))
    assert newest(tmp_path) is None
    have_changed.set()
    pipeline.close()
    saved = read_model(tmp_path)
    assert all(torch.equal(saved[name], then[name]) for name in then)
    now = dict(pipeline.named_parameters())
    assert not all(torch.equal(now[name], then[name]) for name in then)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can become longer than 16 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_no_run_and_leaves_the_one_before(tmp_path, caplog) -> None:
    pipeline, _ = make("1F1B", 2)
    pipeline.step(*batch(0))
    pipeline.save(tmp_path, wait=True)
    with full_disk():
        pipeline.step(*batch(1))
        pipeline.save(tmp_path)
        pipeline.step(*batch(2))
        with pytest.raises(CheckpointError, match=r"rank 0: .*File too large"):
            pipeline.finish_saving()
        assert names(tmp_path) == ["step-00000001"]
        pipeline.save(tmp_path)
        while len(names(tmp_path)) > 1:  # what it has written is removed
            time.sleep(0.01)
    pipeline.save(tmp_path, wait=True)
    assert "File too large" in caplog.text and "the run goes on" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    pipeline.close()


def fail_on_rank_1(folder: str) -> tuple[str, list[str]]:
    """The others learn of it, and no half checkpoint stays."""
    pipeline, _ = make("1F1B", None)
    pipeline.step(*batch(0))
    words = ""
    try:
        with full_disk() if pipeline.rank == 1 else nullcontext():
            pipeline.save(folder, wait=True)
    except CheckpointError as error:
        words = str(error)
    left = names(Path(folder))
    pipeline.step(*batch(1))
    pipeline.close()
    return words, left


@pytest.mark.dist
def test_a_rank_that_cannot_write_is_named_on_all(pool: Pool, tmp_path) -> None:
    for words, left in pool.run(fail_on_rank_1, 2, str(tmp_path)):
        assert words.startswith("the checkpoint was not saved: rank 1: ")
        assert left == []


def save_apart(folder: str) -> str:
    pipeline, _ = make("1F1B", None)
    pipeline.step(*batch(0))
    try:
        pipeline.save(f"{folder}/{pipeline.rank}")
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_folders_that_differ_are_refused(pool: Pool, tmp_path) -> None:
    for words in pool.run(save_apart, 2, str(tmp_path)):
        assert "rank(s) [1] save" in words


def test_a_kill_while_one_is_replaced_leaves_it(tmp_path, monkeypatch) -> None:
    """A step is saved again, by a run that began anew; its folder has no name then."""
    renames = Path.rename

    def dies(path: Path, to: Path) -> Path:
        if path.name.startswith(".partial-"):
            raise OSError("killed")
        return renames(path, to)

    def save(value: float) -> None:
        pipeline = make_constant()
        step_and_fill(pipeline, value)
        pipeline.save(tmp_path, wait=True)

    save(1.0)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="killed"):
        patch.setattr(Path, "rename", dies)
        save(2.0)
    assert not (tmp_path / "step-00000001").exists()
    assert read_model(tmp_path) == {"0.w": torch.tensor([1.0])}
    save(3.0)
    assert names(tmp_path) == ["step-00000001"]
    assert read_model(tmp_path) == {"0.w": torch.tensor([3.0])}


def test_the_one_just_saved_stays(tmp_path) -> None:
    """Also where a run went on from an early one, and later ones are still there."""
    for n_steps in (3, 4, 2):
        pipeline = make_constant()
        for _ in range(n_steps):
            step_and_fill(pipeline, 1.0)
        pipeline.save(tmp_path, keep=2, wait=True)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_what_is_saved_under_a_name_may_change_its_kind(tmp_path) -> None:
    """Host memory is used again, if it is of the same shape and dtype."""
    pipeline = make_constant()
    for value in (torch.zeros(3), torch.ones(1), torch.ones(1, dtype=torch.int64)):
        pipeline.save(tmp_path, extra={"x": value}, wait=True)
        found = pipeline.load(tmp_path)["x"]
        assert found.dtype == value.dtype and torch.equal(found, value)


@pytest.mark.slow
def test_a_kill_at_twenty_points_leaves_a_checkpoint(tmp_path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    seed, partial = random.Random(0), 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = context.Process(target=save_for_ever, args=(str(folder),))
        process.start()
        assert process.pid is not None
        while not any(folder.glob("step-*")):
            assert process.is_alive(), "it ended before it had saved"
            time.sleep(0.01)
        time.sleep(seed.uniform(0.0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        partial += any(folder.glob(".*"))
        found = newest(folder)
        assert found is not None
        steps = [int(one.name[-8:]) for one in folder.glob("step-*")]
        assert found.name == f"step-{max(steps):08}", "the newest is damaged"
        (saved,) = read_model(folder).values()
        assert torch.equal(saved, torch.full_like(saved, max(steps)))
        pipeline = make_constant(2_000_000)
        pipeline.load(folder)
        step_and_fill(pipeline, 0.0)
        pipeline.save(folder, keep=1, wait=True)
        left = [f"step-{max(steps) + 1:08}"]
        assert names(folder) == left, "what was left is not cleared"
    assert partial >= 5, "no kill came in the middle"


class Counter(nn.Linear):
    """Keeps a number that is neither a parameter nor a buffer."""

    n_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"n_calls": self.n_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n_calls = state["n_calls"]


def count_calls(folder: str) -> list[int]:
    counts = []
    for n_steps in (2, 0):
        layers = [Counter(4, 4), Counter(4, 4)]
        pipeline = zbpp.Pipeline(
            layers,
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            schedule="1F1B",
            n_microbatches=2,
        )
        for _ in range(n_steps):
            pipeline.step(torch.ones(2, 4), torch.ones(2, 4))
        if n_steps:
            pipeline.save(folder, wait=True)
        else:
            pipeline.load(folder)
        counts.append(layers[pipeline.rank].n_calls)
        pipeline.close()
    return counts


@pytest.mark.dist
def test_extra_states_of_all_stages_are_saved(pool: Pool, tmp_path) -> None:
    for counted, loaded in pool.run(count_calls, 2, str(tmp_path)):
        assert counted == loaded >= 4
