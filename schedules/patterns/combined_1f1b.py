"""Combined 1F1B: interleaved 1F1B whose steady state runs F beside a backward.

Two stages with two chunks each (placement 0 1 0 1), four micro-batches; one cell is one
unit of time, every pass of a chunk takes 1, a pair 2 (``-`` is its second half):

    0 | 0F0      0F1      2F0      2F1      0F2      .        0F3&2BW0 -        2F2&2BW1 -        2F3&0BW0 -        0BW1     -        2BW2     -        2BW3     -        0BW2     -        0BW3     -
    1 | .        1F0      1F1      3F0      3F1&3BW0 -        1F2&3BW1 -        1F3&1BW0 -        3F2&1BW1 -        3F3&3BW2 -        3BW3     -        1BW2     -        1BW3     -

It is VPP with one more forward in the warm-up: so the F and the backward of a pair are
of micro-batches that do not wait for one another, and each hides what the other
exchanges (the all-to-alls of a mixture of experts) behind what it computes.

Source: Megatron-Core, ``core/pipeline_parallel/combined_1f1b.py`` (its groups have p
micro-batches; ours are those of `plan_vpp`, the same where p divides m). Peak memory
that of VPP and a chunk more.

Idle time of the slowest stage (p-1)(FB - 3F/2) when F = B = W and p divides m >= 2p, if
the pairs of a stage's two chunks take FB, from 2F to 3F (checked on a grid).
"""  # noqa: E501  (a picture is one line a stage)

from zbpp.core import Placement, Schedule
from zbpp.schedules.patterns.phases import Phases, in_phases
from zbpp.schedules.patterns.vpp import interleaved_cells

__all__ = ["plan_combined_1f1b"]


def plan_combined_1f1b(
    *, n_stages: int, n_microbatches: int, chunks_per_stage: int = 2
) -> Schedule:
    """Plan combined 1F1B; peak memory that of `plan_vpp` and a chunk more.

    Raises:
        RequestError: there is no stage, no chunk or no micro-batch.
    """
    placement = Placement.interleaved(n_stages, chunks_per_stage)

    def phases(stage: int) -> Phases:
        forwards, backwards, n = interleaved_cells(stage, placement, n_microbatches)
        n_warm_up = min(n + 1, len(forwards))
        yield 1, forwards[:n_warm_up]  # warm-up: one F more than VPP
        yield 1, [*zip(forwards[n_warm_up:], backwards, strict=False)]  # one beside one
        yield 1, backwards[len(forwards) - n_warm_up :]  # cool-down: drain

    return in_phases("Combined1F1B", placement, n_microbatches, phases)
