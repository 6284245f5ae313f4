"""From what a run has measured to costs, so that the next plan is made for them."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from zbpp.core.costs import Costs
from zbpp.core.errors import RequestError
from zbpp.core.jobs import Pass, PassKind
from zbpp.core.timeline import Timeline

__all__ = ["measured_costs", "not_told_apart"]

_MS = 1e3


def measured_costs(
    timelines: Sequence[Timeline], *, splits: Sequence[bool] | None = None
) -> Costs:
    """Medians of the passes of each chunk, in ms.

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
    if any(kind is PassKind.BW for kind, _ in seconds):
        raise RequestError(not_told_apart(timelines[0].name))
    n_chunks = timelines[0].placement.n_chunks
    f, b, w = (
        tuple(round(_MS * median(seconds[kind, i]), 6) for i in range(n_chunks))
        for kind in (PassKind.F, PassKind.B, PassKind.W)
    )
    return Costs(f, b, w, splits=None if splits is None else tuple(splits))


def not_told_apart(name: str) -> str:
    """Why a schedule with BW passes cannot be measured, and what to do."""
    return (
        f"{name} runs B and W as one pass, so their times cannot be told apart; "
        "measure with a mode that splits them, such as ZBH1"
    )
