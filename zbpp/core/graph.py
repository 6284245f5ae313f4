"""The graph of the jobs of a step: what each waits for, and when it can start.

A node is a job in the row of its stage, an edge a wait (two stages, one micro-batch):

    0F0 --value--> 1F0     1F0 reads what 0F0 writes, after its message
    1F0 --lane---> 1B0     both occupy the compute lane of stage 1
    0W0 --state--> O       the optimizer step awaits the gradients of all stages

A job starts when all that it waits for is there: the longest way to it. The wait that
ends last decides, so the critical path goes back from decision to decision. Jobs that
wait for one another in a circle never start.

Jobs begin in the order of their row. They occupy their lanes until they end, so what
occupies the network alone goes on beside the next jobs. Of a pass in parts, the first
part waits for all that the pass reads, and begins no earlier than the first one of the
pass before it; the others wait for the part before them. What the pass writes is there
when the last has ended. But where W has a part for each part of B that computes, it
waits for that one alone (`ChunkCosts.source_of`).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import inf
from typing import Literal, NamedTuple

from zbpp.core.costs.chunks import ChunkCosts
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
    Value,
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
    reader,
    reads,
    writes,
)
from zbpp.core.text import mistake
from zbpp.core.timeline import Slot

__all__ = ["JobGraph", "JobTimes", "Wait"]


class Wait(NamedTuple):
    """A reason for which a job starts no earlier than it does.

    Args:
        source: node of another job, or one of the nodes without a job (`JobGraph`).
        reason: what the job needs of it.
        delay: time from the end of the source on.
        from_start: the wait is for the start of the source.
    """

    source: int
    reason: Literal["lane", "part", "state", "value"]
    delay: float = 0.0
    from_start: bool = False


Writers = dict[int, int]
"""By micro-batch the node that writes a value of a chunk."""


class _Shape(NamedTuple):
    """What the passes of one kind and chunk have in common."""

    times: tuple[float, float]
    """Its own time, and that of the message that it waits for."""
    message: Writers | None
    """Of the value that it reads of another chunk."""
    output: Writers | None
    """Of the value that it writes for another chunk."""


class _Shapes(dict[int, _Shape]):
    """The shapes of the passes of one kind, by chunk."""

    def __init__(self, kind: PassKind, graph: "JobGraph") -> None:
        self._kind, self._graph = kind, graph

    def __missing__(self, chunk: int) -> _Shape:
        times, writers = self._graph.times, self._graph.writers
        job, n_chunks = Pass(self._kind, chunk, 0), times.placement.n_chunks
        read, written = input_of(job, n_chunks), output_of(job, n_chunks)
        delay = 0.0 if read is None else times.delay(read.chunk, chunk)
        shape = self[chunk] = _Shape(
            (times.of_pass(self._kind, chunk), delay),
            None if read is None else writers[read.what, read.chunk],
            None if written is None else writers[written.what, written.chunk],
        )
        return shape


_NOTHING, _SEVERAL = -1, -2  # no source of a node, and its waits are listed


class JobGraph:
    """The jobs of all stages, and what they wait for.

    Nodes are numbered row after row. Three more have no job: when ``all_gradients`` are
    there, when the ``verdict`` about the step before is known, and what is ``missing``.

    Args:
        rows: jobs of each stage. A pass comes behind those of its chunk that it reads
            from, and each kind of pass has the same parts everywhere.
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
        self.writers: dict[tuple[What, int], Writers] = defaultdict(dict)
        self._step_source = self.all_gradients if barrier else _NOTHING
        self._shapes = {kind: _Shapes(kind, self) for kind in PassKind}
        self._sources: list[int] = []
        """What each job waits for besides the one before it in its row."""
        self._times: list[tuple[float, float]] = []
        """Of each job, and of the message of its source."""
        self._waits: dict[int, list[Wait]] = {}
        """All that a job waits for, where one source does not tell it."""
        self._readers: list[set[int]] = [set() for _ in rows]
        """The stages that each stage sends to."""
        for stage, other in pairwise(times.placement.stage_of):
            self._readers[stage].add(other)
            self._readers[other].add(stage)
        is_plain = [set(map(type, row)) <= {Pass, Step, Check} for row in rows]
        for begin, row, plain in zip(self.first, rows, is_plain, strict=False):
            (self._add_passes if plain else self._add_jobs)(begin, row)
        for begin, row, plain in zip(self.first, rows, is_plain, strict=False):
            (self._add_sources if plain else self._add_values)(begin, row)

    def _add_passes(self, begin: int, row: Sequence[Job]) -> None:
        """Note who writes what in a row whose jobs wait for the one before them."""
        shapes = self._shapes
        for node, job in enumerate(row, begin):
            if job.__class__ is Pass:
                output = shapes[job.kind][job.chunk].output
                if output is not None:
                    output[job.microbatch] = node
        for node in range(begin + len(row) - 1, begin - 1, -1):
            if kind_of(row[node - begin]).gradients_due < 0:
                self.gradients.append(node)
                break

    def _add_sources(self, _: int, row: Sequence[Job]) -> None:
        """Add the messages that passes wait for, and the states of other jobs."""
        shapes, sources, times = self._shapes, self._sources, self._times
        for job in row:
            if job.__class__ is Pass:
                shape = shapes[job.kind][job.chunk]
                times.append(shape.times)
                if shape.message is None:
                    sources.append(_NOTHING)
                else:
                    sources.append(shape.message.get(job.microbatch, self.missing))
            else:
                times.append((self.times.of(job), 0.0))
                is_check = isinstance(job, Check)
                sources.append(self.verdict if is_check else self._step_source)

    def _add_jobs(self, begin: int, row: Sequence[Job]) -> None:
        """Add the waits of any jobs for others of their stage; note who writes what."""
        n_chunks = self.times.placement.n_chunks
        last: dict[Hashable, int] = {}  # by lane, by state and place, and see below
        gradients: dict[Lane, int] = {}
        for node, job in enumerate(row, begin):
            lanes = {*lanes_of(job), *(() if _is_part(job) else (Lane.COMPUTE,))}
            waits = [Wait(last[lane], "lane") for lane in lanes if lane in last]
            for member in members_of(job):
                for state in kind_of(member).awaits:
                    source = self._source_of(state, place_of(member), last)
                    waits += [] if source == _NOTHING else [Wait(source, "state")]
            last |= dict.fromkeys(lanes_of(job), node)
            if isinstance(job, Part):
                waits += self._waits_of_part(job, last)
                last[job.of] = last[job.of, job.index] = node
                if job.index == 0:
                    last["begun"] = node
            self._waits[node] = waits
            for done in self._done_with(job):
                kind = kind_of(done)
                if kind.sets is not None:
                    last[kind.sets, place_of(done)] = node
                if kind.gradients_due < 0:
                    gradients |= dict.fromkeys(lanes_of(job), node)
                for value in writes(done, n_chunks) if isinstance(done, Pass) else ():
                    self.writers[value.what, value.chunk][value.microbatch] = node
        self.gradients += gradients.values()

    def _source_of(self, state: State, place: int, last: dict[Hashable, int]) -> int:
        if state is State.VERDICT:
            return self.verdict
        if state is State.ALL_GRADIENTS:
            return self._step_source
        return last.get((state, place), _NOTHING)

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

    def _add_values(self, begin: int, row: Sequence[Job]) -> None:
        """Add the waits of any jobs for values."""
        for node, job in enumerate(row, begin):
            self._sources.append(_SEVERAL)
            self._times.append((self.times.of(job), 0.0))
            if isinstance(job, Part) and (job.index or job.kind is PassKind.W):
                continue
            for part in passes_in(job):
                for value in reads(part, self.times.placement.n_chunks):
                    writers = self.writers[value.what, value.chunk]
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
        """List what a node waits for, the job before it on its lane first."""
        if node >= self.first[-1]:
            is_sum = node == self.all_gradients
            return [Wait(x, "state") for x in (self.gradients if is_sum else ())]
        source, job = self._sources[node], self.job(node)
        if source == _SEVERAL:
            return self._waits[node]
        waits = [Wait(node - 1, "lane")] if self.place(node)[1] else []
        if not isinstance(job, Pass):
            return waits if source == _NOTHING else [*waits, Wait(source, "state")]
        if source != _NOTHING:
            waits.append(Wait(source, "value", self._times[node][1]))
        stored = reads(job, self.times.placement.n_chunks)
        return waits + [
            Wait(self._stored[value], "value")
            for value in stored
            if value in self._stored
        ]

    @cached_property
    def _stored(self) -> dict[Value, int]:
        """Nodes that write the values that stay in their chunk."""
        n_chunks = self.times.placement.n_chunks
        return {
            value: node
            for node, job in enumerate(chain.from_iterable(self.rows))
            if isinstance(job, Pass)
            for value in writes(job, n_chunks)
            if reader(value) == value.chunk
        }

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
        starts, ends = [inf] * first[-1], [inf] * first[-1]
        ends += [inf, verdict, inf]
        least = [0.0] * len(self.rows) if free is None else free
        at, stops = first[:-1], first[1:]
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
                            now = arrival
                    if now == inf:
                        break
                starts[node] = now
                now += time
                ends[node] = now
            else:
                node = stops[row]
            if node > begin:
                at[row] = node
                to_try += self._readers[row]
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
        """Name jobs that wait for one another, of those that come next on stages."""
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
                        f"{self.job(node)} never starts: what it waits for is in no "
                        "row",
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


def _is_part(job: Job) -> bool:
    return isinstance(job, Part)


class JobTimes:
    """Starts of the jobs of a graph, and ends of all its nodes."""

    def __init__(self, graph: JobGraph, starts: list[float], ends: list[float]) -> None:
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

    def slots(self) -> list[list[Slot]]:
        """The jobs of each row in time."""
        places = zip(self.graph.first, self.graph.first[1:], strict=False)
        with gc_paused():
            return [
                bulk_construct(
                    Slot, len(row), job=row, start=self.starts[a:b], end=self.ends[a:b]
                )
                for row, (a, b) in zip(self.graph.rows, places, strict=True)
            ]
