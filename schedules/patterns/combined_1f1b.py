"""Combined 1F1B: interleaved 1F1B whose steady state runs F beside a backward.

Two stages with two chunks each (placement 0 1 0 1), four micro-batches; one cell is one
unit of time, every pass of a chunk takes 1, a pair 2 (``-`` is its second half):

PICTURE

It is VPP with one more forward in the warm-up: so the F and the backward of a pair are
of micro-batches that do not wait for one another, and each hides what the other
exchanges (the all-to-alls of a mixture of experts) behind what it computes.

Source: Megatron-Core, ``core/pipeline_parallel/combined_1f1b.py`` (its groups have p
micro-batches; ours are those of `plan_vpp`, the same where p divides m). Peak memory
that of VPP and a chunk more.
"""

from zbpp.core import Order, Pair, Pass, Placement, Schedule, Step
from zbpp.schedules.patterns.vpp import interleaved_passes

__all__ = ["plan_combined_1f1b"]


def plan_combined_1f1b(
    *, n_stages: int, n_microbatches: int, chunks_per_stage: int = 2
) -> Schedule:
    """Plan combined 1F1B; peak memory that of `plan_vpp` and a chunk more.

    Raises:
        RequestError: there is no stage, no chunk or no micro-batch.
    """
    placement = Placement.interleaved(n_stages, chunks_per_stage)
    orders = tuple(
        _order(stage, placement, n_microbatches) for stage in range(n_stages)
    )
    return Schedule("Combined1F1B", placement, n_microbatches, orders)


def _order(stage: int, placement: Placement, n_microbatches: int) -> Order:
    forwards, backwards, n_ahead = interleaved_passes(stage, placement, n_microbatches)
    n_warm_up = min(n_ahead + 1, len(forwards))
    order: list[Pass | Pair] = [*forwards[:n_warm_up]]  # warm-up: one F more than VPP
    for forward, backward in zip(forwards[n_warm_up:], backwards, strict=False):
        order.append(Pair(forward, backward))  # steady: one in beside one out
    order += backwards[len(forwards) - n_warm_up :]  # cool-down: drain
    return (*order, Step(stage))
