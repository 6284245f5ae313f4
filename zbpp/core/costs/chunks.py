"""Costs of the chunks of a placement: all that graph, bounds and pictures look at."""

from dataclasses import dataclass, replace

from zbpp.core.costs.parts import Parts, PartTimes
from zbpp.core.jobs import (
    KINDS,
    Job,
    Kind,
    Lane,
    Pair,
    Part,
    Pass,
    PassKind,
    kind_of,
    members_of,
    place_of,
)
from zbpp.core.placement import Placement

_ROUNDING = 1e-14  # relative, of one sum


@dataclass(frozen=True, kw_only=True)
class ChunkCosts:
    """`Costs` on a placement: one entry per chunk, or as said here.

    ``hops`` has one entry per edge, from chunk c to c+1; ``optimizer``, ``validation``,
    ``splits``, ``limit``, ``fixed`` and ``peak_o`` have one per stage. The last F
    includes the loss. On a stage that cannot split its backward, ``b`` is the time of
    both parts and ``w`` is 0: its gradient cannot leave earlier. Planners and bounds
    write its BW as B, so ``peak_b`` is that of BW, and ``m_w`` 0. Without ``fb``
    (empty) the passes of a pair run one after the other. Without ``parts`` (empty)
    every pass is in one piece.
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
    fb: tuple[float, ...]
    parts: tuple[Parts, ...]
    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    limit: tuple[float, ...]
    fixed: tuple[float, ...]
    peak_f: tuple[float, ...]
    peak_b: tuple[float, ...]
    peak_w: tuple[float, ...]
    peak_bw: tuple[float, ...]
    peak_o: tuple[float, ...]

    def of(self, job: Job) -> float:
        """Time of one job."""
        if isinstance(job, Pair):
            if not self.fb:
                return self.of(job.forward) + self.of(job.backward)
            return self.fb[job.forward.chunk]
        if isinstance(job, Part):
            return self.parts_of(job.of)[job.index][1]
        return self.of_kind(job.kind, place_of(job))

    def of_kind(self, kind: Kind, place: int) -> float:
        """Time of a job of a kind on a chunk, or of a stage."""
        return float(sum(getattr(self, name)[place] for name in KINDS[kind].times))

    def parts_of(self, job: Pass) -> PartTimes:
        """The lane and the time of each part of an F, B or W; there must be parts."""
        return self.parts[job.chunk].of(job.kind)

    def source_of(self, part: Part) -> int:
        """The part of B that a part of its W needs.

        Where W has as many parts as B has that compute, the one at its place among
        those; else the last one.
        """
        parts = self.parts[part.chunk]
        b, w = parts.of(PassKind.B), parts.of(PassKind.W)
        computing = [i for i, (lane, _) in enumerate(b) if lane is Lane.COMPUTE]
        return computing[part.index] if len(computing) == len(w) else len(b) - 1

    def delay(self, source: int, target: int) -> float:
        """Time of a message from its job's end to its reader: none on one stage.

        A pure delay: it occupies neither stage (arXiv 2401.10241, appendix).
        """
        if source == target:
            return 0.0
        return self.hops[source if source < target else target]

    def change(self, job: Job) -> float:
        """Memory that a job leaves behind it: more than before, or less (< 0)."""
        jobs = [(kind_of(part).keeps, place_of(part)) for part in members_of(job)]
        return float(
            sum(
                sign * getattr(self, name)[x]
                for keeps, x in jobs
                for name, sign in keeps
            )
        )

    def peak(self, job: Job) -> float:
        """Most that a job holds above what its stage holds before it; 0 or more.

        The parts of a pair may hold their most at the same time.
        """
        jobs = [(kind_of(part).peak, place_of(part)) for part in members_of(job)]
        return float(sum(getattr(self, name)[x] for name, x in jobs if name))

    def above_fixed(self) -> "ChunkCosts":
        """Return these costs with what is always there taken off the limits.

        The limit grows by what rounding may take from the difference.
        """
        if not any(self.fixed):
            return self
        limit = tuple(
            max(0.0, limit - fixed) + _ROUNDING * fixed
            for limit, fixed in zip(self.limit, self.fixed, strict=True)
        )
        return replace(self, limit=limit, fixed=(0.0,) * len(limit))

    def without_pairs(self) -> "ChunkCosts":
        """Return costs for lower bounds: no pair is shorter than its passes in turn.

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
