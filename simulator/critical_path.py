"""Jobs and their waits as a graph, and the longest way in it: what fixed the time.

0F0 --value--> 1F0         1F0 reads what 0F0 writes
0F0 --lane---> 0F1         both occupy the compute lane of stage 0
0B0 --state--> O           the optimizer step awaits all gradients

The critical path goes from the job that ends last back to what it waited for longest
(`zbpp.core.graph`):

    stage 0 | F0  F1  ..........  B0          path: 0F0 1F0 1B0 0B0
    stage 1 |     F0  B0  F1
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zbpp.core import Costs, Kind, Schedule, Slot, kind_of
from zbpp.simulator.engine import first_step, takes_plans

if TYPE_CHECKING:
    from networkx import DiGraph

_UNIT = Costs()

Node = tuple[int, int]
"""A job: its stage, and its place in the order of the stage."""


@dataclass(frozen=True)
class CriticalPath:
    """The jobs that fix the time of a step: each waits for the one before it."""

    slots: tuple[Slot, ...]

    @property
    def length(self) -> float:
        """Time from the start of the first job to the end of the last one."""
        return self.slots[-1].end - self.slots[0].start

    def time_of(self, kind: Kind) -> float:
        """Time that the path spends in jobs of one kind."""
        return sum(slot.duration for slot in self.slots if slot.job.kind is kind)

    @property
    def time_in_messages(self) -> float:
        """Time that the path spends on the way from stage to stage."""
        return self.length - sum(slot.duration for slot in self.slots)


@takes_plans
def critical_path(schedule: Schedule, costs: Costs = _UNIT) -> CriticalPath:
    """Find a longest path of the simulated jobs; its length is the step time.

    Where several paths are longest, one of them is returned.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    run = first_step(schedule, costs)
    jobs = run.graph
    path = run.path(max(range(len(run.starts)), key=run.ends.__getitem__))
    slots = (Slot(jobs.job(x), run.starts[x], run.ends[x]) for x in path)
    shown = (slot for slot in slots if kind_of(slot.job).times)
    return CriticalPath(tuple(shown))


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

    run = first_step(schedule, costs)
    jobs, exported = run.graph, nx.DiGraph()
    for node, (start, end) in enumerate(zip(run.starts, run.ends, strict=False)):
        place = jobs.place(node)
        exported.add_node(place, job=jobs.job(node), start=start, end=end)
    for node in range(len(run.starts)):
        for wait in jobs.waits(node):
            is_sum = wait.source == jobs.all_gradients
            for source in jobs.gradients if is_sum else [wait.source]:
                if source >= len(run.starts):
                    continue  # the verdict is known from the start
                time = jobs.times.of(jobs.job(source)) + wait.delay
                time = 0.0 if wait.from_start else time
                edge = jobs.place(source), jobs.place(node)
                known = exported.get_edge_data(*edge)
                if known is None or known["time"] < time:
                    exported.add_edge(*edge, reason=wait.reason, time=time)
    return exported
