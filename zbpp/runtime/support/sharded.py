"""Tensors that are sharded over a device mesh (DTensor, tensor parallelism)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = [
    "Part",
    "as_sharded",
    "is_sharded",
    "layout_of",
    "local_part",
    "own_shard",
    "place_gradients",
    "whole",
]


@dataclass(frozen=True)
class Part:
    """The numbers that this process has of a tensor.

    Processes have different numbers along these dimensions of its mesh.
    """

    numbers: Tensor
    names: tuple[str, ...] = ()


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor; loads nothing where there can be none."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """The way in which a DTensor lies on its mesh; empty for a plain tensor."""
    held: Any = tensor
    return (held.device_mesh, held.placements) if is_sharded(tensor) else ()


@torch.no_grad()
def own_shard(value: Any) -> Any:
    """The tensor itself that holds this process's part of a DTensor; else the value.

    It is the same object for the same DTensor, and writes to it are writes to that.
    """
    sharded = isinstance(value, Tensor) and is_sharded(value)
    return value.to_local() if sharded else value


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every process that has a shard of it must call."""
    return cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def as_sharded(shard: Tensor, like: Tensor) -> Tensor:
    """The DTensor of a shard, dealt out as another one is, which may be plain."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    held: Any = like
    made: Tensor = DTensor.from_local(
        shard,
        held.device_mesh,
        held.placements,
        run_check=False,
        shape=held.shape,
        stride=held.stride(),
    )
    return made


@torch.no_grad()
def place_gradients(parameters: Iterable[Tensor]) -> None:
    """Deal gradients out over their mesh as their parameters are.

    A gradient may be a summand of each process, as a norm's is where tensor parallelism
    deals out the sequence, or whole where its parameter is in parts, as an embedding's.
    Another replica may have the same one placed otherwise. All processes of the mesh
    must call.
    """
    for p in parameters:
        held: Any = p.grad
        if held is None or not is_sharded(held):
            continue
        placements = cast(Any, p).placements
        if held.placements != placements:
            p.grad = held.redistribute(placements=placements)


@torch.no_grad()
def local_part(tensor: Tensor) -> Part:
    """The part of this process; partial sums are summed first, by a collective."""
    if not is_sharded(tensor):
        return Part(tensor)
    from torch.distributed.tensor import Replicate

    held: Any = tensor
    if any(placement.is_partial() for placement in held.placements):
        held = held.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in held.placements]
        )
    mesh, names = held.device_mesh, held.device_mesh.mesh_dim_names
    dims = [
        names[i] if names else "without a name"
        for i, placement in enumerate(held.placements)
        if not placement.is_replicate() and mesh.size(i) > 1
    ]
    return Part(held.to_local(), tuple(dims))
