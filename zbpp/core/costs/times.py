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

from dataclasses import dataclass, replace
from operator import add, sub

from zbpp.core.costs.columns import (
    Per,
    PerChunk,
    check_columns,
    column,
    columns_of,
    edge_delays,
    per_chunk,
    reduction_delay,
)
from zbpp.core.errors import RequestError
from zbpp.core.jobs import KINDS, Job, JobKind, Pair, Pass, PassKind, kind_of, place_of
from zbpp.core.placement import Placement
from zbpp.core.timeline import sending_time

__all__ = ["PassTimes", "Times"]


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

    def times_on(self, placement: Placement) -> "PassTimes":
        """Give every chunk its share.

        Raises:
            RequestError: a list has another length than `zbpp.core.costs.columns` says.
        """
        columns = {
            name: per_chunk(name, getattr(self, name), placement)
            for name, about in columns_of(Times).items()
            if about.per is Per.CHUNK and getattr(self, name) is not None
        }
        f, b, w, all_gather = (columns[x] for x in ("f", "b", "w", "all_gather"))
        if self.gathers:
            f, b = (tuple(map(add, times, all_gather)) for times in (f, b))
        splits = (True,) * placement.n_stages if self.splits is None else self.splits
        if len(splits) != placement.n_stages:
            raise RequestError(
                f"splits has {len(splits)} entries for {placement.n_stages} stages"
            )
        can = [splits[stage] for stage in placement.stage_of]
        parts = list(zip(b, w, can, strict=True))
        hops = edge_delays(self.comm, placement)
        sending = edge_delays(self.send_occupies, placement, name="send_occupies")
        hops = tuple(map(max, hops, sending))
        reduction = self.reduction
        if reduction is None:
            reduction = reduction_delay(hops, placement.n_stages)
        f = (*f[:-1], f[-1] + self.loss)
        b = tuple(one if split else one + two for one, two, split in parts)
        if any(sending):
            f = tuple(map(add, f, (*sending, 0.0)))
            b = tuple(map(add, b, (0.0, *sending)))
            hops = tuple(map(sub, hops, sending))
        return PassTimes(
            placement=placement,
            f=f,
            b=b,
            w=tuple(two if split else 0.0 for _, two, split in parts),
            hops=hops,
            optimizer=tuple(
                sum(columns["optimizer"][chunk] for chunk in chunks)
                for chunks in placement.chunks_of
            ),
            splits=splits,
            reduction=reduction,
            validation=(self.validation,) * placement.n_stages,
            all_gather=all_gather,
            reduce_scatter=columns["reduce_scatter"],
            sending=sending if any(sending) else (),
            fb=columns.get("fb", ()),
        )


@dataclass(frozen=True)
class PassTimes:
    """`Times` on a placement: one entry per chunk.

    ``hops`` has one entry per edge, from chunk c to c+1; ``optimizer``, ``validation``
    and ``splits`` have one per stage. The last F includes the loss. ``f`` and ``b`` end
    with the time for which a message occupies its sender, per edge in ``sending``
    (empty: none does); ``hops`` is what is left of its time (see the module's text). On
    a stage that cannot split its backward, ``b`` is the time of both parts and ``w`` is
    0: its gradient cannot leave earlier. Without ``fb`` (empty) the passes of a pair
    run one after the other.
    """

    placement: Placement
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hops: tuple[float, ...]
    optimizer: tuple[float, ...]
    splits: tuple[bool, ...]
    reduction: float
    validation: tuple[float, ...]
    all_gather: tuple[float, ...]
    reduce_scatter: tuple[float, ...]
    sending: tuple[float, ...]
    fb: tuple[float, ...]

    def of(self, job: Job) -> float:
        """Time of one job."""
        if isinstance(job, Pair):
            if not self.fb:
                return self.of(job.forward) + self.of(job.backward)
            return self.fb[job.forward.chunk] + sending_time(job, self.sending)
        return self._sum(kind_of(job), place_of(job))

    def of_pass(self, kind: PassKind, chunk: int) -> float:
        """Time of one pass of a chunk."""
        return self._sum(KINDS[kind], chunk)

    def _sum(self, kind: JobKind, place: int) -> float:
        columns: list[tuple[float, ...]] = [getattr(self, name) for name in kind.times]
        return sum(column[place] for column in columns)

    def without_pairs(self) -> "PassTimes":
        """Times for lower bounds: no pair is shorter than its passes in turn.

        On each stage all passes are shortened by as much as the pair that saves most.
        Any schedule's starts are then possible with its passes one after the other.
        """
        if not self.fb:
            return self
        f, b, w = list(self.f), list(self.b), list(self.w)
        for chunks in self.placement.chunks_of:
            pairs = [
                Pair(Pass(PassKind.F, c, 0), Pass(PassKind.BW, d, 1))
                for c in chunks
                for d in chunks
            ]
            in_turn = [self.of(x.forward) + self.of(x.backward) for x in pairs]
            shares = [self.of(x) / t for x, t in zip(pairs, in_turn, strict=True) if t]
            share = min([1.0, *shares])
            for times in (f, b, w):
                for c in chunks:
                    times[c] *= share
        return replace(self, f=tuple(f), b=tuple(b), w=tuple(w), fb=())

    def delay(self, source: int, target: int) -> float:
        """Time of a message from its job's end to its reader: none on one stage.

        A pure delay: it occupies neither stage (arXiv 2401.10241, appendix).
        """
        if source == target:
            return 0.0
        return self.hops[source if source < target else target]
