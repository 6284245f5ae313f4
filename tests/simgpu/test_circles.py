"""Circles of waits are found and said in words: by ranks, streams and jobs."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from simgpu.circles import find_circle
from simgpu.processes import Found, SimulatedPool, watched
from simgpu.scenarios import case, from_host
from zbpp.runtime.comm import groups
from zbpp.runtime.comm.groups import open_group

PATIENCE_S = 2.0


@pytest.fixture
def pool() -> Iterator[SimulatedPool]:
    """Processes that are stuck are of no further use."""
    workers = SimulatedPool()
    yield workers
    workers.close()


class TurnedRound:
    """A communicator of two, under the ranks that a channel has for its ends."""

    def __init__(self, pair: Any, ends: Sequence[int]) -> None:
        self._pair, self._ranks = pair, [sorted(ends).index(rank) for rank in ends]

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self._pair.send(tensors, self._ranks[to], tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._pair.recv(tensors, self._ranks[source], tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


@contextmanager
def one_communicator_for_a_pair() -> Iterator[None]:
    """Both directions of two stages go over one: each end waits behind its own send."""
    made: dict[tuple[int, ...], Any] = {}

    def shared(everyone: Any, members: Any, name: str, **more: Any) -> Any:
        if "_to_" not in name:
            return open_group(everyone, members, name, **more)
        ends = tuple(sorted(members))
        if ends not in made:
            name = f"{name.rsplit('/', 1)[0]}/{ends}"
            made[ends] = open_group(everyone, ends, name, **more)
        return TurnedRound(made[ends], members)

    with patch.object(groups, "open_group", shared):
        yield


def shared_communicator(mode: str) -> Found:
    with one_communicator_for_a_pair():
        return watched(
            partial(from_host, case(mode), timeout_s=30.0), patience_s=PATIENCE_S
        )


def with_limits(mode: str, settings: dict[str, float]) -> Found:
    run = partial(from_host, case(mode), timeout_s=30.0)
    return watched(run, patience_s=PATIENCE_S, **settings)


def circle_of(pool: SimulatedPool, n: int, function: Any, *args: Any) -> str:
    """The circle that a run ends in."""
    with pytest.raises(AssertionError, match="a circle of waits") as stuck:
        pool.run(function, n, *args, timeout_s=60)
    text = str(stuck.value)
    return text[text.index("a circle of waits") :]


def test_one_communicator_for_both_directions(pool: SimulatedPool) -> None:
    """Each end's send waits for a receive that stands behind the other end's send."""
    circle = circle_of(pool, 2, shared_communicator, "1F1B")
    first, second = circle.splitlines()[1:]
    assert re.search(r"rank 0, stream (\d+): send to rank 1 in \[.*activation", first)
    assert re.search(r"rank 1, stream (\d+): send to rank 0 in \[.*gradient", second)
    assert "waits for its other end on rank 1" in first
    assert "waits for its other end on rank 0" in second


@pytest.mark.slow
def test_one_hardware_queue(pool: SimulatedPool) -> None:
    """The mark behind a send holds up what the host launches after it."""
    circle = circle_of(pool, 2, with_limits, "1F1B", {"queues": 1})
    assert "is in its hardware queue behind" in circle
    assert "send to rank" in circle and "waits for its other end on" in circle


@pytest.mark.slow
def test_room_for_one_kernel(pool: SimulatedPool) -> None:
    """A receive that is posted early takes the room of the send that it waits for."""
    circle = circle_of(pool, 2, with_limits, "1F1B", {"n_running": 1})
    assert "finds no room beside" in circle
    assert re.search(r"(receive from|send to) rank \d in \[", circle), circle


def operation(name: str, message: str = "", *, started: bool = True) -> Any:
    return {
        "number": 1, "name": name, "label": "", "message": message, "members": [0, 1],
        "started": started, "wait_stream": -1, "wait_number": 0,
    }  # fmt: skip


def state(*heads: list[Any], waits_for: int | None = None) -> Any:
    hosts = [{"what": "an event", "stream": waits_for, "number": 1, "label": "0F0"}]
    return {
        "hosts": hosts if waits_for is not None else [],
        "streams": [
            {"id": i, "done": 0, "operations": head} for i, head in enumerate(heads)
        ],
        "queues": [],
        "n_running": 0,
    }


def test_a_host_that_waits_may_stand_on_a_circle() -> None:
    """
    rank 0   host waits for stream 0: receive  ->  not sent yet by rank 1
    rank 1   host waits for stream 0: receive  ->  not sent yet by rank 0
    """
    states = {
        0: state([operation("receive", "a")], waits_for=0),
        1: state([operation("receive", "b")], waits_for=0),
    }
    assert find_circle(states) == [
        "rank 0, the host: in [0F0] waits for rank 0, stream 0",
        "rank 0, stream 0: receive in [] waits for a launch by rank 1, the host",
        "rank 1, the host: in [0F0] waits for rank 1, stream 0",
        "rank 1, stream 0: receive in [] waits for a launch by rank 0, the host",
    ]
    states[1]["hosts"] = []  # it is still at work
    assert find_circle(states) == []
