"""Gradients of replicas: how long the host waits for their sum."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zbpp.runtime.parallel.buckets import Buckets


class RecordedWork:
    """A sum that notes how it is waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[object, ...]] = []

    def wait(self, *limit: object) -> None:
        self.waits.append(limit)


def test_a_sum_is_waited_for_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, NCCL holds up the host until the sum is there, once a layer."""
    work = RecordedWork()
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: work)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    buckets = Buckets([parameter], [cast(Any, None)])
    buckets.reduce()
    assert work.waits == []
    buckets.wait()
    assert work.waits == [()]
