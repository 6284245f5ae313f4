"""How the groups of a pipeline end: in one order, and at once after a failure."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from zbpp.runtime.comm import distributed
from zbpp.runtime.comm.channels import Channel
from zbpp.runtime.comm.distributed import DistributedTransport

CPU = torch.device("cpu")


class PlayedGroup:
    """A communicator that notes what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def shutdown(self) -> None:
        self._log.append(f"shut {self._name}")

    def abort(self) -> None:
        self._log.append(f"abort {self._name}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def transport(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: list[str]
) -> DistributedTransport:
    """The middle one of three stages, as it is with NCCL."""
    whole = cast(Any, PlayedGroup("all", log))
    pairs = ((0, 1), (1, 0), (1, 2), (2, 1))
    channels = {
        pair: Channel(cast(Any, PlayedGroup(f"{pair[0]}{pair[1]}", log)), 0, 1)
        for pair in pairs
    }
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "backend_of", lambda *_: "nccl")
    monkeypatch.setattr(
        distributed, "join", lambda *_, **__: (whole, channels, store, "name")
    )
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    return DistributedTransport(
        cast(Any, None),
        [0, 1, 2],
        neighbours=[{1}, {0, 2}, {1}],
        sources=[None, 0, 1],
        device=CPU,
        timeout_s=5.0,
        first_timeout_s=9.0,
    )


NAMES = ["all", "01", "10", "12", "21"]


def test_communicators_are_shut_in_the_order_in_which_they_were_opened(
    transport: DistributedTransport, log: list[str]
) -> None:
    transport.close()
    assert log == [f"shut {name}" for name in NAMES]


def test_a_failure_aborts_the_communicators_once(
    transport: DistributedTransport, log: list[str]
) -> None:
    transport.report(OSError("disk full"))
    transport.report(OSError("again"))
    assert log == [f"abort {name}" for name in NAMES]


def test_a_batch_that_does_not_fit_aborts_nothing(
    transport: DistributedTransport, log: list[str]
) -> None:
    transport.report(ValueError("5 samples"), ends=False)
    assert log == []
