"""A checkpoint that an earlier release has written: `data/checkpoint_1.tar.xz`.

That release ran three steps of `saved_runs.run` under ZBV on two stages: two groups of
AdamW, a scheduler, buffers, dropout, clipping, rollbacks.
"""

import shutil
from pathlib import Path

import pytest
import torch
from saved_runs import run
from small_model import assert_same

ARCHIVE = Path(__file__).parents[1] / "data" / "checkpoint_1.tar.xz"


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path, filter="data")
    return tmp_path


def test_it_goes_on_with_the_same_bits_under_every_mode(folder) -> None:
    one_stage = run("1F1B", 1, loaded=str(folder))
    other = run("ZBH1", 4, loaded=str(folder))
    assert other[0] == one_stage[0]
    assert_same(other[1], one_stage[1])


def test_it_holds_what_three_steps_leave(folder) -> None:
    """Other machines may round otherwise, so not to the last bit."""
    resumed, whole = run("ZBV", 2, loaded=str(folder)), run("ZBV", 2)
    for numbers, expected in zip(resumed[0], whole[0][3:], strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4)
    assert resumed[1].keys() == whole[1].keys()
    for name, value in whole[1].items():
        torch.testing.assert_close(resumed[1][name], value, rtol=1e-4, atol=1e-5)
