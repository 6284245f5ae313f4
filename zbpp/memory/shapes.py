"""Shapes of results that torch's own rules for fake tensors refuse or get wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SHAPES"]

_ALIGNED = 16  # bytes; rows of a grouped product begin at multiples of it


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups: rows of ``a`` (or of both) belong to groups by ``offs``.

    torch's rule asks for bfloat16, its CPU kernel takes all.
    """
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2:
        shape = [a.shape[0], b.shape[-1]]
    elif b.dim() == 2:
        shape = [a.shape[1], b.shape[1]]
    else:
        shape = [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    step = max(1, _ALIGNED // dtype.itemsize)
    stride = [-(-shape[-1] // step) * step, 1]
    if len(shape) == 3:
        stride.insert(0, stride[0] * shape[1])
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


def _same(tensor: Tensor) -> Tensor:
    """The tensor itself; torch's rule makes another one."""
    return tensor


SHAPES: dict[Any, Callable[..., Tensor]] = {}
"""By operator; those that this torch does not have are left out."""

if hasattr(torch.ops.aten, "_grouped_mm"):
    SHAPES[torch.ops.aten._grouped_mm.default] = _grouped_mm
if torch.distributed.is_available():
    SHAPES[torch.ops._c10d_functional.wait_tensor.default] = _same
