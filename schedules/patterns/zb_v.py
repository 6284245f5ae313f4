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

from collections.abc import Iterator

from zbpp.core import Order, Pass, PassKind, Placement, Schedule, Step

__all__ = ["plan_zb_v", "zb_v_cells"]

F, B, W = PassKind.F, PassKind.B, PassKind.W


def plan_zb_v(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan ZB-V; peak memory min(p, m) M_B on every stage, for any M_W <= M_B.

    The pattern needs 2p-1 micro-batches. If there are fewer, it is planned with some
    of negative number in front, which are then left out: what remains of a valid
    schedule is valid.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    orders = tuple(_order(stage, n_stages, n_microbatches) for stage in range(n_stages))
    return Schedule("ZBV", Placement.wave(n_stages), n_microbatches, orders)


def _order(stage: int, n_stages: int, n_microbatches: int) -> Order:
    cells = zb_v_cells(stage, n_stages, n_microbatches)
    return (*(Pass(kind, chunk, i) for kind, chunk, i in cells), Step(stage))


def zb_v_cells(
    stage: int, n_stages: int, n_microbatches: int
) -> Iterator[tuple[PassKind, int, int]]:
    """Yield the kind, the chunk and the micro-batch of every pass of a stage."""
    first = min(0, n_microbatches - (2 * n_stages - 1))
    down, up = stage, 2 * n_stages - 1 - stage
    below = n_stages - stage  # stages from here to the turn of the V
    phases = (
        # warm-up: fill the way down, then the way up, until the loss comes back
        (2 * below - 1, [(F, down)]),
        (stage, [(F, up), (F, down)]),
        (below, [(F, up), (B, up), (W, up)]),
        # steady: one micro-batch through both chunks; later no F is left to begin
        (
            n_microbatches - first - 2 * n_stages + 1 + stage,
            [(F, down), (B, down), (W, down), (F, up), (B, up), (W, up)],
        ),
        (below - 1, [(B, down), (W, down), (F, up), (B, up), (W, up)]),
        # cool-down: hand the gradients on first, fill the end with W
        (stage, [(B, down), (B, up)]),
        (below, [(B, down), (W, down)]),
        (stage, [(W, up)]),
        (stage, [(W, down)]),
    )
    done = {(kind, chunk): first for kind in (F, B, W) for chunk in (down, up)}
    for times, cells in phases:
        for _ in range(times):
            for cell in cells:
                microbatch = done[cell]
                done[cell] = microbatch + 1
                if microbatch >= 0:
                    yield *cell, microbatch
