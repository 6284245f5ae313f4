"""ZB-V: no bubble when F = B = W, at the memory of 1F1B.

Every stage holds two chunks: the model goes down the stages and comes back up, so
stage 0 has the first chunk and the last. Two stages (placement 0 1 1 0), three
micro-batches; one cell is one unit of time, every pass of a chunk takes 1, ``.`` is
idle:

    0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
    1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2

The loss is on stage 0, which may begin the backward while stage p-1 is still busy with
the forward: memory is given back sooner, and all stages hold the same. W follows its B
at once, save the last ones of each stage, which fill the end.

No idle time when F = B = W, no communication and m >= 2p-1 (Qi et al., arXiv
2401.10241, section 6; the pattern is fixed, for other times it must adapt).
"""

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns.phases import Phases, in_phases

__all__ = ["plan_zb_v", "zb_v_phases"]

F, B, W = PassKind.F, PassKind.B, PassKind.W


def plan_zb_v(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-V; peak memory min(p, m) M_B on every stage, for any M_W <= M_B.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    least = 2 * n_stages - 1

    def phases(stage: int) -> Phases:
        return zb_v_phases(stage, n_stages, max(n_microbatches, least))

    placement = Placement.wave(n_stages)
    return in_phases("ZBV", placement, n_microbatches, phases, least=least)


def zb_v_phases(stage: int, n_stages: int, n_microbatches: int) -> Phases:
    """The phases of a stage, for 2p-1 micro-batches or more."""
    f, b, w = [(kind, stage) for kind in (F, B, W)]
    f_up, b_up, w_up = [(kind, 2 * n_stages - 1 - stage) for kind in (F, B, W)]
    below = n_stages - stage  # stages from here to the turn of the V
    # warm-up: fill the way down, then the way up, until the loss comes back
    yield 2 * below - 1, [f]
    yield stage, [f_up, f]
    yield below, [f_up, b_up, w_up]
    # steady: one micro-batch through both chunks; later no F is left to begin
    yield n_microbatches - 2 * n_stages + 1 + stage, [f, b, w, f_up, b_up, w_up]
    yield below - 1, [b, w, f_up, b_up, w_up]
    # cool-down: hand the gradients on first, fill the end with W
    yield stage, [b, b_up]
    yield below, [b, w]
    yield stage, [w_up]
    yield stage, [w]
