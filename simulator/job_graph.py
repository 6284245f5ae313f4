"""The jobs of a schedule and their waits, as a graph of networkx.

0F0 --value--> 1F0         1F0 reads what 0F0 writes
0F0 --lane---> 0F1         both occupy the compute lane of stage 0
0B0 --state--> O           the optimizer step awaits all gradients
"""

from typing import TYPE_CHECKING

from zbpp.core import Costs, Schedule
from zbpp.simulator.arguments import takes_plans
from zbpp.simulator.engine import first_step

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
