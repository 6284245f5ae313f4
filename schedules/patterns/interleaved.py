"""Several chunks a stage, round robin: VPP and combined 1F1B.

Pictures are of two stages with two chunks each (placement 0 1 0 1) and four
micro-batches; one cell is one unit of time, ``.`` is idle. p stages, m micro-batches.

VPP (interleaved 1F1B): several chunks a stage shorten the warm-up. F and BW of a chunk
take 1 each:

    0 | 0F0  0F1  2F0  2F1  0F2  2BW0 0F3  2BW1 2F2  0BW0 2F3  0BW1 .    2BW2 .    2BW3 0BW2 0BW3
    1 | .    1F0  1F1  3F0  3BW0 3F1  3BW1 1F2  1BW0 1F3  1BW1 3F2  3BW2 3F3  3BW3 1BW2 1BW3

Micro-batches go in groups: a stage runs its first chunk on a whole group, then its
second chunk on that group, and so on; backward alike, last chunk first. A group must
not be smaller than p, or its micro-batches come back to stage 0 later than their turn;
so m is divided evenly into m // p groups (one if m < p), and need not be a multiple.

Idle time (p-1)(F+B+W)/v for v chunks a stage when m >= p (Narayanan et al., arXiv
2104.04473; with these groups checked for every m from p on).

Combined 1F1B: interleaved 1F1B whose steady state overlaps F with a backward. Every
pass of a chunk takes 1, a pair 2 (``-`` is its second half):

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

from collections.abc import Iterator
from itertools import chain, pairwise

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns import Cell, Phases, in_phases

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

    def phases(stage: int) -> Phases:
        return vpp_phases(stage, placement, n_microbatches)

    return in_phases("VPP", placement, n_microbatches, phases)


def vpp_phases(stage: int, placement: Placement, n_microbatches: int) -> Phases:
    """The phases of a stage."""
    forwards, backwards, n_ahead = _cells(stage, placement, n_microbatches)
    n_steady = max(0, len(forwards) - n_ahead)
    yield 1, forwards[:n_ahead]  # warm-up: fill the stages below
    steady = zip(forwards[n_ahead:], backwards, strict=False)
    yield 1, [*chain.from_iterable(steady)]  # one in, one out
    yield 1, backwards[n_steady:]  # cool-down: drain


def _cells(
    stage: int, placement: Placement, n_microbatches: int
) -> tuple[list[Cell], list[Cell], int]:
    """The F's and BW's of a stage in their order, and how many F's go ahead."""
    p, chunks = placement.n_stages, placement.chunks_of[stage]
    n_groups = max(1, n_microbatches // p)  # of at least p, sizes 1 apart at most
    ends = [n_microbatches * group // n_groups for group in range(n_groups + 1)]
    sizes = [end - start for start, end in pairwise(ends)]

    def cells(kind: PassKind, chunks: tuple[int, ...]) -> Iterator[Cell]:
        for size in sizes:
            for chunk in chunks:
                yield from [(kind, chunk)] * size

    # a group must be through all chunks before its first BW; on the way down to stage
    # p-1 and back up, stage s can begin two more passes for each stage below it
    n_ahead = (len(chunks) - 1) * max(sizes) + 2 * (p - 1 - stage)
    return [*cells(F, chunks)], [*cells(BW, chunks[::-1])], n_ahead


def plan_combined_1f1b(
    *, n_stages: int, n_microbatches: int, chunks_per_stage: int = 2
) -> Schedule:
    """Plan combined 1F1B; peak memory that of `plan_vpp` and a chunk more.

    Raises:
        RequestError: there is no stage, no chunk or no micro-batch.
    """
    placement = Placement.interleaved(n_stages, chunks_per_stage)

    def phases(stage: int) -> Phases:
        forwards, backwards, n = _cells(stage, placement, n_microbatches)
        n_warm_up = min(n + 1, len(forwards))
        yield 1, forwards[:n_warm_up]  # warm-up: one F more than VPP
        yield 1, [*zip(forwards[n_warm_up:], backwards, strict=False)]  # pairs
        yield 1, backwards[len(forwards) - n_warm_up :]  # cool-down: drain

    return in_phases("Combined1F1B", placement, n_microbatches, phases)
