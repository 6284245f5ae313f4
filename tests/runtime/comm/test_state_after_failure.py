"""A stage that fails in its speculative step may still ask for a whole state."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from small_model import batch, make_pipeline
from torch import Tensor

from zbpp.pipeline import Pipeline
from zbpp.runtime import PeerError
from zbpp.runtime.comm.mailbox import Mailbox
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.fault_injection import Fault
from zbpp.training.launch import error_that_came_first

SETTINGS: dict[str, Any] = {"clip_grad_norm": 1e9, "timeout_s": 60}


def weight_of(pipeline: Pipeline) -> Tensor:
    return dict(pipeline.named_parameters())["layers.1.up.weight"].detach().clone()


def fail_in(stage: Stage, what: object) -> None:
    Fault("raise", 0, 1, "O").inject(0, stage.step, str(what))


def fail_before_the_other_sums(waits: bool) -> Tensor | str:
    """Stage 0 fails in O of step 1, whose sum stage 1 begins after that."""
    pipeline = make_pipeline("ZBH1", None, post_validation=True, **SETTINGS)
    pipeline.step(*batch(0))
    executor = pipeline.stages.executors[pipeline.rank]
    reduce = executor.optimizer.reduce
    end_sum = Mailbox._end_sum
    store = dist.distributed_c10d._get_default_store()

    def reduce_late(on: Any) -> None:
        store.wait(["stage 0 has failed"])
        reduce(on)

    def end(mailbox: Mailbox) -> None:
        if waits:
            store.set("stage 0 has failed", "")
            end_sum(mailbox)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "_end_sum", end)
        if pipeline.rank == 0:
            executor.inject_fault = partial(fail_in, executor.stage)
        else:
            patch.setattr(executor.optimizer, "reduce", reduce_late)
        try:
            pipeline.step(*batch(1))
            return "a whole step"
        except RuntimeError as first:
            try:
                return weight_of(pipeline)
            except PeerError as error:
                return f"{error}; {error_that_came_first(error) is first}"
        finally:
            if pipeline.rank == 0:
                store.set("stage 0 has failed", "")


@pytest.mark.dist
def test_the_sum_of_the_failed_step_is_waited_for(pool: Pool) -> None:
    with make_pipeline("ZBH1", 2, **SETTINGS) as pipeline:
        for step in range(2):
            pipeline.step(*batch(step))
        expected = weight_of(pipeline)
    found, other = pool.run(fail_before_the_other_sums, 2, True)
    assert other == "a whole step"
    assert torch.equal(found, expected)


@pytest.mark.dist
def test_without_that_the_state_is_lost_and_the_error_says_so(pool: Pool) -> None:
    found, _ = pool.run(fail_before_the_other_sums, 2, False)
    assert "given up after the first failure; True" in found


def test_the_error_that_came_first() -> None:
    def fail(*, handling: bool) -> None:
        try:
            if handling:
                raise OSError("disk full")
        except OSError as error:
            first.append(error)
            try:
                raise KeyError("lost")
            except KeyError as reason:
                raise PeerError("nobody") from reason
        try:
            raise KeyError("lost")
        except KeyError as reason:
            raise PeerError("nobody") from reason

    first: list[BaseException] = []
    with pytest.raises(PeerError) as found:
        fail(handling=True)
    assert error_that_came_first(found.value) is first[0]
    with pytest.raises(PeerError) as found:
        fail(handling=False)
    assert error_that_came_first(found.value) is found.value
