"""A save in the background is there as a whole, or not at all."""

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from pool import PRELOAD, Pool
from saved_runs import make, run, run_in_processes, save_for_ever
from small_model import batch

from zbpp.checkpoint import CheckpointError, newest, read_model
from zbpp.checkpoint.saving import Saver, Snapshot
from zbpp.core import RequestError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_the_last_ones_stay_and_the_newest_counts(tmp_path) -> None:
    pipeline, _ = make("ZBV", 2)
    for step in range(5):
        pipeline.step(*batch(step))
        pipeline.save(tmp_path, keep=2)
    pipeline.close()
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert newest(tmp_path) == tmp_path / "step-00000005"


def test_the_state_of_its_moment_is_saved_while_steps_go_on(
    tmp_path, monkeypatch
) -> None:
    """Writing waits until the parameters have changed twice."""
    pipeline, _ = make("1F1B", 1)
    gone_on = []

    def late(*arguments):
        while len(gone_on) < 2:
            time.sleep(0.01)
        return writes(*arguments)

    from zbpp.checkpoint import storage

    writes = storage.write_tensors
    monkeypatch.setattr(storage, "write_tensors", late)
    pipeline.step(*batch(0))
    then = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    pipeline.save(tmp_path)
    for step in range(1, 3):
        pipeline.step(*batch(step))
        gone_on.append(step)
    pipeline.close()
    saved = read_model(tmp_path)
    assert all(torch.equal(saved[name], then[name]) for name in then)
    now = dict(pipeline.named_parameters())
    assert not all(torch.equal(now[name], then[name]) for name in then)


def test_a_full_disk_ends_no_run_and_leaves_the_one_before(
    tmp_path, monkeypatch, caplog
) -> None:
    pipeline, _ = make("1F1B", 2)
    pipeline.step(*batch(0))
    pipeline.save(tmp_path, wait=True)

    def fails(file, part):
        file.write(part[: len(part) // 2])
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr("zbpp.checkpoint.tensor_files._write_all", fails)
        pipeline.step(*batch(1))
        pipeline.save(tmp_path)
        pipeline.step(*batch(2))
        with pytest.raises(CheckpointError, match=r"rank 0: .*No space left"):
            pipeline.finish_saving()
        assert names(tmp_path) == ["step-00000001"]
        pipeline.save(tmp_path)
        while not pipeline._saver.saving.done():
            time.sleep(0.01)
    pipeline.save(tmp_path, wait=True)
    assert "No space left" in caplog.text and "the run goes on" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    pipeline.close()


def fail_on_rank_1(folder: str) -> tuple[str, list[str]]:
    """The others learn of it, and no half checkpoint stays."""
    from zbpp.checkpoint import storage

    pipeline, _ = make("1F1B", None)
    pipeline.step(*batch(0))
    writes = storage.write_tensors
    if pipeline.rank == 1:

        def fails(*_):
            raise FULL

        storage.write_tensors = fails
    words = ""
    try:
        pipeline.save(folder, wait=True)
    except CheckpointError as error:
        words = str(error)
    finally:
        storage.write_tensors = writes
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
    saver = Saver(0, lambda thing: [thing])

    def save(value: float, keep: int = 1) -> str | None:
        saver.begin(
            tmp_path, Snapshot(3, {"model/w": torch.tensor(value)}, {}), keep=keep
        )
        return saver.finish()

    assert save(1.0) is None
    renames = Path.rename

    def dies(path: Path, to: Path) -> Path:
        if path.name.startswith(".partial-"):
            raise FULL
        return renames(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        assert "No space left" in str(save(2.0))
    assert not (tmp_path / "step-00000003").exists()
    assert read_model(tmp_path) == {"w": torch.tensor(1.0)}
    assert save(3.0) is None
    assert names(tmp_path) == ["step-00000003"]
    assert read_model(tmp_path) == {"w": torch.tensor(3.0)}


def test_the_one_just_saved_stays(tmp_path) -> None:
    """Also where a run went on from an early one, and later ones are still there."""
    saver = Saver(0, lambda thing: [thing])
    for step in (3, 4, 2):
        saver.begin(tmp_path, Snapshot(step, {"model/w": torch.ones(1)}, {}), keep=2)
        assert saver.finish() is None
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


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
        saver = Saver(0, lambda thing: [thing])
        saver.begin(folder, Snapshot(1000, {"model/w": saved}, {}), keep=1)
        assert saver.finish() is None
        assert names(folder) == ["step-00001000"], "what was left is not cleared"
    assert partial >= 5, "no kill came in the middle"


@pytest.mark.slow
@pytest.mark.dist
def test_saves_of_processes_follow_each_other(pool: Pool, tmp_path) -> None:
    for mode in ("ZBV", "1F1B"):
        pool.run(run_in_processes, 2, mode, str(tmp_path), None)
    assert run("ZBH1", 2, loaded=str(tmp_path))
