"""Another processor: in which order a product adds depends on its shapes.

Libraries choose kernels by shape, and on each processor otherwise: on some a batch and
its micro-batches round alike, on others they do not. Here no two shapes do.

PYTHONPATH=tests/other_kernels pytest tests/models
"""

import random
import warnings
from functools import cache

import torch
from torch import Tensor


@cache
def order_of(*shapes: torch.Size) -> list[int]:
    """In which order products of these shapes add."""
    order = list(range(shapes[0][-1]))
    random.Random(hash(shapes)).shuffle(order)
    return order


def bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        order = torch.tensor(
            order_of(a.shape, b.shape), dtype=torch.long, device=a.device
        )
        a, b = a.index_select(-1, order), b.index_select(-2, order)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    return torch.ops.aten.bmm.out(a, b, out=out)


def mm(a: Tensor, b: Tensor) -> Tensor:
    return bmm(a[None], b[None])[0]


def addmm(
    x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = mm(a, b) * alpha
    return product + x * beta if beta else product


def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    product = mm(a, b)
    return out.resize_(product.shape).copy_(product)


def addmm_out(
    x: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **scales: float
) -> Tensor:
    product = addmm(x, a, b, **scales)
    return out.resize_(product.shape).copy_(product)


KERNELS = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that its own are replaced
    for name, kernel in (
        ("bmm", bmm),
        ("mm", mm),
        ("addmm", addmm),
        ("mm.out", mm_out),
        ("addmm.out", addmm_out),
    ):
        KERNELS.impl(name, kernel, "CPU")
