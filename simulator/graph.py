"""The jobs of a schedule as a graph: who waits for whom, and for how long.

    0F0 --1.2--> 1F0 --1--> 1B0 --1.2--> 0B0     an edge weighs the time of the job
     |            |          |            |      it leaves, plus the message's delay
     1            1          1            1      if the two are on different stages
     v            v          v            v
    0F1          1F1        1W0          0W0     down: the order on each stage

The longest path is the time of a step. It is a second way, independent of the
engine's clock, to the same number. Collectives that go on beside the jobs of a stage
form a chain of their own: each starts when the stage comes to it and the one before
it has ended.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Costs,
    Job,
    Pass,
    PassKind,
    PassTimes,
    Schedule,
    Slot,
    Step,
    Value,
    reads,
    writes,
)
from zbpp.core.timeline import sending_time

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["CriticalPath", "critical_path", "job_graph"]

_END = "end"
_UNIT = Costs()


@dataclass(frozen=True)
class CriticalPath:
    """The jobs that fix the time of a step: each waits for the one before it.

    ``sending`` is as in `Timeline`.
    """

    slots: tuple[Slot, ...]
    sending: tuple[float, ...] = ()

    @property
    def length(self) -> float:
        """Time from the start of the first job to the end of the last one."""
        return self.slots[-1].end - self.slots[0].start

    def time_of(self, kind: PassKind) -> float:
        """Time that the path spends in passes of one kind, their sends left out."""
        return sum(
            slot.duration - sending_time(slot.job, self.sending)
            for slot in self.slots
            if isinstance(slot.job, Pass) and slot.job.kind is kind
        )

    @property
    def time_in_collectives(self) -> float:
        """Time that the path spends in gathers, and in sums of gradients."""
        return sum(s.duration for s in self.slots if isinstance(s.job, Collective))

    @property
    def time_in_messages(self) -> float:
        """Time that the path spends on the way from stage to stage.

        It is between jobs, or at the end of one whose message occupies its stage; also
        where what follows is on that stage too.
        """
        sent = sum(sending_time(slot.job, self.sending) for slot in self.slots)
        return self.length - sum(slot.duration for slot in self.slots) + sent


def job_graph(
    schedule: Schedule, costs: Costs = _UNIT, *, with_steps: bool = True
) -> "nx.DiGraph[Any]":
    """Build the graph: jobs as nodes (``duration``), edges with ``weight``.

    A collective that a stage comes to several times is a pair with its number from the
    second one on; RESHARD, which takes no time, is left out.

    Edges follow from what passes read and write, from the order on each stage, and
    from the barrier: an optimizer step waits for the last weight gradient of every
    stage, unless V's of the next iteration wait in its place. ``with_steps=False``
    leaves the optimizer steps out.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    import networkx as nx  # takes .4 s, which not every process should wait for

    placement = schedule.placement
    times = costs.on(placement)
    graph: nx.DiGraph[Any] = nx.DiGraph()
    written: dict[Value, Pass] = {}
    last_gradients: list[Job] = []
    for order in schedule.orders:
        jobs = [job for job in order if with_steps or not isinstance(job, Step)]
        row = [job for job in jobs if not isinstance(job, Collective)]
        for job in row:
            graph.add_node(job, duration=times.of(job))
            if isinstance(job, Pass):
                written |= dict.fromkeys(writes(job, placement.n_chunks), job)
        for before, after in pairwise(row):
            graph.add_edge(before, after, weight=times.of(before))
        if len(row) < len(jobs):
            last_gradients += _add_collectives(graph, jobs, times)
        last_gradients += [
            job
            for job in row
            if isinstance(job, Pass) and job.kind in (PassKind.W, PassKind.BW)
        ][-1:]
    for job in list(graph):
        if isinstance(job, Step):
            if Check(job.stage) in graph:
                continue
            for gradient in last_gradients:
                weight = graph.nodes[gradient]["duration"]
                graph.add_edge(gradient, job, weight=weight)
        elif isinstance(job, Pass):
            for value in reads(job, placement.n_chunks):
                source = written[value]
                delay = times.delay(source.chunk, job.chunk)
                graph.add_edge(source, job, weight=times.of(source) + delay)
    return graph


def _add_collectives(
    graph: "nx.DiGraph[Any]", jobs: Sequence[Job], times: PassTimes
) -> list[Any]:
    """Add those of one stage; return the nodes of its REDUCE_WAITs.

    A stage that waits for a sum goes on when both it and the job before are done.
    """
    number: Counter[Job] = Counter()
    last_of: dict[tuple[CollectiveKind, int], Any] = {}
    before: list[Any] = []  # jobs after which the stage comes to the next one
    lane: Any = None
    waits: list[Any] = []

    def wait_for(node: Any, sources: Sequence[Any]) -> None:
        for source in sources:
            graph.add_edge(source, node, weight=graph.nodes[source]["duration"])

    for job in jobs:
        if not isinstance(job, Collective):
            gather = None
            if isinstance(job, Pass) and job.kind is not PassKind.W:
                gather = last_of.get((CollectiveKind.UNSHARD, job.chunk))
            wait_for(job, [*before, *([] if gather is None else [gather])])
            before = [job]
            continue
        if job.kind is CollectiveKind.RESHARD:
            continue
        node = (job, number[job]) if number[job] else job
        number[job] += 1
        graph.add_node(node, duration=times.of(job), job=job)
        if job.kind is CollectiveKind.REDUCE_WAIT:
            wait_for(node, [*before, last_of[CollectiveKind.REDUCE_GRAD, job.chunk]])
            before = [node]
            waits.append(node)
        else:
            wait_for(node, [*before, *([] if lane is None else [lane])])
            lane = last_of[job.kind, job.chunk] = node
    return waits


def critical_path(
    schedule: Schedule, costs: Costs = _UNIT, *, with_steps: bool = True
) -> CriticalPath:
    """Find a longest path; its length is the step time (without steps: the makespan).

    Where several paths are longest, one of them is returned.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    graph = job_graph(schedule, costs, with_steps=with_steps)
    durations = dict(graph.nodes(data="duration"))
    leaves = [job for job in graph if graph.out_degree(job) == 0]
    for job in leaves:
        graph.add_edge(job, _END, weight=durations[job])
    import networkx as nx

    path = nx.dag_longest_path(graph, weight="weight")
    if path[-1] == _END:  # not so if a job that takes no time is as far away
        path.pop()
    slots = []
    start = 0.0
    for i, job in enumerate(path):
        if i:
            start += graph[path[i - 1]][job]["weight"]
        of = graph.nodes[job].get("job", job)
        slots.append(Slot(of, start, start + durations[job]))
    return CriticalPath(tuple(slots), costs.on(schedule.placement).sending)
