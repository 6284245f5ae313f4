"""Find the circle of waits of processes that are stuck, and say it in words.

Each rank has written ``stuck_<rank>.json``: what its host waits for, what its streams
have under way. What waits for what is a graph:

    host of a rank     -> the operation that it waits for
    operation          -> the head of its stream
    head that waits    -> the operation of another stream that its event marks
    head in a queue    -> the front of the hardware queue, which holds up what is behind
    head, no room      -> all that run
    message under way  -> its other end; or the host that has not launched this yet
"""

import json
from pathlib import Path
from typing import Any

import networkx as nx

__all__ = ["explain", "find_circle"]

State = dict[str, Any]
Node = tuple[int, int, int]
"""Rank, stream, number of an operation; the host's stream is -1."""


def explain(folder: Path) -> list[str]:
    """Say what the processes that wrote their states into the folder wait for."""
    files = sorted(folder.glob("stuck_*.json"))
    states = {
        int(file.stem.removeprefix("stuck_")): json.loads(file.read_text("utf-8"))
        for file in files
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
    return [f"stuck, without a circle; ranks {[*states]} told their state:", *hosts]


def find_circle(states: dict[int, State]) -> list[str]:
    """Return a line for each wait on a circle; empty: there is none."""
    graph = _graph(states)
    try:
        edges = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return []
    return [
        f"{_name(states, waiting)} {graph.edges[waiting, awaited]['why']} "
        f"{_name(states, awaited)}"
        for waiting, awaited in edges
    ]


def _graph(states: dict[int, State]) -> nx.DiGraph:
    graph = nx.DiGraph()
    for rank, state in states.items():
        done = {stream["id"]: stream["done"] for stream in state["streams"]}
        for host in state["hosts"]:
            stream, number = host["stream"], host["number"]
            if stream in done and number > done[stream]:
                graph.add_edge((rank, -1, 0), (rank, stream, number), why="waits for")
        for stream in state["streams"]:
            head, *others = stream["operations"]
            first = (rank, stream["id"], head["number"])
            for operation in others:
                behind = (rank, stream["id"], operation["number"])
                graph.add_edge(behind, first, why="is on its stream behind")
            for awaited, why in _waits_of_head(states, rank, stream["id"], head):
                graph.add_edge(first, awaited, why=why)
    return graph


def _waits_of_head(
    states: dict[int, State], rank: int, stream: int, head: State
) -> list[tuple[Node, str]]:
    state = states[rank]
    done = {other["id"]: other["done"] for other in state["streams"]}
    if head["started"]:
        return _other_ends(states, rank, head) if head["message"] else []
    awaited, number = head["wait_stream"], head["wait_number"]
    if awaited in done and number > done[awaited]:
        return [((rank, awaited, number), "waits for")]
    if queues := state["queues"]:
        front = queues[stream % len(queues)]
        if front and front != [stream, head["number"]]:
            return [((rank, *front), "is in its hardware queue behind")]
    return [
        ((rank, other["id"], running["number"]), "finds no room beside")
        for other in state["streams"]
        for running in other["operations"][:1]
        if state["n_running"] and running["started"]
    ]


def _other_ends(
    states: dict[int, State], rank: int, message: State
) -> list[tuple[Node, str]]:
    found = []
    for member in message["members"]:
        if member == rank or member not in states:
            continue
        end = _end_on(states, member, message["message"])
        if end is None:
            found.append(((member, -1, 0), "waits for a launch by"))
        elif not end[1]:
            found.append((end[0], "waits for its other end,"))
    return found


def _end_on(
    states: dict[int, State], rank: int, message: str
) -> tuple[Node, bool] | None:
    """The operation with this message on a rank, and if it has started."""
    for stream in states[rank]["streams"]:
        for operation in stream["operations"]:
            if operation["message"] == message:
                node = (rank, stream["id"], operation["number"])
                return node, operation["started"]
    return None


def _name(states: dict[int, State], node: Node) -> str:
    rank, stream, number = node
    if stream < 0:
        hosts = states[rank]["hosts"]
        jobs = " and ".join(f"[{host['label']}]" for host in hosts)
        return f"rank {rank}: the host in {jobs}"
    (row,) = (x for x in states[rank]["streams"] if x["id"] == stream)
    (operation,) = (x for x in row["operations"] if x["number"] == number)
    return (
        f"rank {rank}: {operation['name']} in [{operation['label']}] on stream {stream}"
    )
