"""One chunk a stage: FThenB, 1F1B, ZB-H1 and ZB-H2.

One cell of a picture is one unit of time, F = B = W = 1, ``BW`` takes two cells (``-``
continues), ``.`` is idle. p stages, m micro-batches.

FThenB (GPipe): every forward, then every backward.

    0 | F0  F1  F2  F3  .   .   .   .   .   .   BW0 -   BW1 -   BW2 -   BW3 -
    1 | .   F0  F1  F2  F3  .   .   .   BW0 -   BW1 -   BW2 -   BW3 -
    2 | .   .   F0  F1  F2  F3  BW0 -   BW1 -   BW2 -   BW3 -

Idle time (p-1)(F+B+W), as 1F1B, but every stage keeps all m activations: the simplest
schedule, and the one to compare memory with (Huang et al., arXiv 1811.06965).

1F1B: as soon as the pipeline is full, one backward for each forward.

    0 | F0  F1  F2  .   .   .   .   BW0 -   F3  BW1 -   .   BW2 -   .   BW3 -
    1 | .   F0  F1  .   .   BW0 -   F2  BW1 -   F3  BW2 -   .   BW3 -
    2 | .   .   F0  BW0 -   F1  BW1 -   F2  BW2 -   F3  BW3 -

Idle time (p-1)(F+B+W) when m >= p. Stage s keeps at most p-s activations, whatever m:
that is its gain over FThenB (Narayanan et al., arXiv 2006.09503).

ZB-H1: 1F1B with the backward split, at the memory of 1F1B.

    0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

B sends the gradient without waiting for W, so the stage above starts its B sooner.
W is put off by one micro-batch more on every stage (W_i of stage s follows B_(i+s)):
a stage further down starts later, ends its last B earlier, and fills the end with W.

Idle time (p-1)(F+B-W) when W <= F and m >= p (Qi et al., arXiv 2401.10241; checked on
a grid; for larger W the order must adapt, which a fixed one does not).

ZB-H2: no bubble at all when F = B = W, for twice the memory.

    0 | F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
    1 | .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
    2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

The order of ZB-H1 with longer arms. More forwards fill the wait for the first B, and W
is put off by two micro-batches more on every stage, which fills the end. Every stage
works without a pause from its first pass to its last. The stages start and end at
different times, so the optimizer step must not stand behind a barrier to gain from it.

Idle time max(0, (p-1)(F+B-2W)) when W <= F and m >= 2p-1 (Qi et al., arXiv 2401.10241;
checked on a grid; for larger W the order must adapt).
"""

from itertools import pairwise

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns import Phases, in_phases

F, B, W, BW = PassKind


def plan_fthenb(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan FThenB; peak memory m M_B on every stage.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """

    def phases(stage: int) -> Phases:
        return (n_microbatches, [(F, stage)]), (n_microbatches, [(BW, stage)])

    return in_phases("FThenB", Placement.single(n_stages), n_microbatches, phases)


def plan_one_f_one_b(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan 1F1B; peak memory min(p, m) M_B, on stage 0.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """

    def phases(stage: int) -> Phases:
        return one_f_one_b_phases(stage, n_stages, n_microbatches)

    return in_phases("1F1B", Placement.single(n_stages), n_microbatches, phases)


def one_f_one_b_phases(stage: int, n_stages: int, n_microbatches: int) -> Phases:
    """The phases of a stage."""
    n_warm_up = min(n_stages - 1 - stage, n_microbatches)
    yield n_warm_up, [(F, stage)]  # fill the stages below
    yield n_microbatches - n_warm_up, [(F, stage), (BW, stage)]  # one in, one out
    yield n_warm_up, [(BW, stage)]  # drain


def plan_zb_h1(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-H1; peak memory min(p, m) M_B, for any M_W <= M_B.

    When a stage starts an F it has p-s micro-batches before B and s before W.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    return _zb_h("ZBH1", n_stages, n_microbatches, arms=1)


def plan_zb_h2(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-H2; peak memory min(2p-1, m) M_B, for any M_W <= M_B.

    When a stage starts an F it has 2(p-s)-1 micro-batches before B and 2s before W.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    return _zb_h("ZBH2", n_stages, n_microbatches, arms=2)


def _zb_h(name: str, n_stages: int, n_microbatches: int, arms: int) -> Schedule:
    def phases(stage: int) -> Phases:
        return zb_h_phases(stage, n_stages, n_microbatches, arms=arms)

    return in_phases(name, Placement.single(n_stages), n_microbatches, phases)


def zb_h_phases(stage: int, n_stages: int, n_microbatches: int, *, arms: int) -> Phases:
    """The phases of a stage whose F runs ahead of B and whose W follows a later B.

    Each further stage runs F ahead by so many arms less, and puts W off by more.
    """
    m, (f, b, w) = n_microbatches, [(kind, stage) for kind in (F, B, W)]
    n_ahead = min(arms * (n_stages - stage) - (arms - 1), m)
    n_put_off = min(arms * stage, m)
    yield n_ahead, [f]  # fill the stages below
    for i, end in pairwise(sorted({0, n_put_off, m - n_ahead, m})):
        # steady: one in, one out; later without F: drain
        weight, forward = [w] * (i >= n_put_off), [f] * (i < m - n_ahead)
        yield end - i, [b, *weight, *forward]
    yield n_put_off, [w]  # fill the end
