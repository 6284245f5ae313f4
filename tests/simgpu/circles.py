"""Find the circle of waits of processes that are stuck, and say it in words.

Each rank has written ``stuck_<rank>.json``: what its host waits for, what its streams
have under way. Only the heads of streams wait for others, and hosts:

    host               waits for the stream that it waits for
    head that waits    for the stream that its event is on
    head in a queue    for the stream at the front of the hardware queue
    head, no room      for the streams whose heads run
    message under way  for the streams of its other ends; or the hosts that have yet to
                       launch these
"""

import json
from pathlib import Path
from typing import Any

__all__ = ["explain", "find_circle"]

State = dict[str, Any]
Node = tuple[int, int]
"""Rank and stream, in the name of its head; -1: the rank's host."""


def explain(folder: Path) -> list[str]:
    """Say what the processes that wrote their states into the folder wait for."""
    states = {
        int(file.stem.removeprefix("stuck_")): json.loads(file.read_text("utf-8"))
        for file in sorted(folder.glob("stuck_*.json"))
    }
    if not states:
        return []
    circle = find_circle(states)
    if circle:
        return ["a circle of waits:", *(f"  {line}" for line in circle)]
    hosts = [
        f"  rank {rank} waits in [{host['label']}] for {host['what']}"
        for rank, state in states.items()
        for host in state["hosts"]
    ]
    return [f"no circle; of what ranks {[*states]} wait for:", *hosts]


def find_circle(states: dict[int, State]) -> list[str]:
    """Return a line for each wait on a circle; empty: there is none."""
    import networkx as nx

    graph = nx.DiGraph()
    for rank, state in states.items():
        for host in state["hosts"]:
            if _is_under_way(state, host["stream"], host["number"]):
                graph.add_edge((rank, -1), (rank, host["stream"]), why="waits for")
        for stream in state["streams"]:
            for awaited, why in _waits_of_head(states, rank, stream):
                graph.add_edge((rank, stream["id"]), awaited, why=why)
    try:
        edges = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return []
    return [
        f"{_place(node)}: {_head(states, node)} {graph.edges[node, awaited]['why']} "
        f"{_place(awaited)}"
        for node, awaited in edges
    ]


def _waits_of_head(
    states: dict[int, State], rank: int, stream: State
) -> list[tuple[Node, str]]:
    state, head = states[rank], stream["operations"][0]
    if head["started"]:
        return _other_ends(states, rank, head) if head["message"] else []
    if _is_under_way(state, head["wait_stream"], head["wait_number"]):
        return [((rank, head["wait_stream"]), "waits for")]
    if queues := state["queues"]:
        front = queues[stream["id"] % len(queues)]
        if front and front != [stream["id"], head["number"]]:
            return [((rank, front[0]), "is in its hardware queue behind")]
    return [
        ((rank, other["id"]), "finds no room beside")
        for other in state["streams"]
        if state["n_running"] and other["operations"][0]["started"]
    ]


def _is_under_way(state: State, stream: int, number: int) -> bool:
    return any(s["id"] == stream and s["done"] < number for s in state["streams"])


def _other_ends(
    states: dict[int, State], rank: int, head: State
) -> list[tuple[Node, str]]:
    """Where the other members of a message or collective are that have not begun it."""
    ends: list[tuple[Node, str]] = []
    for member in head["members"]:
        if member == rank or member not in states:
            continue
        there = [
            (stream["id"], operation)
            for stream in states[member]["streams"]
            for operation in stream["operations"]
            if operation["message"] == head["message"]
        ]
        if not there:
            ends.append(((member, -1), "waits for a launch by"))
        for stream, operation in there:
            if not operation["started"]:
                ends.append(((member, stream), "waits for its other end on"))
    return ends


def _place(node: Node) -> str:
    rank, stream = node
    return f"rank {rank}, " + (f"stream {stream}" if stream >= 0 else "the host")


def _head(states: dict[int, State], node: Node) -> str:
    rank, stream = node
    if stream < 0:
        labels = [f"[{host['label']}]" for host in states[rank]["hosts"]]
        return f"in {' and '.join(labels) or 'a loop of its own'}"
    (row,) = (row for row in states[rank]["streams"] if row["id"] == stream)
    head = row["operations"][0]
    return f"{head['name']} in [{head['label']}]"
