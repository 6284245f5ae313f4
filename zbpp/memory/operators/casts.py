"""Operands that elementwise CPU kernels cast, for a while, to one common dtype.

    fp32 + bf16     the bf16 one is copied as fp32 while the sum is computed

GPU kernels cast numbers as they read them. Reductions to another dtype cast as well.
"""

from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.support.pytree import tensors_in

__all__ = ["cast_bytes"]

_ATEN = torch.ops.aten
_MEANS = {_ATEN.mean.default, _ATEN.mean.dim}
"""Means of 16-bit numbers are added up as 32-bit ones."""
_SUMS = {
    _ATEN.sum.default,
    _ATEN.sum.dim_IntList,
    _ATEN.cumsum.default,
    *_MEANS,
}
_MASKS = {_ATEN.masked_fill, _ATEN.masked_fill_, _ATEN.where}
"""Operators that read a mask as it is."""


def cast_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes of the copies that one call makes of its operands."""
    is_sum = func in _SUMS
    if not is_sum and torch.Tag.pointwise not in func.tags:
        return 0
    given: list[Tensor] = [t for t in tensors_in((args, kwargs)) if t.dim() > 0]
    if func.overloadpacket in _MASKS:
        given = [t for t in given if t.dtype is not torch.bool]
    made = result if isinstance(result, Tensor) else None
    if not given or made is None:
        return 0
    common = made.dtype if is_sum else _common(given, made)
    if func in _MEANS and common.itemsize < torch.float32.itemsize:
        common = torch.float32
    n_bytes = sum(t.numel() for t in given if t.dtype is not common) * common.itemsize
    if not is_sum and made.dtype not in (common, torch.bool):
        n_bytes += made.numel() * common.itemsize
    return n_bytes


def _common(given: list[Tensor], made: Tensor) -> torch.dtype:
    """The dtype that an elementwise kernel computes with."""
    common = given[0].dtype
    for tensor in given[1:]:
        common = torch.promote_types(common, tensor.dtype)
    if made.dtype.is_floating_point and not common.is_floating_point:
        return made.dtype
    return common
