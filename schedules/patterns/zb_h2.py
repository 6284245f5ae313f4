"""ZB-H2: no bubble at all when F = B = W, for twice the memory.

Three stages, six micro-batches; one cell is one unit of time, F = B = W = 1, ``.`` is
idle:

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

from zbpp.core import Placement, Schedule
from zbpp.schedules.patterns.phases import Phases, in_phases
from zbpp.schedules.patterns.zb_h1 import zb_h_phases

__all__ = ["plan_zb_h2"]


def plan_zb_h2(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-H2; peak memory min(2p-1, m) M_B, for any M_W <= M_B.

    When a stage starts an F it has 2(p-s)-1 micro-batches before B and 2s before W.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """

    def phases(stage: int) -> Phases:
        return zb_h_phases(stage, n_stages, n_microbatches, arms=2)

    return in_phases("ZBH2", Placement.single(n_stages), n_microbatches, phases)
