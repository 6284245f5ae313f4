"""`zbpp.runtime.testing`: faults happen where they shall."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zbpp
from zbpp.runtime.testing import inject


def make(clip: float | None = None) -> zbpp.Pipeline:
    torch.manual_seed(0)
    return zbpp.Pipeline(
        [nn.Linear(4, 4) for _ in range(4)],
        "ZBH1",
        n_stages=2,
        n_microbatches=3,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        clip_grad_norm=clip,
        step=zbpp.StepPolicy(post_validation=True),
    )


def batch() -> tuple[Tensor, Tensor]:
    x = torch.arange(24.0).reshape(6, 4)
    return x / 10, x.flip(0) / 10


@pytest.mark.parametrize("place", ["0F1", "1B2", "0W0", "O", "V"])
def test_a_fault_happens_at_its_place_and_ends_with_its_block(place: str) -> None:
    with inject(f"raise:0:1:{place}"):
        pipeline = make()
        pipeline.step(*batch())
        with pytest.raises(RuntimeError, match="a fault that the test asks for"):
            pipeline.step(*batch())
    pipeline = make()
    for _ in range(3):
        pipeline.step(*batch())


@pytest.mark.parametrize("part", ["undo", "redo", "replay"])
def test_a_fault_happens_in_a_part_of_a_validation(part: str) -> None:
    with inject(f"memory:0:1:{part}"):
        pipeline = make(clip=1e-3)
        pipeline.step(*batch())
        with pytest.raises(torch.OutOfMemoryError, match="as the test asks"):
            pipeline.step(*batch())


def test_other_ranks_are_left_alone() -> None:
    with inject("raise:1:0:0F0"):
        make().step(*batch())


def test_the_product_does_not_import_the_seam() -> None:
    source = Path(zbpp.__file__).parent
    texts = [x.read_text(encoding="utf-8") for x in source.rglob("*.py")]
    assert not any(
        re.search(r"runtime\.testing import|import testing", x) for x in texts
    )
