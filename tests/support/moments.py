"""Moments that come by chance between processes, drawn by lot in one process."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from zbpp.runtime.comm.transport import LocalTransport
from zbpp.runtime.optim.decision import StepSums
from zbpp.runtime.optim.rollback import buckets

__all__ = ["idle_moments", "uncertain_sums"]


@contextlib.contextmanager
def uncertain_sums(seed: int, *, share: float = 0.1) -> Iterator[None]:
    """Sums that nobody has waited for are rarely there, at O for instance."""
    rng = random.Random(seed)
    kept = StepSums.done

    def done(self: StepSums) -> bool:
        return self._host is not None or (kept(self) and rng.random() < share)

    StepSums.done = done  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepSums.done = kept


@contextlib.contextmanager
def idle_moments(seed: int) -> Iterator[list[bool]]:
    """Before some messages there is time for some slices of a valid step's rest.

    Yields a list to which each slice adds whether it could do anything.
    """
    rng = random.Random(seed)
    receive, size = LocalTransport.receive, dict(buckets._BUCKET_BYTES)
    slices: list[bool] = []

    def receive_late(self: LocalTransport, *args: Any) -> Any:
        for _ in range(rng.choice([0, 0, 1, 3, 9])):
            could = next(self.background._work or iter(()), None)
            if could is None:
                self.background.offer(None)
                break
            slices.append(could)
        return receive(self, *args)

    LocalTransport.receive = receive_late  # type: ignore[method-assign]
    buckets._BUCKET_BYTES["cpu"] = 400  # many slices
    try:
        yield slices
    finally:
        LocalTransport.receive = receive  # type: ignore[method-assign]
        buckets._BUCKET_BYTES.update(size)
