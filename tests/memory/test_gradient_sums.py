"""Sums of gradients by autograd, against the allocator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocator import worst
from torch import Tensor, nn
from torch.nn import functional

from zbpp.core import RequestError
from zbpp.memory.engine_sums import EngineSums
from zbpp.memory.fake import check_device


class Pair(nn.Module):
    """Hands on two values, each of which is used twice: B adds up gradients."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(256, 256), nn.Linear(256, 256)
        self.act = act

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = value
        return self.act(self.left(a)) + b, self.right(b).sigmoid() * a


def squared(x: Tensor) -> Tensor:
    return x * x


def in_parts(x: Tensor) -> Tensor:
    return torch.cat([part.sin() + part for part in x.chunk(2, -1)], -1) + x.t().t()


def pairs(act: Callable[[Tensor], Tensor]) -> Any:
    x = torch.randn(256, 256)

    def loss(pair: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(pair[0] + pair[1], target)

    return [Pair(act) for _ in range(6)], ((x, x), x), loss


@pytest.mark.parametrize("act", [torch.tanh, squared, in_parts])
def test_gradients_are_added_up_in_place_where_nobody_else_holds_them(
    act: Callable[[Tensor], Tensor],
) -> None:
    assert worst(pairs(act), range(3, 4))[0] < 0.01


@pytest.mark.parametrize(("act", "sums"), [(torch.tanh, False), (in_parts, True)])
def test_sums_that_are_counted_otherwise_show(
    act: Callable[[Tensor], Tensor], sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All made anew, or all in place."""

    def in_place(self: Any, func: Any, args: Any) -> bool:
        is_sum = func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()
        return sums and is_sum

    monkeypatch.setattr(EngineSums, "in_place", in_place)
    assert worst(pairs(act), range(3, 4))[0] > 0.02


def test_kernels_of_a_gpu_are_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"finds no cuda device.*--device cpu"):
        check_device(torch.device("cuda"))
    check_device(torch.device("cpu"))
