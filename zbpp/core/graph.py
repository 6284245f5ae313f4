"""The graph of the jobs of a step: the waits of each, and its earliest start.

A node is a job in the row of its stage, an edge a wait (two stages, one micro-batch):

    0F0 --value--> 1F0     1F0 reads what 0F0 writes, after its message
    1F0 --lane---> 1B0     both occupy the compute lane of stage 1
    0W0 --state--> O       the optimizer step awaits the gradients of all stages

A job starts when all its waits have ended: at the end of the longest path to it. The
wait that ends last decides, so the critical path goes back from decision to decision.
Jobs that wait for one another in a circle never start.

Jobs begin in the order of their row. They occupy their lanes until they end, so what
occupies the network alone overlaps with the next jobs. Of a pass in parts, the first
part waits for all that the pass reads, and begins no earlier than the first one of the
pass before it; the others wait for the part before them. What the pass writes is there
when the last has ended. But where W has a part for each part of B that computes, it
waits only for that part of B (`ChunkCosts.source_of`).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from math import inf
from typing import Literal, NamedTuple

from zbpp.core.costs import ChunkCosts, Costs
from zbpp.core.jobs import (
    Check,
    Job,
    Lane,
    Pair,
    Part,
    Pass,
    PassKind,
    State,
    Step,
    What,
    bulk_construct,
    gc_paused,
    input_of,
    kind_of,
    lanes_of,
    members_of,
    output_of,
    passes_in,
    place_of,
    reads,
    writes,
)
from zbpp.core.parts import Parts, PartTimes
from zbpp.core.placement import Placement
from zbpp.core.text import mistake
from zbpp.core.timeline import Slot

LanesOfParts = dict[tuple[PassKind, int], dict[int, Lane]]


class Wait(NamedTuple):
    """A reason for which a job starts no earlier than it does."""

    source: int
    """Node of another job, or one of the nodes without a job (`JobGraph`)."""
    reason: Literal["lane", "part", "state", "value"]
    """The need of the job for it."""
    delay: float = 0.0
    """Time from the end of the source on."""
    from_start: bool = False
    """The wait is for the start of the source."""


class _Shape(NamedTuple):
    """The properties that the passes of one kind and chunk share."""

    times: tuple[float, float]
    """Its time, and that of the message that it waits for."""
    message: dict[int, int] | None
    """By micro-batch the nodes that write its inputs from another chunk."""
    output: dict[int, int] | None
    """By micro-batch the nodes that write its outputs for another chunk."""


_NOTHING, _SEVERAL = -1, -2  # no source of a node, and its waits are listed


class JobGraph:
    """The jobs of all stages, and their waits.

    Nodes are numbered row after row. Three more have no job: ``all_gradients`` ends
    when these are there, ``verdict`` when the validity of the step before is known, and
    ``missing`` never.

    Args:
        rows: jobs of each stage. A pass comes after the passes of its chunk that it
            reads from, and each kind of pass has the same parts everywhere.
        times: of the jobs and messages.
        barrier: optimizer steps wait for the gradients of all stages.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Job]],
        times: ChunkCosts,
        *,
        barrier: bool = True,
    ) -> None:
        self.rows, self.times = rows, times
        self.first = [0, *accumulate(map(len, rows))]
        """Node of the first job of each row; the last entry is the number of jobs."""
        n_jobs = self.first[-1]
        self.all_gradients, self.verdict, self.missing = range(n_jobs, n_jobs + 3)
        self.gradients: list[int] = []
        """Nodes that end the last gradients of the stages."""
        self._has_barrier = barrier
        self._waits: dict[int, list[Wait]] = {}
        """By node; for rows of whole passes they are computed on demand."""
        self._sources: list[int] = []
        """For rows of whole passes, the node that each job waits for besides its
        predecessor."""
        self._times: list[tuple[float, float]] = []
        """Of each job, and of the message of its source."""
        self._writers: dict[tuple[What, int], dict[int, int]] = defaultdict(dict)
        """By value and chunk, then by micro-batch: the nodes that write values."""
        chunks = range(times.placement.n_chunks)
        shapes = {x: [self._shape(x, c) for c in chunks] for x in PassKind}
        is_plain = [set(map(type, row)) <= {Pass, Step, Check} for row in rows]
        for stage, plain in enumerate(is_plain):
            if plain:
                self._note_outputs(stage, shapes)
            else:
                self.gradients += self._list_waits(stage)
        for stage, plain in enumerate(is_plain):
            if plain:
                self._add_sources(stage, shapes)
            else:
                self._list_values(stage)
                self._sources.extend([_SEVERAL] * len(rows[stage]))
                self._times += [(times.of(job), 0.0) for job in rows[stage]]

    def _shape(self, kind: PassKind, chunk: int) -> _Shape:
        job, times = Pass(kind, chunk, 0), self.times
        n_chunks, writers = times.placement.n_chunks, self._writers
        read, written = input_of(job, n_chunks), output_of(job, n_chunks)
        delay = 0.0 if read is None else times.delay(read.chunk, chunk)
        return _Shape(
            (times.of_kind(kind, chunk), delay),
            None if read is None else writers[read.what, read.chunk],
            None if written is None else writers[written.what, written.chunk],
        )

    def _note_outputs(self, stage: int, shapes: dict[PassKind, list[_Shape]]) -> None:
        """Record the writers of values in a row of whole passes."""
        for node, job in enumerate(self.rows[stage], self.first[stage]):
            if job.__class__ is Pass:
                output = shapes[job.kind][job.chunk].output
                if output is not None:
                    output[job.microbatch] = node
        for node in range(self.first[stage + 1] - 1, self.first[stage] - 1, -1):
            if kind_of(self.job(node)).ends_gradients:
                self.gradients.append(node)
                break

    def _add_sources(self, stage: int, shapes: dict[PassKind, list[_Shape]]) -> None:
        """Add the messages that passes wait for, and the states of other jobs."""
        sources, times, missing = self._sources, self._times, self.missing
        step_source = self.all_gradients if self._has_barrier else _NOTHING
        for job in self.rows[stage]:
            if job.__class__ is Pass:
                shape = shapes[job.kind][job.chunk]
                times.append(shape.times)
                if shape.message is None:
                    sources.append(_NOTHING)
                else:
                    sources.append(shape.message.get(job.microbatch, missing))
            else:
                times.append((self.times.of(job), 0.0))
                sources.append(self.verdict if isinstance(job, Check) else step_source)

    def _list_waits(self, stage: int) -> Iterator[int]:
        """List the waits of jobs for others of their stage, and note who writes what.

        Yields the nodes that end the last gradients, one a lane.
        """
        n_chunks = self.times.placement.n_chunks
        last: dict[Hashable, int] = {(State.VERDICT, stage): self.verdict}
        """By lane, by state and place, by pass, and by part of a pass."""
        if self._has_barrier:
            last[State.ALL_GRADIENTS, stage] = self.all_gradients
        gradients: dict[Lane, int] = {}
        for node, job in enumerate(self.rows[stage], self.first[stage]):
            begins_in_turn = () if isinstance(job, Part) else (Lane.COMPUTE,)
            lanes = dict.fromkeys((*begins_in_turn, *lanes_of(job)))
            waits = [Wait(last[lane], "lane") for lane in lanes if lane in last]
            for member in members_of(job):
                states = ((x, place_of(member)) for x in kind_of(member).awaits)
                waits += [Wait(last[x], "state") for x in states if x in last]
            if isinstance(job, Part):
                waits += self._waits_of_part(job, last)
                last[job.of] = last[job.of, job.index] = node
                if job.index == 0:
                    last["begun"] = node
            self._waits[node] = waits
            last |= dict.fromkeys(lanes_of(job), node)
            for done in self._done_with(job):
                kind = kind_of(done)
                if kind.sets is not None:
                    last[kind.sets, place_of(done)] = node
                if kind.ends_gradients:
                    gradients |= dict.fromkeys(lanes_of(job), node)
                for value in writes(done, n_chunks) if isinstance(done, Pass) else ():
                    self._writers[value.what, value.chunk][value.microbatch] = node
        yield from gradients.values()

    def _waits_of_part(self, job: Part, last: dict[Hashable, int]) -> Iterator[Wait]:
        if job.index:
            yield Wait(last.get(job.of, self.missing), "part")
        elif "begun" in last:  # passes begin in order
            yield Wait(last["begun"], "part", from_start=True)
        if job.kind is PassKind.W:
            b = Pass(PassKind.B, job.chunk, job.of.microbatch)
            source = last.get((b, self.times.source_of(job)), self.missing)
            yield Wait(source, "part")

    def _done_with(self, job: Job) -> tuple[Job, ...]:
        """The jobs that end with a job: with a B that cannot be split, its W too."""
        if not isinstance(job, Part):
            return members_of(job)
        if job.index + 1 < len(self.times.parts_of(job.of)):
            return ()
        w = Pass(PassKind.W, job.chunk, job.of.microbatch)
        has_w = job.kind is not PassKind.B or bool(self.times.parts_of(w))
        return (job.of,) if has_w else (job.of, w)

    def _list_values(self, stage: int) -> None:
        """Add the values that jobs read to their waits."""
        for node, job in enumerate(self.rows[stage], self.first[stage]):
            if isinstance(job, Part) and (job.index or job.kind is PassKind.W):
                continue
            for part in passes_in(job):
                for value in reads(part, self.times.placement.n_chunks):
                    writers = self._writers[value.what, value.chunk]
                    source = writers.get(value.microbatch, self.missing)
                    delay = self.times.delay(value.chunk, part.chunk)
                    self._waits[node].append(Wait(source, "value", delay))

    def place(self, node: int) -> tuple[int, int]:
        """The row and the column of a job."""
        row = bisect_right(self.first, node) - 1
        return row, node - self.first[row]

    def job(self, node: int) -> Job:
        """The job of a node."""
        row, column = self.place(node)
        return self.rows[row][column]

    def waits(self, node: int) -> list[Wait]:
        """List the waits of a node, that for the job before it on its lane first."""
        if node >= self.first[-1]:
            is_sum = node == self.all_gradients
            return [Wait(x, "state") for x in (self.gradients if is_sum else ())]
        if node not in self._waits:
            stage, _ = self.place(node)
            list(self._list_waits(stage))
            self._list_values(stage)
        return self._waits[node]

    def run(
        self,
        *,
        free: Sequence[float] | None = None,
        verdict: float = 0.0,
        reduction: float = 0.0,
    ) -> "JobTimes":
        """Start every job as early as can be.

        Args:
            free: from when on each stage may work; None: from 0.
            verdict: when it is known.
            reduction: time from the last gradient to ``all_gradients``.

        Raises:
            ScheduleError: jobs wait for one another; the message names them.
        """
        first, sources, times = self.first, self._sources, self._times
        starts = [inf] * first[-1]
        ends = [*starts, inf, verdict, inf]
        least = [0.0] * len(self.rows) if free is None else free
        at, stops = first[:-1], first[1:]
        awaited = [_NOTHING] * len(at)
        """The node without an end that each row waits for."""
        to_try = list(range(len(at)))[::-1]
        while to_try:
            row = to_try.pop()
            begin = node = at[row]
            now = ends[begin - 1] if begin > first[row] else least[row]
            # one loop of local names, as a plan has millions of jobs
            for node in range(begin, stops[row]):
                time, delay = times[node]
                source = sources[node]
                if source >= 0:
                    arrival = ends[source] + delay
                    if arrival > now:
                        if arrival == inf:
                            break
                        now = arrival
                elif source == _SEVERAL:
                    now = least[row]
                    for before, _, delay, from_start in self._waits[node]:
                        arrival = (starts if from_start else ends)[before] + delay
                        if arrival > now:
                            now, source = arrival, before
                    if now == inf:
                        break
                starts[node] = now
                now += time
                ends[node] = now
            else:
                node, source = stops[row], _NOTHING
            awaited[row] = source
            if node > begin:
                at[row] = node
                readers = self.times.placement.neighbours_of[row]
                to_try += [x for x in readers if begin <= awaited[x] < node]
            if not to_try and ends[self.all_gradients] == inf:
                last = max((ends[node] for node in self.gradients), default=0.0)
                if last < inf:
                    ends[self.all_gradients] = last + reduction
                    to_try = [x for x, node in enumerate(at) if node < stops[x]]
        if at != stops:
            stuck = [node for node, stop in zip(at, stops, strict=True) if node < stop]
            self._fail(stuck, ends)
        return JobTimes(self, starts, ends)

    def _fail(self, stuck: Sequence[int], ends: Sequence[float]) -> None:
        """Name jobs that wait for one another, among the next jobs of all stages."""
        import networkx as nx  # takes long to load

        next_of = {self.place(node)[0]: node for node in stuck}
        awaited: dict[int, int] = {}
        for node in stuck:
            for wait in self.waits(node):
                source = wait.source
                if source == self.all_gradients:
                    source = next(x for x in self.gradients if ends[x] == inf)
                if source == self.missing:
                    raise mistake(
                        self.rows,
                        *self.place(node),
                        f"{self.job(node)} never starts: its predecessor is in no row",
                    )
                if source < self.verdict and ends[source] == inf:
                    awaited[node] = source
        graph = nx.DiGraph((x, next_of[self.place(y)[0]]) for x, y in awaited.items())
        circle = sorted(node for node, _ in nx.find_cycle(graph))
        waits = ", ".join(
            f"stage {self.place(node)[0]} waits at {self.job(node)} for "
            f"{self.job(awaited[node])}"
            for node in circle
        )
        raise mistake(
            self.rows,
            *self.place(circle[0]),
            f"deadlock: {waits}; no stage can go on. Is an F after its B, or do two "
            "stages exchange micro-batches in opposite orders?",
        )


class JobTimes:
    """Starts of the jobs of a graph, and ends of all its nodes."""

    def __init__(
        self, graph: JobGraph, starts: Sequence[float], ends: Sequence[float]
    ) -> None:
        self.graph, self.starts, self.ends = graph, starts, ends

    @property
    def all_gradients(self) -> float:
        """When the gradients of all stages are there."""
        return self.ends[self.graph.all_gradients]

    @property
    def row_ends(self) -> list[float]:
        """End of the last job of each row."""
        return [self.ends[stop - 1] for stop in self.graph.first[1:]]

    @property
    def spans(self) -> list[float]:
        """Time of each stage from the first start to the last end of a pass."""
        spans, passes = [], {Pass, Part, Pair}
        for begin, row in zip(self.graph.first, self.graph.rows, strict=False):
            nodes = [x for x, job in enumerate(row, begin) if job.__class__ in passes]
            ends = map(self.ends.__getitem__, nodes)
            spans.append(max(ends) - min(map(self.starts.__getitem__, nodes)))
        return spans

    @property
    def span(self) -> float:
        """Span of the slowest stage."""
        return max(self.spans)

    def path(self, node: int) -> list[int]:
        """The chain of jobs that fixed the start of a job, and the job itself."""
        path: list[int] = []
        decision: int | None = node
        while decision is not None:
            path += [decision] if decision < len(self.starts) else []
            decision = self.decided_by(decision)
        return path[::-1]

    def decided_by(self, node: int) -> int | None:
        """The node that a job waited for longest; None: for none but its stage."""
        latest, last = None, -inf
        for wait in self.graph.waits(node):
            end = (self.starts if wait.from_start else self.ends)[wait.source]
            if end + wait.delay > last:
                latest, last = wait, end + wait.delay
        if latest is None:
            return None
        # what begins with another job waited for the same as that one
        return self.decided_by(latest.source) if latest.from_start else latest.source

    def by_row(self, values: Sequence[float]) -> list[list[float]]:
        """Starts or ends of each row."""
        return [list(values[a:b]) for a, b in pairwise(self.graph.first)]

    def slots(self) -> list[list[Slot]]:
        """The jobs of each row in time."""
        rows = zip(
            self.graph.rows, *map(self.by_row, (self.starts, self.ends)), strict=True
        )
        with gc_paused():
            return [
                bulk_construct(Slot, len(row), job=row, start=starts, end=ends)
                for row, starts, ends in rows
            ]


def lanes_of_parts(rows: Sequence[Sequence[Job]]) -> LanesOfParts:
    """The lane of each part of the passes of each kind and chunk, as it comes first."""
    lanes: LanesOfParts = {}
    for job in chain.from_iterable(rows):
        if isinstance(job, Part):
            lanes.setdefault((job.kind, job.chunk), {}).setdefault(job.index, job.lane)
    return lanes


def unit_times(placement: Placement, rows: Sequence[Sequence[Job]]) -> ChunkCosts:
    """Times by which every part takes a unit, on the lanes that rows tell."""
    lanes = lanes_of_parts(rows)

    def parts(kind: PassKind, chunk: int) -> PartTimes:
        part_lanes = sorted(lanes.get((kind, chunk), {}).items())
        return tuple((lane, 1.0) for _, lane in part_lanes)

    whole = ((Lane.COMPUTE, 1.0),)  # of chunks that are in no row
    f, b, w = PassKind.F, PassKind.B, PassKind.W
    of_chunks = tuple(
        Parts(parts(f, chunk) or whole, parts(b, chunk) or whole, parts(w, chunk))
        for chunk in range(placement.n_chunks)
    )
    return Costs(parts=of_chunks).on(placement)
