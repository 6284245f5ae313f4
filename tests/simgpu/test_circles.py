"""Circles of waits are found and said in words: by ranks, streams and jobs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from simgpu.circles import find_circle
from simgpu.process_runs import small
from simgpu.processes import Found, SimulatedPool, watched

from zbpp.runtime.comm import channels
from zbpp.runtime.comm.private_group import open_group

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

    with patch.object(channels, "open_group", shared):
        yield


def shared_communicator(mode: str) -> Found:
    with one_communicator_for_a_pair():
        return watched(partial(small, mode, timeout_s=30.0), patience_s=PATIENCE_S)


def with_limits(mode: str, settings: dict[str, float]) -> Found:
    run = partial(small, mode, timeout_s=30.0)
    return watched(run, patience_s=PATIENCE_S, **settings)


def circle_of(pool: SimulatedPool, n: int, function: Any, *args: Any) -> str:
    """The circle that a run ends in."""
    with pytest.raises(AssertionError, match="a circle of waits") as stuck:
        pool.run(function, n, *args, timeout_s=60)
    text = str(stuck.value)
    return text[text.index("a circle of waits") :]


def test_one_communicator_for_both_directions(pool: SimulatedPool) -> None:
    import time
    t = time.time()
    circle = circle_of(pool, 2, shared_communicator, "1F1B")
    print(time.time() - t, circle)


@pytest.mark.parametrize("mode", ["1F1B"])
def test_one_hardware_queue(pool: SimulatedPool, mode: str) -> None:
    import time
    t = time.time()
    circle = circle_of(pool, 2, with_limits, mode, {"queues": 1})
    print(time.time() - t, circle)

def test_room_for_one_kernel(pool: SimulatedPool) -> None:
    import time
    t = time.time()
    circle = circle_of(pool, 2, with_limits, "1F1B", {"n_running": 1})
    print(time.time() - t, circle)
