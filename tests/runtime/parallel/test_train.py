"""Replicas in `zbpp train`: the same training, and one line when one of them fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from zbpp.training.options import Train
from zbpp.training.start import start

pytestmark = pytest.mark.dist

SIZES = {"dim": 32, "hidden": 64, "n_blocks": 4, "seq": 32, "steps": 4}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("zero bubble pipeline " * 4000)
    return path


def final(path: Path) -> dict[str, object]:
    return json.loads(path.read_text().splitlines()[-1])


@pytest.mark.slow
def test_replicas_train_as_one_pipeline_does(text: Path, tmp_path: Path) -> None:
    found = {}
    for name, more in {
        "one": {"microbatches": 8, "stages": 2},
        "optimizer": {"microbatches": 4, "stages": 2, "data_parallel": 2},
        "parameters": {"microbatches": 4, "stages": 1, "data_parallel": 2},
        "tensors": {"microbatches": 8, "stages": 2, "tensor_parallel": 2},
    }.items():
        shard = name if name in ("optimizer", "parameters") else "none"
        out = tmp_path / name
        start(Train(data=text, metrics=out, shard=shard, **SIZES, **more))
        found[name] = final(out)
    for one in found.values():
        assert one["val_loss"] == pytest.approx(found["one"]["val_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words", "shard"),
    [
        ("kill:3:2:1F2", "rank 3 was killed by SIGKILL", "optimizer"),
        pytest.param(
            "stop:0:2:0REDUCE_GRAD",
            "; rank 0 has left no word",
            "parameters",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_failing_replica_ends_all_with_one_line(
    fault: str, words: str, shard: str, text: Path
) -> None:
    """A rank that hangs is named, and none that waits for it."""
    flags = {**SIZES, "stages": 2, "data_parallel": 2, "shard": shard}
    flags |= {"microbatches": 4, "steps": 50, "timeout_s": 20, "data": text}
    command = [sys.executable, "-m", "zbpp", "train"]
    command += [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"ZBPP_FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started: set[psutil.Process] = set()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step:"):
            started.update(psutil.Process(process.pid).children(recursive=True))
    stderr = process.communicate(timeout=200)[1]
    assert process.returncode == 1
    assert len(stderr.splitlines()) == 1 and words in stderr
    _, left = psutil.wait_procs(list(started), timeout=60)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
