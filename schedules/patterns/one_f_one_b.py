"""1F1B: as soon as the pipeline is full, one backward for each forward.

Three stages, four micro-batches; one cell is one unit of time, F = B = W = 1, and
``BW`` takes two cells (``-`` goes on, ``.`` is idle):

    0 | F0  F1  F2  .   .   .   .   BW0 -   F3  BW1 -   .   BW2 -   .   BW3 -
    1 | .   F0  F1  .   .   BW0 -   F2  BW1 -   F3  BW2 -   .   BW3 -
    2 | .   .   F0  BW0 -   F1  BW1 -   F2  BW2 -   F3  BW3 -

Idle time (p-1)(F+B+W) when m >= p. Stage s holds at most p-s activations, whatever m:
that is what it gains over FThenB (Narayanan et al., arXiv 2006.09503).
"""

from zbpp.core import Order, Pass, PassKind, Placement, Schedule, Step

__all__ = ["plan_one_f_one_b"]

F, BW = PassKind.F, PassKind.BW


def plan_one_f_one_b(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan 1F1B; peak memory min(p, m) M_B, on stage 0.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    orders = tuple(_order(stage, n_stages, n_microbatches) for stage in range(n_stages))
    return Schedule("1F1B", Placement.single(n_stages), n_microbatches, orders)


def _order(stage: int, n_stages: int, n_microbatches: int) -> Order:
    n_warm_up = min(n_stages - 1 - stage, n_microbatches)
    n_steady = n_microbatches - n_warm_up
    order = [Pass(F, stage, i) for i in range(n_warm_up)]  # fill the stages below
    for i in range(n_steady):  # steady: one in, one out
        order += [Pass(F, stage, n_warm_up + i), Pass(BW, stage, i)]
    order += [Pass(BW, stage, i) for i in range(n_steady, n_microbatches)]  # drain
    return (*order, Step(stage))
