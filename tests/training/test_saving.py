"""The files of `zbpp train`: loss scales, torn metrics, a full disk, the lock."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_here import run_train

from zbpp.checkpoint import locked, newest

FLAGS = "--stages 1 --microbatches 4 --microbatch_size 1 --seq 16 --size tiny --lr 1e-2"


def train(metrics: Path, n_steps: int, *more: object) -> int:
    words = f"{FLAGS} --steps {n_steps} --data {__file__} --metrics {metrics}".split()
    return run_train(*words, *map(str, more))


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """All that does not depend on time."""
    timed = ("tokens_per_s", "rollbacks", "prediction")
    rows = map(json.loads, metrics.read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path / "whole", 5, "--dtype", "fp16") == 0
    saved = ("--save_dir", tmp_path / "run")
    assert train(tmp_path / "metrics", 3, "--dtype", "fp16", *saved) == 0
    assert train(tmp_path / "metrics", 5, "--dtype", "fp16", *saved) == 0
    assert rows_of(tmp_path / "metrics") == rows_of(tmp_path / "whole")
    before = (tmp_path / "metrics").read_text().splitlines()[:-1]
    assert train(tmp_path / "metrics", 5, "--dtype", "fp16", *saved) == 0  # no step
    assert (tmp_path / "metrics").read_text().splitlines()[:-1] == before


@pytest.mark.parametrize(
    "torn",
    [b"[1]\n", b"\xff\xfe\n", b"7\n", b"{\n", b"[" * 9999 + b"\n", b'{"step": 9'],
)
def test_torn_metrics_go_on_behind_the_last_whole_step(
    torn: bytes, tmp_path: Path
) -> None:
    metrics, saved = tmp_path / "metrics", ("--save_dir", tmp_path / "run")
    assert train(metrics, 1, *saved) == 0
    metrics.write_bytes(metrics.read_bytes() + torn)
    assert train(metrics, 2, *saved) == 0
    assert [row.get("step") for row in rows_of(metrics)] == [1, 2, None]


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    with locked(folder):
        assert train(tmp_path / "metrics", 1, "--save_dir", folder) == 2
    assert "--save_dir: another run saves" in capsys.readouterr().err
    assert train(tmp_path / "metrics", 1, "--save_dir", folder) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_full_disk_for_metrics_loses_no_training(tmp_path: Path, capsys: Any) -> None:
    assert train(Path("/dev/full"), 2, "--save_dir", tmp_path) == 1
    words = capsys.readouterr().err
    assert "ended after step 2, but --metrics" in words and "No space left" in words
    assert newest(tmp_path) == tmp_path / "step-00000002"
