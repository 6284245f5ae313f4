"""Costs from the last steps of a training that goes on.

    passes       means of F, B, W, and of pairs in turns; with what the host needs
                 between two jobs
    O, V         means, the wait for the sum not in them; O with the norms
    messages     as they were waited for, where the stages share a clock; else delay
                 and bandwidth of the links, measured once between two steps
    reduction    the sum over the stages, likewise

The times of the passes are noted anyway, so that a window costs one gather. Means are
those of `zbpp.profiling.stopwatch.robust_mean`.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zbpp.core import Costs, PassKind, Placement, RequestError, Timeline
from zbpp.profiling.links import Link, measure_links
from zbpp.profiling.step_times import StepTimes, measure_step_times
from zbpp.profiling.steps import time_reduction
from zbpp.profiling.stopwatch import Spread, robust_mean
from zbpp.runtime.executor import Executor

__all__ = ["Wires", "measure_wires", "window_costs"]

_MS = 1e3
_REDUCTIONS = 10
_LOSSES = 64
"""Numbers of a step's sum beside the norms, more or less."""


@dataclass(frozen=True)
class Wires:
    """Links between the stages; times in ms, sizes in bytes.

    Args:
        links: by pair of stages.
        reduction: the sum over the stages.
        message: bytes that each chunk puts out.
        one_clock: all stages read the same clock.
    """

    links: Mapping[tuple[int, int], Link]
    reduction: Spread
    message: Mapping[int, int]
    one_clock: bool = False

    def hops(self, placement: Placement) -> tuple[float, ...]:
        """Time of a message on each edge between two chunks."""
        times = []
        for chunk, pair in enumerate(pairwise(placement.stage_of)):
            link = self.links.get((min(pair), max(pair)))
            size = self.message.get(chunk, 0)
            times.append(0.0 if link is None else link.time(size))
        return tuple(times)


def measure_wires(
    executors: Mapping[int, Executor],
    placement: Placement,
    message: Mapping[int, int] | None = None,
) -> Wires:
    """Measure links and the sum, between two steps (every rank must call).

    Args:
        executors: of this process.
        placement: of the chunks.
        message: bytes that its chunks put out; None: as they did in the last step.
    """
    transport = next(iter(executors.values())).transport
    sizes = transport.message_bytes() if message is None else message
    parts = transport.gather((platform.node(), dict(sizes)))
    every = {chunk: n_bytes for _, part in parts for chunk, n_bytes in part.items()}
    links = measure_links(executors, placement, max(every.values(), default=0))
    n_numbers = placement.n_chunks + _LOSSES
    reduction = time_reduction(executors, n_numbers, _REDUCTIONS)
    n_machines = len({machine for machine, _ in parts})
    return Wires(links, reduction, every, one_clock=n_machines == 1)


def window_costs(
    timelines: Sequence[Timeline],
    norms: Mapping[int, Sequence[float]],
    *,
    splits: Sequence[bool],
    wires: Wires | None,
    joint: bool = False,
) -> Costs:
    """Costs in ms, per chunk.

    Args:
        timelines: of the steps of a window, in seconds.
        norms: seconds that the norms of each stage's gradients took.
        splits: for each stage whether W has anything to do.
        wires: None: messages and sums take no time.
        joint: let B stand for BW where the schedule has such passes.

    Raises:
        RequestError: the schedule has passes that run B and W together.
    """
    placement = timelines[0].placement
    times = measure_step_times(
        timelines,
        {} if wires is None else wires.links,
        message_bytes=0 if wires is None else max(wires.message.values(), default=0),
        one_clock=wires is not None and wires.one_clock,
    )
    is_joint = any(kind is PassKind.BW for kind, _ in times.passes)
    if is_joint and not joint:
        raise RequestError(
            f"{timelines[0].name} runs B and W as one pass, so their times cannot be "
            "told apart; measure with a mode that splits them, such as ZBH1"
        )
    f, b, w, fb = [], [], [], []
    for chunk, stage in enumerate(placement.stage_of):
        gap = times.gaps[stage]
        of_kind = {kind: times.passes.get((kind, chunk), ()) for kind in PassKind}
        both = of_kind[PassKind.BW]
        f.append(robust_mean(of_kind[PassKind.F]) + gap)
        b.append(robust_mean([*of_kind[PassKind.B], *both]) + gap)
        late = robust_mean([*of_kind[PassKind.W], *(0.0 for _ in both)])
        w.append(late if is_joint else late + gap)
        pairs = times.pairs.get(chunk)
        fb.append(robust_mean(pairs) + gap if pairs else f[-1] + b[-1])
    optimizer = [
        (step + _MS * robust_mean(norms.get(stage, ())))
        / len(placement.chunks_of[stage])
        for stage, step in enumerate(times.optimizer)
    ]
    return Costs(
        f=tuple(f),
        b=tuple(b),
        w=tuple(w),
        fb=tuple(fb) if times.pairs else None,
        optimizer=tuple(optimizer[stage] for stage in placement.stage_of),
        validation=max(times.validation),
        comm=0.0 if wires is None else _hops(times, wires, placement) or 0.0,
        reduction=0.0 if wires is None else wires.reduction.mean,
        splits=None if all(splits) else tuple(splits),
    )


def _hops(times: StepTimes, wires: Wires, placement: Placement) -> tuple[float, ...]:
    """Time of a message on each edge, as it was waited for where that is known."""
    hops = zip(wires.hops(placement), pairwise(placement.stage_of), strict=True)
    return tuple(times.waits.get((min(pair), max(pair)), hop) for hop, pair in hops)
