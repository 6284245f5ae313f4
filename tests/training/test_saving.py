"""`zbpp train` is stopped, killed, started again: it ends with the undisturbed bits."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from training_here import train_here

from zbpp.checkpoint import CheckpointError
from zbpp.core import RequestError, WorkerError
from zbpp.runtime.driver.stop_request import StopRequest
from zbpp.training.options import TrainOptions

TINY = TrainOptions(
    stages=1, microbatches=4, microbatch_size=1, seq=16, size="tiny", steps=5, lr=1e-2,
    clip_grad_norm=0.5, data=Path(__file__),
)  # fmt: skip
SIZES = (
    "--size tiny --seq 16 --microbatches 4 --microbatch_size 1 --steps 24 --device cpu"
)


def steps_of(metrics: Path) -> tuple[list[dict], str]:
    *steps, final = map(json.loads, metrics.read_text().splitlines())
    timed = ("tokens_per_s", "rollbacks")
    kept = [{k: v for k, v in one.items() if k not in timed} for one in steps]
    return kept, final["params_sha256"]


def saved(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], tuple[list[dict], str]]:
    """Outcome of an undisturbed run in a dtype; each is done once."""

    @functools.cache
    def run(dtype: str) -> tuple[list[dict], str]:
        metrics = tmp_path_factory.mktemp("whole") / "metrics.jsonl"
        train_here(replace(TINY, dtype=dtype, metrics=metrics))
        return steps_of(metrics)

    return run


@pytest.fixture(scope="module")
def halfway(tmp_path_factory) -> Callable[[str, Path], TrainOptions]:
    """Copies of a run that has ended after 3 steps, by dtype."""

    @functools.cache
    def begin(dtype: str) -> Path:
        folder = tmp_path_factory.mktemp("halfway")
        train_here(replace(options(dtype, folder), steps=3, stages=2))
        return folder

    def options(dtype: str, folder: Path) -> TrainOptions:
        files = {"metrics": folder / "metrics.jsonl", "save_dir": folder / "run"}
        return replace(TINY, dtype=dtype, **files)

    def copy(dtype: str, folder: Path) -> TrainOptions:
        shutil.copytree(begin(dtype), folder, dirs_exist_ok=True)
        return options(dtype, folder)

    return copy


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_run_goes_on_with_other_stages_and_another_mode(
    dtype, whole, halfway, tmp_path, capsys
) -> None:
    options = halfway(dtype, tmp_path)
    assert saved(options.save_dir) == ["step-00000003"]
    capsys.readouterr()
    other = {} if dtype == "fp16" else {"stages": 3}
    train_here(replace(options, pipeline_schedule_mode="ZBV", **other))
    assert "resumed after step 3 (12 samples)" in capsys.readouterr().out
    assert steps_of(options.metrics) == whole(dtype)
    assert saved(options.save_dir) == ["step-00000003", "step-00000005"]
    if dtype == "fp32":
        train_here(options)  # nothing is left to do
        assert steps_of(options.metrics)[1] == whole(dtype)[1]


def test_another_training_is_refused(halfway, tmp_path) -> None:
    options = halfway("fp32", tmp_path)
    with pytest.raises(RequestError, match=r"another training: seed 0, now 1"):
        train_here(replace(options, seed=1))


def test_a_step_number_that_is_not_restored_is_noticed(
    whole, halfway, tmp_path, monkeypatch
) -> None:
    """The negative control: the data of steps that were done would come again."""
    options = halfway("fp32", tmp_path)
    from zbpp.pipeline import Pipeline

    def forget(pipeline, path, **more):
        told = loads(pipeline, path, **more)
        pipeline._n_steps = 0
        return told

    loads = Pipeline.load
    monkeypatch.setattr(Pipeline, "load", forget)
    train_here(options)
    assert steps_of(options.metrics)[1] != whole("fp32")[1]


def test_metrics_of_a_step_are_written_before_it_is_saved(
    tmp_path, monkeypatch
) -> None:
    """A run that is killed then, and goes on from there, has no gap in them."""
    from zbpp.pipeline import Pipeline

    metrics, seen = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr("zbpp.training.resume._EVERY", 2)

    def save(pipeline, folder, **more):
        seen.append((pipeline.n_steps, metrics.read_text().count("\n")))
        saves(pipeline, folder, **more)

    saves = Pipeline.save
    monkeypatch.setattr(Pipeline, "save", save)
    options = replace(TINY, steps=3, metrics=metrics, save_dir=tmp_path / "run")
    train_here(replace(options, stages=2))
    assert seen == [(2, 2), (3, 3)]


class Store:
    """As torch's, for two ranks in one process."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self.held.setdefault(key, value)

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.held

    def get(self, key: str) -> bytes:
        return self.held[key].encode()


def test_ranks_stop_before_the_same_step() -> None:
    """Rank 1 is asked before step 5, when rank 0 may be one step ahead."""
    store = Store()
    ranks = [StopRequest(store, rank) for rank in range(2)]
    assert not any(ranks[0].stops_before(step) for step in range(7))
    assert not any(ranks[1].stops_before(step) for step in range(5))
    ranks[1].note(signal.SIGTERM)
    assert [ranks[1].stops_before(step) for step in (5, 6, 7)] == [False, False, True]
    assert ranks[0].stops_before(7) and ranks[0].exit_code == 143
    again = [StopRequest(store, rank) for rank in range(2)]
    assert not any(one.stops_before(step) for one in again for step in range(9))
    again[0].note(signal.SIGINT)
    assert not again[0].stops_before(3) and again[1].stops_before(5)


# In processes.


def command(tmp_path: Path) -> list[str]:
    files = ["--metrics", tmp_path / "metrics.jsonl", "--save_dir", tmp_path / "run"]
    flags = [*SIZES.split(), "--data", __file__, "--stages", "2", *map(str, files)]
    return [sys.executable, "-m", "zbpp", "train", *flags]


def begun(process: subprocess.Popen, tmp_path: Path, step: int) -> None:
    """Wait until a step has been done."""
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def workers(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks."""
    import psutil

    children = psutil.Process(process.pid).children(recursive=True)
    return [child.pid for child in children if "RANK" in child.environ()]


def has_ended(number: int) -> bool:
    """A rank may end after its launcher; nobody may be there to reap it."""
    import psutil

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if psutil.Process(number).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[list[dict], str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(command(folder), check=True, capture_output=True, timeout=300)
    return steps_of(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [
        (signal.SIGTERM, 143, False),
        pytest.param(signal.SIGTERM, 143, True, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_saves_and_leaves_no_process(
    number, code, to_group, undisturbed, tmp_path
) -> None:
    process = subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    begun(process, tmp_path, 6)
    children = workers(process)
    if to_group:  # also to the workers, as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == code, out
    assert "by a signal, and saved in" in out
    assert all(has_ended(child) for child in children)
    subprocess.run(command(tmp_path), check=True, capture_output=True, timeout=300)
    assert steps_of(tmp_path / "metrics.jsonl") == undisturbed


# What cannot be written.


def test_a_second_run_in_a_folder_is_refused(tmp_path) -> None:
    from zbpp.checkpoint import locked

    options = replace(TINY, steps=1, save_dir=tmp_path / "run")
    refused = pytest.raises(RequestError, match="--save_dir: another run saves")
    with locked(tmp_path / "run"), refused:
        train_here(options)
    train_here(options)


def test_a_run_that_could_not_save_its_end_says_so(tmp_path, monkeypatch) -> None:
    from zbpp.pipeline import Pipeline

    def full(pipeline, folder, **more):
        raise CheckpointError("cannot write: No space left on device")

    monkeypatch.setattr(Pipeline, "save", full)
    options = replace(TINY, steps=1, save_dir=tmp_path / "run")
    with pytest.raises(WorkerError, match="ended after step 1, but cannot write: No"):
        train_here(options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_full_disk_for_metrics_loses_no_training(tmp_path, whole) -> None:
    options = replace(TINY, metrics=Path("/dev/full"), save_dir=tmp_path / "run")
    with pytest.raises(WorkerError, match=r"step 5, but --metrics .*No space left"):
        train_here(options)
    assert saved(options.save_dir) == ["step-00000005"]


def test_damaged_metrics_end_where_they_are_torn(tmp_path) -> None:
    from zbpp.training.log import _lines_of_steps

    path = tmp_path / "metrics.jsonl"
    for torn in (b"[1]\n", b"\xff\xfe\n", b"7\n", b"{\n", b"[" * 9999 + b"\n"):
        path.write_bytes(b'{"step": 1}\n{"final": true}\n{"step": 2}\n' + torn)
        assert _lines_of_steps(path, 5) == ['{"step": 1}\n', '{"step": 2}\n']
