"""The oracle of the simulator's times: the longest path through the graph of the jobs.

    0F0 --1.2--> 1F0 --1--> 1B0 --1.2--> 0B0     an edge weighs the time of the job
     |            |          |            |      it leaves, plus the message's delay
     1            1          1            1      if the two are on different stages
     v            v          v            v
    0F1          1F1        1W0          0W0     down: the order on each stage

A second way, independent of the clock, to the same number. UNSHARD and REDUCE_GRAD form
a chain of their own on each stage: each starts when the stage comes to it and the one
before it has ended.
"""

import networkx as nx

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Pass,
    PassKind,
    Step,
    passes_in,
    reads,
    writes,
)

UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_WAIT = CollectiveKind


def job_graph(schedule, costs):
    """Jobs as nodes, a collective with its number; edges with ``weight``."""
    times = costs.on(schedule.placement)
    n_chunks = schedule.placement.n_chunks
    graph = nx.DiGraph()
    written, last_gradients = {}, []

    def wait(node, *sources):
        for source in sources:
            if source is not None:
                graph.add_edge(source, node, weight=graph.nodes[source]["duration"])

    for order in schedule.orders:
        last, lane, before, number = {}, None, None, {}
        for job in order:
            if isinstance(job, Collective):
                if job.kind is RESHARD:
                    continue
                number[job] = number.get(job, 0) + 1
            node = (job, number[job]) if isinstance(job, Collective) else job
            graph.add_node(node, duration=times.of(job))
            wait(node, before)
            if not isinstance(job, Collective):
                if isinstance(job, Pass) and job.kind is not PassKind.W:
                    wait(node, last.get((UNSHARD, job.chunk)))
                before = node
            elif job.kind is REDUCE_WAIT:
                wait(node, last[REDUCE_GRAD, job.chunk])
                before = node
                last_gradients.append(node)
            else:
                wait(node, lane)
                lane = last[job.kind, job.chunk] = node
            for part in passes_in(job):
                written |= dict.fromkeys(writes(part, n_chunks), job)
        ends = [job for job in order if {p.kind for p in passes_in(job)} & {"W", "BW"}]
        last_gradients += ends[-1:]
    for job in list(graph):
        if isinstance(job, Step) and Check(job.stage) not in graph:
            wait(job, *last_gradients)
        elif not isinstance(job, tuple):
            for part in passes_in(job):
                for value in reads(part, n_chunks):
                    source = written[value]
                    weight = times.of(source) + times.delay(value.chunk, part.chunk)
                    known = graph.get_edge_data(source, job, {"weight": 0.0})["weight"]
                    graph.add_edge(source, job, weight=max(weight, known))
    return graph


def longest_path(graph):
    """Length of the longest path of a graph of jobs, the last one included."""
    graph = graph.copy()
    for job, duration in list(graph.nodes(data="duration")):
        graph.add_edge(job, "end", weight=duration)
    return nx.dag_longest_path_length(graph)
