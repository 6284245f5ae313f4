"""Counts of matrix products."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
}


class CountMatmuls(TorchDispatchMode):
    """Counts the matrix products that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))
