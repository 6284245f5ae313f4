"""Recording waits for the device, so for the stage's messages: it must not hang.

On a GPU a message by NCCL is under way on the device, and the recording of a graph
waits for all of them. Here the host plays that: it waits for every message that it has
begun, received or sent, before it records.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from pool import Pool
from small_model import batch, make_pipeline
from tape import TapePool

from zbpp import diagnostics
from zbpp.runtime.comm.channels import Port
from zbpp.runtime.comm.distributed import DistributedTransport

N_STEPS = 4
PATIENCE = timedelta(seconds=5)
START = Port.start


class Once:
    """A message, which gloo lets one wait for a single time."""

    under_way: ClassVar[list["Once"]] = []

    def __init__(self, work: Any) -> None:
        self._work = work
        self._is_done = False
        self.under_way.append(self)

    def wait(self, timeout: timedelta = PATIENCE) -> None:
        if not self._is_done:
            self._work.wait(timeout)
            self._is_done = True
            self.under_way.remove(self)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class WaitingPool(TapePool):
    n_waits = 0

    def record(self, action: Callable[[], None]) -> Callable[[], None]:
        for message in list(Once.under_way):
            WaitingPool.n_waits += 1
            message.wait()
        return super().record(action)


def train(mode: str) -> tuple[list[float], int]:
    pools = patch("zbpp.runtime.driver.build.pools_on", lambda device: WaitingPool)
    port = patch.object(Port, "start", lambda *a, **k: Once(START(*a, **k)))
    nccl = patch.object(DistributedTransport, "on_device", True)
    with pools, port, nccl, make_pipeline(mode, None, cuda_graphs=True) as pipeline:
        losses = [pipeline.step(*batch(i)).loss for i in range(N_STEPS)]
        assert not any(diagnostics.graph_report(pipeline).values())
    return losses, WaitingPool.n_waits


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_recording_waits_for_no_message_that_waits_for_it(
    pool: Pool, mode: str
) -> None:
    plain = make_pipeline(mode, 2)
    losses = [plain.step(*batch(i)).loss for i in range(N_STEPS)]
    for found, n_waits in pool.run(train, 2, mode):
        assert found == losses
        assert n_waits > 0
