"""Layers that are recomputed give the same bits in several processes."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from histories import ALWAYS
from moments import uncertain_sums
from pool import Pool
from small_model import assert_same, batch, build, make_pipeline

from zbpp.planning import plan
from zbpp.runtime import state_recorder

CLIP = 0.3


def run(mode: str, again: bool, seed: int | None, broken: bool = False) -> Any:
    """Losses, norms, rollbacks and this process's parameters, after four steps."""
    schedule: Any = plan(mode, n_stages=2, n_microbatches=6)
    if again:
        n = schedule.placement.n_chunks
        schedule = replace(schedule, recompute=(True,) * n)
    torch.manual_seed(5)
    with pytest.MonkeyPatch.context() as patch, uncertain_sums(0, share=0):
        if broken:
            patch.setattr(state_recorder, "set_random_state", lambda *_: None)
        pipeline = make_pipeline(
            schedule, None,
            model=partial(build, dropout=0.3), seed=seed,
            clip_grad_norm=CLIP, post_validation=True, patience=ALWAYS,
        )  # fmt: skip
        results = [pipeline.step(*batch(step)) for step in range(4)]
        held = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
        pipeline.close()
    return (
        [(r.loss, r.grad_norm) for r in results],
        [r.rollbacks for r in results],
        held,
    )


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["ZBV", pytest.param("ZBH1", marks=pytest.mark.slow)])
def test_two_processes_recompute_to_the_same_bits(pool: Pool, mode: str) -> None:
    plain = pool.run(run, 2, mode, False, 3)
    for (steps, rollbacks, held), again in zip(
        plain, pool.run(run, 2, mode, True, 3), strict=True
    ):
        assert sum(rollbacks) > 0
        assert again[:2] == (steps, rollbacks)
        assert_same(again[2], held)


@pytest.mark.dist
@pytest.mark.slow
def test_dropout_that_is_not_drawn_again_is_noticed(pool: Pool) -> None:
    plain = pool.run(run, 2, "ZBV", False, None)[0][0]
    assert pool.run(run, 2, "ZBV", True, None)[0][0] == plain
    assert pool.run(run, 2, "ZBV", True, None, True)[0][0] != plain
