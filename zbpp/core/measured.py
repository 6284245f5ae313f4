"""From what a run has measured to costs, so that the next plan is made for them.

A step is a sum of passes, so its expectation follows from the mean of each pass's
time. These times are skewed: most passes are about as fast as the machine can be, and
some wait for a core. A median leaves these out, and steps are then predicted short.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, quantiles

from zbpp.core.costs import Costs
from zbpp.core.errors import RequestError
from zbpp.core.jobs import KINDS, Pass, PassKind
from zbpp.core.timeline import Timeline

__all__ = ["measured_costs", "not_told_apart", "robust_mean"]

_MS = 1e3
_FAR = 5.0
"""Quartile ranges above the upper quartile; exponential times lose .2 % there."""


def robust_mean(values: Sequence[float]) -> float:
    """Mean of times, where those that are far out count as no more than far.

    Far is five quartile ranges above the upper quartile (Tukey's far out is three): a
    tail of slow passes counts, and a spell in which the machine was elsewhere hardly
    does. Nothing gives 0.

    >>> robust_mean([1.0, 2.0, 3.0, 4.0, 100.0])
    4.8
    """
    if len(values) < 2:
        return values[0] if values else 0.0
    low, _, high = quantiles(values, method="inclusive")
    far = high + _FAR * (high - low)
    return fmean(min(one, far) for one in values)


def measured_costs(
    timelines: Sequence[Timeline], *, splits: Sequence[bool] | None = None
) -> Costs:
    """Means of the passes of each chunk, in ms (`robust_mean`).

    Messages and optimizer steps are not in it: a stage's time in them is mostly that
    of waiting for another stage. The loss is a part of the last chunk's F.

    Args:
        timelines: of measured steps of one schedule, in seconds.
        splits: for each stage whether W has anything to do; None: all have.

    Raises:
        RequestError: the schedule has BW passes, which do not tell B from W.
    """
    seconds: dict[tuple[PassKind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for row in timeline.rows:
            for slot in row:
                if isinstance(slot.job, Pass):
                    seconds[slot.job.kind, slot.job.chunk].append(slot.duration)
    if any(len(KINDS[kind].work) > 1 for kind, _ in seconds):
        raise RequestError(not_told_apart(timelines[0].name))
    n_chunks = timelines[0].placement.n_chunks
    f, b, w = (
        tuple(round(_MS * robust_mean(seconds[kind, i]), 6) for i in range(n_chunks))
        for kind in (PassKind.F, PassKind.B, PassKind.W)
    )
    return Costs(
        f, b, w, splits=None if splits is None else tuple(splits), time_unit="ms"
    )


def not_told_apart(name: str) -> str:
    """Say why a schedule with BW passes cannot be measured, and what to do."""
    return (
        f"{name} runs B and W as one pass, so their times cannot be told apart; "
        "measure with a mode that splits them, such as ZBH1"
    )
