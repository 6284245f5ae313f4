"""The jobs of a schedule and their waits, as a graph of networkx.

0F0 --value--> 1F0         1F0 reads what 0F0 writes
0F0 --lane---> 0F1         both occupy the compute lane of stage 0
0B0 --state--> O           the optimizer step awaits all gradients
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from zbpp.core import Costs, Job, Part, Pass, PassKind, Schedule
from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.jobs import (
    Lane,
    State,
    kind_of,
    lanes_of,
    members_of,
    passes_in,
    place_of,
    reads,
    writes,
)
from zbpp.simulator.arguments import takes_plans

if TYPE_CHECKING:
    from networkx import DiGraph

__all__ = ["job_graph"]

_UNIT = Costs()

Node = tuple[int, int]
"""A job: its stage, and its place in the order of the stage."""


@takes_plans
def job_graph(schedule: Schedule, costs: Costs = _UNIT) -> "DiGraph[Node]":
    """Return the jobs of one step as a directed graph without circles.

    A node is ``(stage, place in its order)``, with the attributes ``job``, ``start``
    and ``end``. An edge leads from a job to one that waits for it, with the attributes
    ``reason`` (``"lane"``, ``"value"``, ``"state"`` or ``"part"``) and ``time``: from
    the start of the first to the earliest start of the second. A job starts at the
    largest sum of a start and a time that leads to it. So the critical path is
    ``networkx.dag_longest_path(graph, weight="time")``, but for the time of its last
    job.

    Args:
        schedule: a schedule or a plan.
        costs: times of its jobs; those of a plan come with it.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    import networkx as nx

    times = costs.on(schedule.placement)
    graph: DiGraph[Node] = nx.DiGraph()
    waits = _Waits(graph, times)
    for stage, row in enumerate(schedule.rows_for(times)):
        waits.add_stage(stage, row)
    waits.add_values()
    if not schedule.is_post_validated:
        waits.add_barrier()
    for node in nx.topological_sort(graph):
        about = graph.nodes[node]
        start = max(
            (
                graph.nodes[u]["start"] + e["time"]
                for u, _, e in graph.in_edges(node, data=True)
            ),
            default=0.0,
        )
        about["start"], about["end"] = start, start + times.of(about["job"])
    return graph


class _Waits:
    """Adds nodes and edges, stage by stage, then the values between all of them."""

    def __init__(self, graph: Any, times: ChunkCosts) -> None:
        self._graph, self._times = graph, times
        self._n_chunks = times.placement.n_chunks
        self._writers: dict[Hashable, Node] = {}
        self._gradients: list[Node] = []
        """The jobs with which the gradients of a chunk are complete."""

    def add_stage(self, stage: int, row: Sequence[Job]) -> None:
        """Add the jobs of a stage, and the waits among them."""
        last: dict[Hashable, Node] = {}
        """By lane, by state and place, by pass, and by part of a pass."""
        for place, job in enumerate(row):
            node = stage, place
            self._graph.add_node(node, job=job)
            for lane in {*lanes_of(job), *self._issues_behind(job)}:
                self._wait(node, last.get(lane), "lane")
            self._wait_for_parts(node, job, last)
            for member in members_of(job):
                for state in kind_of(member).awaits:
                    self._wait(node, last.get((state, place_of(member))), "state")
            last |= dict.fromkeys(lanes_of(job), node)
            if isinstance(job, Part):
                last |= dict.fromkeys([(job.of, job.index), job.of], node)
                if job.index == 0:
                    last["begun"] = node
            for done in self._done_with(job):
                kind = kind_of(done)
                if kind.sets is not None:
                    last[kind.sets, place_of(done)] = node
                if kind.gradients_due < 0:
                    self._gradients.append(node)
                if isinstance(done, Pass):
                    for value in writes(done, self._n_chunks):
                        self._writers[value] = node

    def add_values(self) -> None:
        """Add the waits for values of any stage."""
        for node, job in list(self._graph.nodes(data="job")):
            if isinstance(job, Part) and (job.index or job.kind is PassKind.W):
                continue
            for part in passes_in(job):
                for value in reads(part, self._n_chunks):
                    delay = self._times.delay(value.chunk, part.chunk)
                    self._wait(node, self._writers[value], "value", delay)

    def add_barrier(self) -> None:
        """Let optimizer steps wait for all gradients of all stages."""
        for node, job in list(self._graph.nodes(data="job")):
            if State.ALL_GRADIENTS in kind_of(job).awaits:
                for source in self._gradients:
                    self._wait(node, source, "state")

    def _issues_behind(self, job: Job) -> tuple[Lane, ...]:
        """Whole jobs begin in the order of their stage, whatever lane they occupy."""
        return () if isinstance(job, Part) else (Lane.COMPUTE,)

    def _wait_for_parts(self, node: Node, job: Job, last: dict[Hashable, Node]) -> None:
        if not isinstance(job, Part):
            return
        if job.index:
            self._wait(node, last.get(job.of), "part")
        else:  # passes begin in order
            self._wait(node, last.get("begun"), "part", from_start=True)
        if job.kind is PassKind.W:
            b = Pass(PassKind.B, job.chunk, job.of.microbatch)
            self._wait(node, last.get((b, self._times.source_of(job))), "part")

    def _done_with(self, job: Job) -> tuple[Job, ...]:
        """The jobs that end with a job; with a B that cannot be split, its W too."""
        if not isinstance(job, Part):
            return members_of(job)
        if job.index + 1 < len(self._times.parts_of(job.of)):
            return ()
        w = Pass(PassKind.W, job.chunk, job.of.microbatch)
        has_w = job.kind is not PassKind.B or bool(self._times.parts_of(w))
        return (job.of,) if has_w else (job.of, w)

    def _wait(
        self,
        node: Node,
        source: Node | None,
        reason: str,
        delay: float = 0.0,
        *,
        from_start: bool = False,
    ) -> None:
        if source is None:
            return
        job = self._graph.nodes[source]["job"]
        time = 0.0 if from_start else self._times.of(job) + delay
        edge = self._graph.get_edge_data(source, node)
        if edge is None or edge["time"] < time:
            self._graph.add_edge(source, node, reason=reason, time=time)
