"""A folder of checkpoints belongs to one run at a time."""

import os
from pathlib import Path

import pytest

from zbpp.checkpoint import CheckpointError, locked


def test_a_folder_is_held_by_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with locked(folder):
        refused = pytest.raises(CheckpointError, match=r"another run .* another fol")
        with refused, locked(folder):
            pass
        with locked(tmp_path):
            pass
    with locked(folder):
        assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(CheckpointError, match=r"cannot write to .*file")
    with refused, locked(tmp_path / "file" / "run"):
        pass
