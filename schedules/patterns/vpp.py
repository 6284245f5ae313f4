"""VPP (interleaved 1F1B): several chunks a stage shorten the warm-up.

Two stages with two chunks each (placement 0 1 0 1), four micro-batches; one cell is one
unit of time, F and BW of a chunk take 1 each, ``.`` is idle:

    0 | 0F0  0F1  2F0  2F1  0F2  2BW0 0F3  2BW1 2F2  0BW0 2F3  0BW1 .    2BW2 .    2BW3 0BW2 0BW3
    1 | .    1F0  1F1  3F0  3BW0 3F1  3BW1 1F2  1BW0 1F3  1BW1 3F2  3BW2 3F3  3BW3 1BW2 1BW3

Micro-batches go in groups: a stage runs its first chunk on a whole group, then its
second chunk on that group, and so on; backward alike, last chunk first. A group must
not be smaller than p, or its micro-batches come back to stage 0 later than their turn;
so m is dealt evenly to m // p groups (one group if m < p), and m need not divide.

Idle time (p-1)(F+B+W)/v for v chunks a stage when m >= p (Narayanan et al., arXiv
2104.04473; with these groups checked for every m from p on).
"""  # noqa: E501  (a picture is one line a stage)

import itertools

from zbpp.core import Order, Pass, PassKind, Placement, Schedule, Step

__all__ = ["interleaved_passes", "plan_vpp"]

F, BW = PassKind.F, PassKind.BW


def plan_vpp(
    *, n_stages: int, n_microbatches: int, chunks_per_stage: int = 2
) -> Schedule:
    """Plan VPP; peak memory at most ((v-1) g + 2p - 1) / v M_B, on stage 0.

    Here g is the largest group: p if p divides m, else at most 2p-1 (m if m < p).

    Raises:
        RequestError: there is no stage, no chunk or no micro-batch.
    """
    placement = Placement.interleaved(n_stages, chunks_per_stage)
    orders = tuple(
        _order(stage, placement, n_microbatches) for stage in range(n_stages)
    )
    return Schedule("VPP", placement, n_microbatches, orders)


def _groups(n_stages: int, n_microbatches: int) -> list[range]:
    """Deal the micro-batches to groups of at least p, their sizes 1 apart at most."""
    n_groups = max(1, n_microbatches // n_stages)
    bounds = [n_microbatches * group // n_groups for group in range(n_groups + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def interleaved_passes(
    stage: int, placement: Placement, n_microbatches: int
) -> tuple[list[Pass], list[Pass], int]:
    """The F's and BW's of a stage in their order, and how many F's go ahead."""
    chunks = placement.chunks_of[stage]
    groups = _groups(placement.n_stages, n_microbatches)
    forwards = [Pass(F, c, i) for group in groups for c in chunks for i in group]
    backwards = [
        Pass(BW, c, i) for group in groups for c in reversed(chunks) for i in group
    ]
    # a group must be through all chunks before its first BW; on the way down to stage
    # p-1 and back up, stage s can begin two more passes for each stage below it
    group = max(len(group) for group in groups)
    n_ahead = (len(chunks) - 1) * group + 2 * (placement.n_stages - 1 - stage)
    return forwards, backwards, n_ahead


def _order(stage: int, placement: Placement, n_microbatches: int) -> Order:
    forwards, backwards, n_ahead = interleaved_passes(stage, placement, n_microbatches)
    n_warm_up = min(n_ahead, len(forwards))
    n_steady = len(forwards) - n_warm_up
    order = forwards[:n_warm_up]  # warm-up: fill the stages below
    for i in range(n_steady):  # steady: one in, one out
        order += [forwards[n_warm_up + i], backwards[i]]
    order += backwards[n_steady:]  # cool-down: drain
    return (*order, Step(stage))
