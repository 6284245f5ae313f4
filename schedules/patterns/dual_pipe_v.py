"""DualPipeV: F of one micro-batch beside the backward of another, on a V.

Two stages (placement 0 1 1 0), four micro-batches; one cell is one unit of time, every
pass of a chunk takes 1, a pair 2 (``-`` is its second half), ``.`` is idle:

    0 | 0F0      0F1      0F2      3F0      3B0      3W0      3F1      0F3&3BW1 -        .        3F2&0BW0 -        3BW2     -        3F3&0BW1 -        3BW3     -        0B2      0W2      0B3      0W3
    1 | .        1F0      2F0      1F1      2F1      1F2      2BW0     -        2F2&1BW0 -        1F3&2BW1 -        2F3&1BW1 -        2BW2     -        1BW2     -        2B3      1B3      2W3      1W3

A pair hides what either of its passes exchanges (the all-to-alls of a mixture of
experts) behind what the other computes. In steady state a stage does nothing else: down
beside up, up beside down. W's are split off only to fill warm-up and cool-down.

Idle time of the slowest stage (p-1)(FB-2F) + (3F-FB)/2 when F = B = W and m >= 2p, if
the pairs of a stage's two chunks take FB, from 2F to 3F (checked on a grid). Layers
that communicate say so by ``zbpp.overlap_point``; of others FB is 3F.

The order is that of torch's ``ScheduleDualPipeV``, job for job, after
https://github.com/deepseek-ai/DualPipe (DeepSeek-V3, arXiv 2412.19437).
"""  # noqa: E501  (a picture is one line a stage)

from collections import Counter, deque
from collections.abc import Iterator

from zbpp.core import Job, Pair, Pass, PassKind, Placement, Schedule, Step, passes_in

__all__ = ["plan_dual_pipe_v"]

F, B, W, BW = PassKind


def plan_dual_pipe_v(*, n_stages: int, n_microbatches: int) -> Schedule:
    """Plan DualPipeV; peak memory p + 1/2 M_B on every stage.

    The pattern needs 2p micro-batches. If there are fewer, it is planned with some of
    negative number in front, which are then left out: what remains of a valid schedule
    is valid.

    Raises:
        RequestError: there is no stage or no micro-batch.
    """
    orders = tuple(
        (*_order(stage, n_stages, n_microbatches), Step(stage))
        for stage in range(n_stages)
    )
    return Schedule("DualPipeV", Placement.wave(n_stages), n_microbatches, orders)


def _order(stage: int, n_stages: int, n_microbatches: int) -> Iterator[Job]:
    first = min(0, n_microbatches - 2 * n_stages)
    for job in _jobs(stage, n_stages, n_microbatches - first, first):
        kept = [part for part in passes_in(job) if part.microbatch >= 0]
        yield from [job] if len(kept) == 2 else kept


def _jobs(
    stage: int, n_stages: int, n_microbatches: int, first: int
) -> Iterator[Pass | Pair]:
    """Yield the jobs of a stage, micro-batches counted from ``first``."""
    down, up = stage, 2 * n_stages - 1 - stage
    below = n_stages - 1 - stage  # stages from the next one to the turn of the V
    done: Counter[tuple[PassKind, int]] = Counter()
    put_off: deque[Pass] = deque()

    def run(kind: PassKind, chunk: int) -> Pass:
        """The next micro-batch of a chunk; the W of a B is put off."""
        key = (F if kind is F else B, chunk)
        job = Pass(kind, chunk, first + done[key])
        done[key] += 1
        if kind is B:
            put_off.append(Pass(W, chunk, job.microbatch))
        return job

    def pair(forward: int, backward: int) -> Pair:
        return Pair(run(F, forward), run(BW, backward))

    # warm-up: fill the way down, then the way up, until the loss comes back
    for _ in range(2 * below):
        yield run(F, down)
    for _ in range(stage + 1):
        yield run(F, down)
        yield run(F, up)
    for _ in range(below):
        yield run(B, up)
        yield put_off.popleft()
        yield run(F, up)

    # steady: one micro-batch goes down beside one that comes back, and the reverse
    for i in range(n_microbatches - 2 * n_stages + stage + 1):
        if i == 0 and below == 0:  # at the turn the other stages wait for this F
            yield run(F, down)
            yield run(BW, up)
        else:
            yield pair(down, up)
        yield pair(up, down)
    for _ in range(below):
        yield run(BW, up)
        yield pair(up, down)

    # cool-down: hand the gradients on first; W's of the second half fill the end
    half = (stage + 1) // 2
    for i in range(stage + 1):
        yield run(B if i > half or (i == half and stage % 2 == 1) else BW, up)
        yield run(B if i >= half else BW, down)
    for _ in range(below):
        yield put_off.popleft()
        yield run(B, down)
    yield from put_off
