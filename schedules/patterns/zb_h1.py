"""ZB-H1: 1F1B with the backward split, at the memory of 1F1B.

Three stages, four micro-batches; one cell is one unit of time, F = B = W = 1, ``.`` is
idle:

    0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

B hands the gradient on without waiting for W, so the stage above starts its B sooner.
W is put off by one micro-batch more on every stage (W_i of stage s follows B_(i+s)):
a stage further down starts later, ends its last B earlier, and fills the end with W.

Idle time (p-1)(F+B-W) when W <= F and m >= p (Qi et al., arXiv 2401.10241; checked on
a grid; for larger W the order must adapt, which a fixed one does not).
"""

from itertools import pairwise

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns.phases import Phases, in_phases

__all__ = ["plan_zb_h1", "zb_h_phases"]

F, B, W = PassKind.F, PassKind.B, PassKind.W


def plan_zb_h1(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-H1; peak memory min(p, m) M_B, for any M_W <= M_B.

    When a stage starts an F it has p-s micro-batches before B and s before W.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """

    def phases(stage: int) -> Phases:
        return zb_h_phases(stage, n_stages, n_microbatches, arms=1)

    return in_phases("ZBH1", Placement.single(n_stages), n_microbatches, phases)


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
