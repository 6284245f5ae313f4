"""Gradients of replicas: when their sum begins, how long the host waits for it."""

import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zbpp.runtime.parallel.buckets import Buckets
from zbpp.runtime.parallel.progress import LayerProgress


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


def test_a_parameter_that_is_not_used_adds_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_an_equal_one(flat: torch.Tensor, **_: Any) -> RecordedWork:
        flat.mul_(2)
        return RecordedWork()

    monkeypatch.setattr(dist, "all_reduce", with_an_equal_one)
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    used.grad = torch.ones(3)
    buckets = Buckets([used, unused], [cast(Any, None)])
    (found,) = buckets.reduce()
    buckets.wait()
    assert found is unused
    assert (used.grad.tolist(), unused.grad.tolist()) == ([2.0] * 3, [0.0] * 3)


def test_a_layer_is_summed_behind_its_last_gradient_and_the_layers_after_it() -> None:
    """The work of W in its order: of layer 1, of 0, of 1 again, of 0 again."""
    a, b, c, d, of_b = (torch.zeros(1, requires_grad=True) for _ in range(5))
    begun: list[int] = []
    progress = LayerProgress({a: 0, b: 1, c: 0, d: 1, of_b: 2}, begun.append)
    progress.begin([[b], [a], [d], [c]])
    seen = [(progress.done(n), list(begun)) for n in (0, 3, 4)]
    assert seen == [(3, [2]), (4, [2, 1]), (sys.maxsize, [2, 1, 0])]
