"""1F1B: as soon as the pipeline is full, one backward for each forward.

Three stages, four micro-batches; one cell is one unit of time, F = B = W = 1, and
``BW`` takes two cells (``-`` goes on, ``.`` is idle):

    0 | F0  F1  F2  .   .   .   .   BW0 -   F3  BW1 -   .   BW2 -   .   BW3 -
    1 | .   F0  F1  .   .   BW0 -   F2  BW1 -   F3  BW2 -   .   BW3 -
    2 | .   .   F0  BW0 -   F1  BW1 -   F2  BW2 -   F3  BW3 -

Idle time (p-1)(F+B+W) when m >= p. Stage s holds at most p-s activations, whatever m:
that is what it gains over FThenB (Narayanan et al., arXiv 2006.09503).
"""

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns.phases import Phases, in_phases

__all__ = ["one_f_one_b_phases", "plan_one_f_one_b"]

F, BW = PassKind.F, PassKind.BW


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
