"""Tensors that are sharded over a device mesh (DTensor, tensor parallelism)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbpp.runtime.support.pytree import map_tensors


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
    sharded: Any = tensor
    return (sharded.device_mesh, sharded.placements) if is_sharded(tensor) else ()


@torch.no_grad()
def own_shard(value: Any) -> Any:
    """The local tensor of a DTensor; of anything else the value itself.

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
    """The DTensor of a shard, with the placements of another, which may be plain.

    The shard stays where it is: on the host, if the other one's mesh is of devices.
    """
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    if shard.device.type not in (sharded.device_mesh.device_type, "meta"):
        moved: Any = as_sharded(shard.to("meta"), like)
        return cast(Tensor, cast(Any, DTensor)(shard, moved._spec, requires_grad=False))
    return DTensor.from_local(
        shard,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


@torch.no_grad()
def place_gradients(parameters: Iterable[Tensor]) -> None:
    """Place gradients on their mesh as their parameters are.

    A gradient may be a partial sum on each process, as a norm's is where tensor
    parallelism shards the sequence, or whole where its parameter is sharded, as an
    embedding's.
    Another replica may have the same one placed otherwise. All processes of the mesh
    must call.
    """
    for p in parameters:
        gradient: Any = p.grad
        if gradient is None or not is_sharded(gradient):
            continue
        placements = cast(Any, p).placements
        if gradient.placements != placements:
            p.grad = gradient.redistribute(placements=placements)


@torch.no_grad()
def local_part(tensor: Tensor) -> Part:
    """The part of this process; partial sums are summed first, by a collective."""
    if not is_sharded(tensor):
        return Part(tensor)
    sharded: Any = _summed(tensor)
    mesh, names = sharded.device_mesh, sharded.device_mesh.mesh_dim_names
    dims = [
        names[i] if names else "without a name"
        for i, placement in enumerate(sharded.placements)
        if not placement.is_replicate() and mesh.size(i) > 1
    ]
    return Part(sharded.to_local(), tuple(dims))


def _summed(tensor: Any) -> Any:
    """Sum the partial sums of a DTensor; any other tensor is returned as it is."""
    if not is_sharded(tensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


class WholeSums(TorchFunctionMode):
    """Within it each function of torch that sums over shards, as a norm, ends its sum.

    DTensor leaves the sum to the next function, and refuses it to one that writes in
    place, such as ``norm(p).clamp_()`` of an optimizer.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        return map_tensors(function(*args, **(kwargs or {})), _summed)
