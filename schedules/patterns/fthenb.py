"""FThenB (GPipe): every forward, then every backward.

Three stages, four micro-batches; one cell is one unit of time, F = B = W = 1, and
``BW`` takes two cells (``-`` goes on, ``.`` is idle):

    0 | F0  F1  F2  F3  .   .   .   .   .   .   BW0 -   BW1 -   BW2 -   BW3 -
    1 | .   F0  F1  F2  F3  .   .   .   BW0 -   BW1 -   BW2 -   BW3 -
    2 | .   .   F0  F1  F2  F3  BW0 -   BW1 -   BW2 -   BW3 -

Idle time (p-1)(F+B+W), as 1F1B, but every stage holds all m activations: the simplest
schedule, and the one to compare memory with (Huang et al., arXiv 1811.06965).
"""

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns.phases import Phases, in_phases

__all__ = ["plan_fthenb"]

F, BW = PassKind.F, PassKind.BW


def plan_fthenb(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan FThenB; peak memory m M_B on every stage.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """

    def phases(stage: int) -> Phases:
        return (n_microbatches, [(F, stage)]), (n_microbatches, [(BW, stage)])

    return in_phases("FThenB", Placement.single(n_stages), n_microbatches, phases)
