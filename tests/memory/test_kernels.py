"""Temporaries of single kernels and of autograd's sums, against the allocator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocator import worst
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from zbpp.core import RequestError
from zbpp.memory.fake import check_device
from zbpp.memory.operators.casts import cast_bytes
from zbpp.memory.operators.engine import EngineSums
from zbpp.memory.operators.scratch import _peak

ATEN = torch.ops.aten
N = 256
SMALL = 2**13
"""Bytes of the buffers that reductions use beside."""


def of(dtype: torch.dtype, columns: int = N) -> Tensor:
    return torch.zeros(N, columns, dtype=dtype)


F32, F64, BF16 = of(torch.float32), of(torch.float64), of(torch.bfloat16)
BOOL, INT = of(torch.bool), of(torch.int32)

CALLS = {
    "32 + 16 bits": (ATEN.add.Tensor, (F32, BF16)),
    "16 + 32 bits": (ATEN.add.Tensor, (BF16, F32)),
    "alike": (ATEN.add.Tensor, (BF16, BF16)),
    "a column": (ATEN.mul.Tensor, (F32, of(torch.bfloat16, 1))),
    "a number": (ATEN.mul.Tensor, (BF16, torch.tensor(1.0, dtype=torch.float64))),
    "into 32 bits": (ATEN.add_.Tensor, (F32, BF16)),
    "into 16 bits": (ATEN.add_.Tensor, (BF16, F32)),
    "compared": (ATEN.eq.Tensor, (F32, BF16)),
    "chosen": (ATEN.where.self, (BOOL, F32, BF16)),
    "chosen alike": (ATEN.where.self, (BOOL, F32, F32)),
    "masked": (ATEN.masked_fill.Scalar, (F32, BOOL, 0.0)),
    "times a mask": (ATEN.mul.Tensor, (F32, BOOL)),
    "three": (ATEN.addcmul.default, (F32, BF16, BF16)),
    "64 bits": (ATEN.mul.Tensor, (F64, BF16)),
    "integers": (ATEN.div.Tensor, (INT, INT)),
    "sine of integers": (ATEN.sin.default, (INT,)),
    "copied": (ATEN.copy_.default, (F32, BF16)),
    "summed as 16 bits": (ATEN.sum.dim_IntList, (BF16, [0])),
    "counted": (ATEN.sum.default, (BOOL,)),
    "counted up": (ATEN.cumsum.default, (BOOL, 0)),
    "mean": (ATEN.mean.default, (BF16,)),
    "mean of rows": (ATEN.mean.dim, (BF16, [1])),
    "silu backward": (ATEN.silu_backward.default, (F32, BF16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_are_cast_are_reckoned(name: str) -> None:
    func, args = CALLS[name]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
    with torch.no_grad():
        measured = _peak(lambda: func(*args))
        with mode:
            reckoned = cast_bytes(func, fakes, {}, func(*fakes))
    assert abs(measured - reckoned) <= SMALL
    assert name in ("alike", "masked") or measured or func is not ATEN.add.Tensor


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


@pytest.mark.slow
def test_nor_does_a_compilation_that_failed_change_how_holders_are_counted() -> None:
    layers = pairs(torch.tanh)
    before = worst(layers, range(3, 4))[0]

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    assert before == worst(layers, range(3, 4))[0] < 0.01


def test_sums_that_are_all_made_anew_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSums, "in_place", lambda *_: False)
    assert worst(pairs(torch.tanh), range(3, 4))[0] > 0.02


def test_sums_that_are_all_in_place_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(self: Any, func: Any, args: Any) -> bool:
        return func is ATEN.add.Tensor and not torch.is_grad_enabled()

    monkeypatch.setattr(EngineSums, "in_place", always)
    assert worst(pairs(in_parts), range(3, 4))[0] > 0.02


def test_kernels_of_a_gpu_are_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"finds no cuda device.*--device cpu"):
        check_device(torch.device("cuda"))
    check_device(torch.device("cpu"))
