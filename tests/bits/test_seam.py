"""`zbpp.runtime.testing`: faults happen where they shall, and traces show the bits."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zbpp
from zbpp.runtime.testing import TracedJob, inject, trace


def make(scale: float = 1.0, clip: float | None = None) -> zbpp.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    with torch.no_grad():
        layers[1].weight *= scale
    return zbpp.Pipeline(
        layers,
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


def test_a_trace_has_the_jobs_of_the_schedule_and_their_bits() -> None:
    def traced(scale: float) -> list[list[TracedJob]]:
        pipeline = make(scale)
        pipeline.step(*batch())
        with trace(pipeline) as jobs:
            pipeline.step(*batch())
        pipeline.step(*batch())
        rows = [[x for x in jobs if x.stage == stage] for stage in range(2)]
        texts = [[x.job for x in row] for row in rows]
        assert texts == [[str(x) for x in order] for order in pipeline.schedule.orders]
        return rows

    (_, last), (_, other) = traced(1.0), traced(2.0)
    assert last == traced(1.0)[1]
    for x, y in zip(last, other, strict=True):
        is_same = x.digest == y.digest
        assert is_same == ("W" in x.job), f"{x.job}: a W hands over nothing"


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
