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

CLIP = 0.3


def run(again: bool) -> Any:
    """Losses, norms, rollbacks and this process's parameters, after four steps."""
    schedule: Any = plan("ZBV", n_stages=2, n_microbatches=6)
    if again:
        n = schedule.placement.n_chunks
        schedule = replace(schedule, recompute=(True,) * n)
    torch.manual_seed(5)
    with uncertain_sums(0, share=0):
        pipeline = make_pipeline(
            schedule, None,
            model=partial(build, dropout=0.3), seed=3,
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
def test_two_processes_recompute_to_the_same_bits(pool: Pool) -> None:
    plain = pool.run(run, 2, False)
    for (steps, rollbacks, held), again in zip(
        plain, pool.run(run, 2, True), strict=True
    ):
        assert sum(rollbacks) > 0
        assert again[:2] == (steps, rollbacks)
        assert_same(again[2], held)
