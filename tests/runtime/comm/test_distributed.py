"""Stages as processes give the same bits as stages in one process."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from small_model import (
    Trace,
    assert_same,
    batch,
    make_pipeline,
    refusal,
    train,
)
from torch import Tensor, nn
from trained_modes import MODES

from zbpp.pipeline import Pipeline

pytestmark = pytest.mark.dist


def merge(parts: list[Trace]) -> Trace:
    """One trace of all ranks: results agree, each parameter is on one rank."""
    losses, validation, parameters = parts[0]
    for other_losses, other_validation, other_parameters in parts[1:]:
        assert (other_losses, other_validation) == (losses, validation)
        assert not parameters.keys() & other_parameters.keys()
        parameters = parameters | other_parameters
    return losses, validation, parameters


def train_rank(mode: str, more: dict[str, object]) -> Trace:
    return train(mode, None, **more)


@pytest.mark.parametrize(
    ("mode", "n_stages"), [*((mode, 2) for mode in MODES), ("ZBH2", 4), ("ZBV", 4)]
)
def test_processes_equal_one_process(pool: Pool, mode: str, n_stages: int) -> None:
    more = {"clip_grad_norm": 0.3}
    losses, validation, parameters = merge(pool.run(train_rank, n_stages, mode, more))
    expected = train("1F1B", 1, **more)
    assert (losses, validation) == expected[:2]
    assert_same(parameters, expected[2])


def test_autocast_gives_the_same_bits_too(pool: Pool) -> None:
    more: dict[str, object] = {"autocast": torch.bfloat16}
    losses, _, parameters = merge(pool.run(train_rank, 2, "ZBV", more))
    expected = train("1F1B", 1, **more)
    assert losses == expected[0]
    assert losses != train("1F1B", 1)[0]
    assert_same(parameters, expected[2])


def train_with_only_what_is_needed() -> tuple[bool, bool, float]:
    pipeline = make_pipeline("ZBV", None)
    inputs, targets = batch(0)
    result = pipeline.step(
        inputs if pipeline.needs_inputs else None,
        targets if pipeline.needs_targets else None,
    )
    return pipeline.needs_inputs, pipeline.needs_targets, result.loss


def test_only_the_stages_that_need_a_batch_read_it(pool: Pool) -> None:
    ranks = pool.run(train_with_only_what_is_needed, 2)
    loss = ranks[0][2]
    assert ranks == [(True, True, loss), (False, False, loss)]  # a V turns back to 0


class Shorter(nn.Module):
    """Hands on as many positions as the data say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 1 + int(x.detach().sum() > 0)]


def change_shapes() -> str:
    layers = [nn.Sequential(nn.Identity(), Shorter()), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers, loss_fn=nn.functional.mse_loss, optimizer=None, schedule="1F1B",
        n_microbatches=2,
    )  # fmt: skip
    long, short = torch.ones(4, 2, 4), -torch.ones(4, 2, 4)
    pipeline.step(long, long)
    pipeline.evaluate(short, short[:, :1])
    pipeline.step(long, long)
    try:
        return refusal(pipeline.step, short, short[:, :1])
    except RuntimeError as error:
        return str(error)


def test_a_shape_that_the_data_decide_is_refused_by_the_sender(pool: Pool) -> None:
    sender, receiver = pool.run(change_shapes, 2)
    words = "float32[2, 1, 4], but with inputs of the same shapes it was float32[2, 2,"
    assert words in sender
    assert "rank 0 failed first" in receiver and words in receiver


def disagree() -> str:
    split = (5, 4) if dist.get_rank() == 0 else (4, 5)
    return refusal(make_pipeline, "1F1B", None, split=split)


def test_ranks_with_different_settings_are_refused(pool: Pool) -> None:
    for message in pool.run(disagree, 2):
        assert "rank(s) [1] and rank 0 were started with different" in message


def count_unfinished_sends(post_validation: bool) -> list[int]:
    """After each step, once its sums have been read."""
    pipeline = make_pipeline("ZBH1", None, post_validation=post_validation)
    (executor,) = pipeline.stages.executors.values()
    counts = []
    for step in range(5):
        pipeline.step(*batch(step))
        pipeline.synchronize()
        counts.append(len(executor.transport._link._sends))
    return counts


@pytest.mark.parametrize("post_validation", [False, True])
def test_sends_are_let_go_when_the_sums_have_come(
    pool: Pool, post_validation: bool
) -> None:
    for counts in pool.run(count_unfinished_sends, 2, post_validation):
        assert counts == [0] * 5


def use_a_subgroup() -> tuple[int, list[tuple[float, float]]]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    return dist.get_rank(), train("ZBH1", None, mesh=group)[0]


def test_two_pipelines_side_by_side_in_groups_of_their_own(pool: Pool) -> None:
    expected = train("1F1B", 1)[0]
    for _, losses in pool.run(use_a_subgroup, 4):
        assert losses == expected


def groups_left(closes: bool) -> tuple[bool, bool]:
    """Whether groups of a pipeline are there, before its end and after."""
    pipeline = make_pipeline("ZBV", None)
    pipeline.step(*batch(0))
    pipeline.synchronize()
    (executor,) = pipeline.stages.executors.values()
    groups = [weakref.ref(group) for group in executor.transport._groups.opened()]
    before = all(group() is not None for group in groups)
    del executor
    if closes:
        pipeline.close()  # a script keeps it until Python ends
    else:
        del pipeline
    gc.collect()
    return before, any(group() is not None for group in groups)


def close_it_and_drop_it() -> list[tuple[bool, bool]]:
    return [groups_left(closes) for closes in (True, False)]


def test_a_pipeline_that_is_closed_or_dropped_leaves_no_group(pool: Pool) -> None:
    """A thread of a group that lets go of a tensor while Python ends aborts the
    process; a group joins its threads when the last reference to it goes."""
    for counts in pool.run(close_it_and_drop_it, 2):
        assert counts == [(True, False)] * 2


def drop_it_while_the_other_stage_is_late() -> str:
    """Stage 1 begins the last sum only when stage 0 has dropped its pipeline."""
    pipeline = make_pipeline(
        "ZBH1",
        None,
        post_validation=True,
        timeout_s=5.0,
        first_timeout_s=100.0,
    )
    store = dist.distributed_c10d._get_default_store()
    pipeline.step(*batch(0))
    if pipeline.rank == 0:
        pipeline.step(*batch(1))
        del pipeline
        gc.collect()
        store.set("stage 0 has dropped it", "")
        return "dropped"
    (executor,) = pipeline.stages.executors.values()
    reduce = executor.optimizer.reduce

    def reduce_late(transport: Any) -> None:
        store.wait(["stage 0 has dropped it"])
        reduce(transport)

    executor.optimizer.reduce = reduce_late
    loss = pipeline.step(*batch(1)).loss
    return f"loss {loss}"


def test_a_pipeline_that_is_dropped_waits_for_nobody(pool: Pool) -> None:
    """And what the others still need of it comes."""
    expected = train("1F1B", 1)[0]
    words = pool.run(drop_it_while_the_other_stage_is_late, 2)
    assert words == ["dropped", f"loss {expected[1][0]}"]
