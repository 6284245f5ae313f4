"""Two chunks a stage on a V: ZB-V and DualPipeV.

The model goes down the stages and comes back up, so stage 0 has the first chunk and the
last. Pictures are of two stages (placement 0 1 1 0); one cell is one unit of time,
every pass of a chunk takes 1, ``.`` is idle. p stages, m micro-batches.

ZB-V: no bubble when F = B = W, at the memory of 1F1B.

    0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
    1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2

The loss is on stage 0, which may begin the backward while stage p-1 is still busy with
the forward: memory is freed sooner, and all stages keep the same. W follows its B
at once, save the last ones of each stage, which fill the end.

No idle time when F = B = W, no communication and m >= 2p-1 (Qi et al., arXiv
2401.10241, section 6; the pattern is fixed, for other times it must adapt).

DualPipeV: F of one micro-batch overlaps with the backward of another; a pair takes 2
(``-`` is its second half):

    0 | 0F0      0F1      0F2      3F0      3B0      3W0      3F1      0F3&3BW1 -        .        3F2&0BW0 -        3BW2     -        3F3&0BW1 -        3BW3     -        0B2      0W2      0B3      0W3
    1 | .        1F0      2F0      1F1      2F1      1F2      2BW0     -        2F2&1BW0 -        1F3&2BW1 -        2F3&1BW1 -        2BW2     -        1BW2     -        2B3      1B3      2W3      1W3

A pair hides what either of its passes exchanges (the all-to-alls of a mixture of
experts) behind what the other computes. In steady state a stage does nothing else: an F
of the way down with a backward of the way up, and the reverse. W's are split off only
to fill warm-up and cool-down.

Idle time of the slowest stage (p-1)(FB-2F) + (3F-FB)/2 when F = B = W and m >= 2p, if
the pairs of a stage's two chunks take FB, from 2F to 3F (checked on a grid). Layers
that communicate call ``zbpp.overlap_point``; of others FB is 3F.

The order is that of torch's ``ScheduleDualPipeV``, job for job, after
https://github.com/deepseek-ai/DualPipe (DeepSeek-V3, arXiv 2412.19437).
"""  # noqa: E501  (a picture is one line a stage)

from zbpp.core import PassKind, Placement, Schedule
from zbpp.schedules.patterns import Phases, in_phases

F, B, W, BW = PassKind


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
    # cool-down: pass the gradients on first, fill the end with W
    yield stage, [b, b_up]
    yield below, [b, w]
    yield stage, [w_up]
    yield stage, [w]


def plan_dual_pipe_v(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan DualPipeV; peak memory p + 1/2 M_B on every stage.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    least = 2 * n_stages

    def phases(stage: int) -> Phases:
        return _dual_phases(stage, n_stages, max(n_microbatches, least))

    placement = Placement.wave(n_stages)
    return in_phases("DualPipeV", placement, n_microbatches, phases, least=least)


def _dual_phases(stage: int, n_stages: int, n_microbatches: int) -> Phases:
    """The phases of a stage, for 2p micro-batches or more."""
    f, b, bw = [(kind, stage) for kind in (F, B, BW)]
    f_up, b_up, bw_up = [(kind, 2 * n_stages - 1 - stage) for kind in (F, B, BW)]
    w = (W, None)  # the W that waits longest
    below = n_stages - 1 - stage  # stages from the next one to the turn of the V
    # warm-up: fill the way down, then the way up, until the loss comes back
    yield 2 * below, [f]
    yield stage + 1, [f, f_up]
    yield below, [b_up, w, f_up]
    # steady: one micro-batch goes down while another comes back, and the reverse
    at_turn = int(below == 0)  # the other stages wait for this F
    yield at_turn, [f, bw_up, (f_up, bw)]
    n_steady = n_microbatches - 2 * n_stages + stage + 1
    yield n_steady - at_turn, [(f, bw_up), (f_up, bw)]
    yield below, [bw_up, (f_up, bw)]
    # cool-down: pass the gradients on first; W's of the second half fill the end
    half = (stage + 1) // 2
    yield half, [bw_up, bw]
    yield 1 - stage % 2, [bw_up, b]
    yield half, [b_up, b]
    yield below, [w, b]
    yield stage + 1, [w]
