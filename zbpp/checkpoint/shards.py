"""Tensors of which a process holds a part: saved whole, and loaded in parts.

A checkpoint knows no mesh, so that it fits any other, and the plain model.
"""

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["in_parts", "put_into", "whole"]


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all processes that hold parts of it must call."""
    return cast(Any, tensor.detach()).full_tensor() if _is_sharded(tensor) else tensor


def _part_of(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, as ``like`` is dealt out."""
    chunks = cast(Any, like).__create_chunk_list__()
    if not chunks:
        return value.new_empty(0)
    places = zip(chunks[0].offsets, chunks[0].sizes, strict=True)
    return value[tuple(slice(at, at + size) for at, size in places)]


@torch.no_grad()
def put_into(target: Tensor, value: Tensor) -> None:
    """Copy a value into a parameter or buffer, or this process's part of it.

    Args:
        target: of the model.
        value: whole; or dealt out as the target is.
    """
    if not _is_sharded(target):
        target.copy_(whole(value))
        return
    held: Any = target
    if _is_sharded(value) and _alike(value, held):
        held.to_local().copy_(cast(Any, value).to_local())
        return
    part = _part_of(whole(value), target)
    if part.numel():
        held.to_local().copy_(part)


def in_parts(value: Tensor, like: Tensor) -> Tensor:
    """A copy of optimizer state, dealt out as its parameter is.

    Args:
        value: whole, of the parameter's shape; or dealt out already.
        like: the parameter.
    """
    if not _is_sharded(like) or value.shape != like.shape:
        return whole(value)
    made = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    put_into(made, value)
    return made


def _alike(one: Tensor, other: Tensor) -> bool:
    a, b = cast(Any, one), cast(Any, other)
    return bool(a.device_mesh == b.device_mesh and a.placements == b.placements)
