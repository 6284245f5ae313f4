"""A checkpoint is there as a whole, or not at all; the newest whole one is found."""

import os
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small
import torch
from faulty_training import batch, make
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import CheckpointError, locked, newest, read_model


class Constant(nn.Module):
    """A parameter that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.w[:1]


def constant(n_steps: int = 0, value: float = 0.0) -> zbpp.Pipeline:
    """A pipeline after some steps, with parameters of a value."""
    model = nn.Sequential(Constant())
    pipeline = small.make(model, "1F1B", n_stages=1, n_microbatches=1)
    go_on(pipeline, n_steps, value)
    return pipeline


def go_on(pipeline: zbpp.Pipeline, n_steps: int, value: float) -> None:
    for _ in range(n_steps):
        pipeline.step(torch.ones(1), torch.ones(1))
    for _, parameter in pipeline.named_parameters():
        parameter.data.fill_(value)


def value_in(folder: Path) -> float:
    (saved,) = read_model(folder).values()
    assert torch.equal(saved, saved[:1].expand(4))
    return float(saved[0])


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


# ---- Which ones stay.


def test_the_last_checkpoints_stay_and_the_newest_is_loaded(tmp_path: Path) -> None:
    pipeline = constant()
    for n in range(1, 6):
        go_on(pipeline, 1, n)
        pipeline.save(tmp_path, keep=2)
    pipeline.close()
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert newest(tmp_path) == tmp_path / "step-00000005"
    assert value_in(tmp_path) == 5
    for file in newest(tmp_path).iterdir():
        assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666


def test_the_checkpoint_just_saved_stays(tmp_path: Path) -> None:
    """Also where a run went on from an early one, and later ones are still there."""
    for n_steps in (3, 4, 2):
        constant(n_steps).save(tmp_path, keep=2, wait=True)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    pipeline = constant()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        pipeline.load(tmp_path)
    assert newest(tmp_path) is None
    assert pipeline.load(tmp_path, missing_ok=True) == {}
    (tmp_path / "step-00000003").mkdir()
    for missing_ok in (True, False):  # a damaged one is not a missing one
        with pytest.raises(CheckpointError, match="is missing"):
            pipeline.load(tmp_path, missing_ok=missing_ok)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with locked(folder):
        refused = pytest.raises(CheckpointError, match=r"another run .* another fol")
        with refused, locked(folder):
            pass
        with locked(tmp_path):
            pass
    with locked(folder):
        assert names(folder) == []
    (tmp_path / "file").touch()
    refused = pytest.raises(CheckpointError, match=r"cannot write to .*file")
    with refused, locked(tmp_path / "file" / "run"):
        pass


# ---- Ends in the middle.

_watching: list[Callable[[], None]] = []


def _note(event: str, args: Any) -> None:
    """Call the watcher before something happens to a file, but for what it does."""
    if event in _EVENTS and _watching:
        watcher = _watching.pop()
        watcher()
        _watching.append(watcher)


_EVENTS = {
    "open",
    *(f"os.{x}" for x in ["mkdir", "rename", "remove", "rmdir", "chmod"]),
}
sys.addaudithook(_note)


@contextmanager
def copied_at_each_event(folder: Path, to: Path) -> Iterator[list[Path]]:
    """What a kill at each point would leave of a folder."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(to / f"{len(copies)}")
        shutil.copytree(folder, copies[-1])

    _watching.append(copy)
    try:
        yield copies
    finally:
        _watching.clear()


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("again", [False, True], ids=["next", "again"])
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(
    again: bool, keep: int | None, tmp_path: Path
) -> None:
    """``again``: a run that began anew saves the same step, and replaces it."""
    folder = tmp_path / "run"
    constant(2, 1.0).save(folder, wait=True)
    pipeline = constant(2 if again else 3, 2.0)
    with copied_at_each_event(folder, tmp_path / "left") as copies:
        pipeline.save(folder, keep=keep, wait=True)
    found = [value_in(copy) for copy in copies]
    assert len(copies) >= 10, "too few points"
    assert found == sorted(found) and {*found} == {1.0, 2.0}
    assert value_in(folder) == 2.0
    distinct = {
        str([x.relative_to(copy) for x in copy.rglob("*")]): copy for copy in copies
    }
    for copy in distinct.values():  # a run resumes there, and clears the rest
        pipeline.load(copy)
        go_on(pipeline, 1, 3.0)
        pipeline.save(copy, keep=1, wait=True)
        assert len(names(copy)) == 1 and value_in(copy) == 3.0


def test_a_save_has_the_state_of_its_call_while_steps_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing waits until the parameters have changed."""
    have_changed = threading.Event()
    save_file = safetensors.torch.save_file

    def save_late(*arguments: Any) -> None:
        have_changed.wait()
        save_file(*arguments)

    monkeypatch.setattr(safetensors.torch, "save_file", save_late)
    pipeline = constant(1, 1.0)
    pipeline.save(tmp_path)
    go_on(pipeline, 2, 2.0)
    assert newest(tmp_path) is None
    have_changed.set()
    pipeline.close()
    assert value_in(tmp_path) == 1.0


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can become longer than 1 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    pipeline = make("1F1B", 2)
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
    assert "File too large" in caplog.text and "the run continues" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    pipeline.close()


def save_on_a_full_disk(folder: str) -> tuple[str, list[str]]:
    """Rank 1 cannot write; the others learn of it, and no half checkpoint stays."""
    pipeline = make("1F1B", None)
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
def test_a_rank_that_cannot_write_is_named_on_all(pool: Pool, tmp_path: Path) -> None:
    for words, left in pool.run(save_on_a_full_disk, 2, str(tmp_path)):
        assert words.startswith("the checkpoint was not saved: rank 1: ")
        assert left == []


# ---- What is saved.


def test_extra_values_may_change_their_kind(tmp_path: Path) -> None:
    """Host memory is used again, if it is of the same shape and dtype."""
    pipeline = constant(1)
    for value in (torch.zeros(3), torch.ones(1), torch.ones(1, dtype=torch.int64)):
        pipeline.save(tmp_path, extra={"x": value}, wait=True)
        found = pipeline.load(tmp_path)["x"]
        assert found.dtype == value.dtype and torch.equal(found, value)


class Counter(nn.Linear):
    """Has a number that is neither a parameter nor a buffer."""

    n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"n_calls": [torch.tensor([self.n_calls])]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.n_calls = state["n_calls"][0].item()


def count_calls(folder: str) -> list[int]:
    counts = []
    for n_steps in (2, 0):
        layers = [Counter(4, 4), Counter(4, 4)]
        pipeline = small.make(layers, "1F1B", n_microbatches=2)
        for _ in range(n_steps):
            pipeline.step(torch.ones(2, 4), torch.ones(2, 4))
        if n_steps:
            pipeline.save(folder, extra={"x": torch.ones(1) * pipeline.rank}, wait=True)
        else:
            assert pipeline.load(folder) == {"x": torch.zeros(1)}, "rank 0's counts"
        counts.append(layers[pipeline.rank].n_calls)
        pipeline.close()
    return counts


@pytest.mark.dist
def test_extra_states_of_all_stages_are_saved(pool: Pool, tmp_path: Path) -> None:
    for counted, loaded in pool.run(count_calls, 2, str(tmp_path)):
        assert counted == loaded >= 4


# ---- Damage.


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut_off(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def swap(file: Path, rng: random.Random) -> None:
    """With the file of the step before."""
    (other,) = file.parents[1].glob(f"step-00000001/{file.name}")
    file.write_bytes(other.read_bytes())


def make_pipe(file: Path, rng: random.Random) -> None:
    """A reader would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def make_huge(file: Path, rng: random.Random) -> None:
    os.truncate(file, 20 * 2**30)


def save_twice(folder: str) -> None:
    pipeline = make("1F1B", None)
    for step in range(2):
        pipeline.step(*batch(step))
        pipeline.save(folder, wait=True)
    pipeline.close()


@pytest.mark.dist
@pytest.mark.parametrize(
    "way",
    [
        *(flip, cut_off, make_pipe, make_huge, swap),
        pytest.param(lambda file, rng: file.unlink(), id="remove"),
    ],
)
def test_no_damaged_file_is_loaded(
    way: Callable[[Path, random.Random], None],
    pool: Pool,
    tmp_path: Path,
    caplog: Any,
) -> None:
    """The checkpoint before is taken, with a word about the other one."""
    pool.run(save_twice, 2, str(tmp_path / "saved"))
    files = [one.name for one in (tmp_path / "saved" / "step-00000002").iterdir()]
    assert len(files) >= 3
    with make("ZBH1", 2) as pipeline:
        for number, name in enumerate(files * (3 if way is flip else 1)):
            folder = tmp_path / str(number)
            shutil.copytree(tmp_path / "saved", folder)
            way(folder / "step-00000002" / name, random.Random(number))
            named = "step-00000002" if way is swap else name
            with pytest.raises(CheckpointError, match=named):
                pipeline.load(folder / "step-00000002")
            assert pipeline.n_steps == 0
            assert newest(folder) == folder / "step-00000001"
        caplog.clear()
        pipeline.load(folder)
        assert pipeline.n_steps == 1
        assert "passed over" in caplog.text and named in caplog.text


def test_a_stray_file_is_refused(tmp_path: Path) -> None:
    """Torch's reader would read it, too."""
    constant(1, 1.0).save(tmp_path, wait=True)
    folder = newest(tmp_path)
    shutil.copy(folder / "rank-0.safetensors", folder / "rank-1.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-1\S+ is not in the manifest"):
        read_model(folder)


def test_a_load_that_fails_halfway_ends_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files were whole when they were verified."""
    constant(1, 1.0).save(tmp_path, wait=True)
    pipeline, safe_open, n_opened = constant(), safetensors.safe_open, 0

    def open_once(*args: Any, **more: Any) -> Any:
        nonlocal n_opened
        n_opened += 1
        if n_opened > 1:  # what a file has is asked for once
            raise OSError("gone")
        return safe_open(*args, **more)

    monkeypatch.setattr(safetensors, "safe_open", open_once)
    with pytest.raises(CheckpointError, match="cannot be read: OSError: gone"):
        pipeline.load(tmp_path)
    with pytest.raises(RuntimeError, match=r"load failed .*the pipeline has ended"):
        pipeline.step(torch.ones(1), torch.ones(1))
