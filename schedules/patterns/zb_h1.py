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

from zbpp.core import Order, Pass, PassKind, Placement, Schedule, Step

__all__ = ["plan_zb_h1", "put_off_order"]

F, B, W = PassKind.F, PassKind.B, PassKind.W


def plan_zb_h1(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-H1; peak memory min(p, m) M_B, for any M_W <= M_B.

    When a stage starts an F it has p-s micro-batches before B and s before W.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    orders = tuple(
        put_off_order(stage, n_microbatches, n_ahead=n_stages - stage, n_put_off=stage)
        for stage in range(n_stages)
    )
    return Schedule("ZBH1", Placement.single(n_stages), n_microbatches, orders)


def put_off_order(
    stage: int, n_microbatches: int, *, n_ahead: int, n_put_off: int
) -> Order:
    """Order of a stage whose F runs ahead of B and whose W follows a later B.

    Args:
        stage: the stage, and its only chunk.
        n_microbatches: micro-batches in a step.
        n_ahead: forwards before the first B.
        n_put_off: W_i follows B_(i + n_put_off).
    """
    n_warm_up = min(n_ahead, n_microbatches)
    order = [Pass(F, stage, i) for i in range(n_warm_up)]  # fill the stages below
    for i in range(n_microbatches):  # steady, later without F: drain
        order.append(Pass(B, stage, i))
        if i >= n_put_off:
            order.append(Pass(W, stage, i - n_put_off))
        if n_warm_up + i < n_microbatches:
            order.append(Pass(F, stage, n_warm_up + i))
    n_done = max(0, n_microbatches - n_put_off)
    order += [Pass(W, stage, i) for i in range(n_done, n_microbatches)]  # fill the end
    return (*order, Step(stage))
