"""A pipeline goes on under another schedule, with the bits of one that does not."""

import pytest
import torch
from pool import Pool
from small_model import assert_same, batch, build, make_pipeline, refusal
from torch import Tensor, nn

from zbpp import diagnostics
from zbpp.core import Costs, Schedule
from zbpp.planning import plan

SINGLE = ("ZBH1", "1F1B", "ZB", "FThenB")
TWO_CHUNKS = ("ZBV", "VMin", "VHalf")


def a_plan(mode: str, n_stages: int) -> Schedule:
    costs = Costs(f=1.0, b=1.5, w=0.5, comm=0.2)
    return plan(mode, n_stages=n_stages, n_microbatches=6, costs=costs)


def dropping(layers: range) -> list[nn.Module]:
    return build(layers, dropout=0.2)


Outcome = tuple[list[float], dict[str, Tensor], int]


def run(n_stages: int | None, modes: tuple[str, ...], **settings: object) -> Outcome:
    """Two steps under each mode; steps are speculative, and often rolled back."""
    pipeline = make_pipeline(
        modes[0], n_stages, model=dropping, seed=3, clip_grad_norm=0.3,
        post_validation=True, **settings,
    )  # fmt: skip
    losses, rollbacks = [], 0
    for step, mode in enumerate(mode for mode in modes for _ in range(2)):
        if step:
            pipeline.switch(a_plan(mode, pipeline.schedule.n_stages))
        result = pipeline.step(*batch(step))
        losses.append(result.loss)
        rollbacks += result.rollbacks
        rows = diagnostics.timeline(pipeline).rows  # those of a replay come twice
        orders = tuple(tuple(dict.fromkeys(slot.job for slot in row)) for row in rows)
        assert orders == pipeline.schedule.orders
        assert not step or pipeline.schedule.name == mode
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    pipeline.close()
    return losses, parameters, rollbacks


@pytest.mark.parametrize("modes", [SINGLE, TWO_CHUNKS])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_in_one_process(modes: tuple[str, ...], n_stages: int) -> None:
    losses, parameters, rollbacks = run(n_stages, modes)
    assert rollbacks
    same = run(1, ("ZBH1",) * len(modes))
    assert losses == same[0]
    assert_same(parameters, same[1])


@pytest.mark.dist
def test_in_two_processes(pool: Pool) -> None:
    losses, parameters, _ = run(1, ("ZBH1",) * len(TWO_CHUNKS))
    ranks = pool.run(run, 2, None, TWO_CHUNKS)
    assert ranks[0][0] == losses
    assert_same(ranks[0][1] | ranks[1][1], parameters)


def test_what_needs_other_layers_is_refused() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    for schedule, what in (
        (plan("ZBV", n_stages=2, n_microbatches=6), "the placement"),
        (plan("ZBH1", n_stages=2, n_microbatches=4), "the micro-batches 4"),
    ):
        assert f"the schedule to switch to has {what}" in refusal(
            pipeline.switch, schedule
        )
    pipeline.step(*batch(0))


def different_plans() -> str:
    pipeline = make_pipeline("ZBH1", None)
    mode = "ZB" if torch.distributed.get_rank() else "1F1B"
    return refusal(pipeline.switch, a_plan(mode, 2))


@pytest.mark.dist
def test_ranks_must_agree(pool: Pool) -> None:
    assert all("different schedules" in text for text in pool.run(different_plans, 2))
