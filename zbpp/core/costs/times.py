"""Times of the passes, of messages and of optimizer steps.

A message takes ``comm`` from the end of a pass until it can be read. For the first
``send_occupies`` of that its sender computes nothing: it packs, blocks, or lends its
cores to the transfer. Where that is longer than ``comm``, the message is there when the
sender is free.

    stage 0 | F0 s  F1 s            s: send_occupies
    stage 1 | .  .  F0 .  F1        F0 to F0: comm

A pass and what follows it on its stage without a gap are one job to every plan, bound
and replay: F and B of a chunk whose message leaves the stage last send_occupies longer,
and the rest of comm is a pure delay. All starts are the same as if the two were apart.
"""

from dataclasses import dataclass

from zbpp.core.costs.columns import Per, PerChunk, check_columns, column
from zbpp.core.errors import RequestError

__all__ = ["Times"]


@dataclass(frozen=True)
class Times:
    """Times of the passes, of a message between two stages, and of the optimizer.

    ``send_occupies`` is the part of ``comm`` for which the sender computes nothing; a
    list of either is per link (`zbpp.core.costs.columns`).
    ``loss`` is the time of the loss, a part of the last chunk's F. ``splits`` says of
    each stage whether its backward can be split into B and W; default: all can.
    ``reduction`` is the time of the sum of all stages' gradient norms, from the last
    stage's start of it; None: as many messages as `reduction_delay` says.
    ``validation`` is the time that a V takes when the sum is there. ``all_gather`` is
    the time of an UNSHARD, ``reduce_scatter`` that of a REDUCE_GRAD (an all-reduce,
    where every process has all parameters). ``gathers``: F and B gather the parameters
    themselves and take ``all_gather`` longer, instead of an UNSHARD; nothing runs
    beside that. ``fb`` is the time of an F beside the backward of another micro-batch,
    without their messages; a list is by the chunk of the F; None: as long as one after
    the other. ``time_unit`` names the unit of all, such as "ms"; None: any one.

    Raises:
        RequestError: a time is negative, not finite or above 1e100, or splits
            holds no booleans.
    """

    f: PerChunk = column(1.0, Per.CHUNK)
    b: PerChunk = column(1.0, Per.CHUNK)
    w: PerChunk = column(1.0, Per.CHUNK)
    comm: PerChunk = column(0.0, Per.EDGE)
    optimizer: PerChunk = column(0.0, Per.CHUNK)
    loss: float = column(0.0, Per.ALL)
    reduction: float | None = column(None, Per.ALL)
    validation: float = column(0.0, Per.ALL)
    splits: tuple[bool, ...] | None = None
    all_gather: PerChunk = column(0.0, Per.CHUNK)
    reduce_scatter: PerChunk = column(0.0, Per.CHUNK)
    send_occupies: PerChunk = column(0.0, Per.EDGE)
    fb: PerChunk | None = column(None, Per.CHUNK)
    gathers: bool = False
    time_unit: str | None = None

    def __post_init__(self) -> None:
        check_columns(self)
        for stage, split in enumerate(self.splits or ()):
            if not isinstance(split, bool):
                raise RequestError(
                    f"splits[{stage}] is {split!r}; write true or false for each stage"
                )
