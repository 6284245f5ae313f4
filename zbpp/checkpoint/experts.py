"""Plain experts, of which each process holds its own, as parts of what all hold.

A checkpoint has them whole, so that it fits any number of processes, and the model.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.support.sharded import is_sharded

__all__ = ["ExpertParts"]


class ExpertParts:
    """Plain experts as parts of the tensors that all processes along ``ep`` hold.

        layers.3.experts.up    ep 0 | experts 0, 1 |
                               ep 1 | experts 2, 3 |    whole: (4, ...)

    Args:
        experts: of this process, plain, or dealt out by `fully_shard`.
        mesh: of the processes that hold others; None: there are none.
    """

    def __init__(
        self, experts: Collection[Tensor] = (), mesh: DeviceMesh | None = None
    ) -> None:
        self._experts = experts
        self._mesh = mesh

    def joined(self, parameter: Tensor, value: Any) -> Any:
        """A view of a value as part of a DTensor; the value itself if it is none.

        Args:
            parameter: that it is, or is the state of.
            value: state as long as the parameter goes along with its experts.
        """
        if not self._is_part(parameter, value):
            return value
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        assert self._mesh is not None
        mesh = self._mesh
        n = mesh.size()
        placements: list[Any] = [Shard(0)]
        local = value.detach()
        if is_sharded(value):  # each ep's part is dealt out, not the whole
            dealt = [
                _StridedShard(0, split_factor=n) if placement.is_shard() else placement
                for placement in value.placements
            ]
            placements = [*dealt, *placements]
            mesh = DeviceMesh._concatenate([value.device_mesh, mesh])
            local = local.to_local()
        shape = torch.Size((n * value.shape[0], *value.shape[1:]))
        strides = torch.empty(shape, device="meta").stride()
        made: Tensor = DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=strides,
        )
        return made.requires_grad_(parameter.requires_grad and value is parameter)

    def _is_part(self, parameter: Tensor, value: Any) -> bool:
        if parameter not in self._experts or not isinstance(value, Tensor):
            return False
        return value.dim() > 0 and value.shape[0] == parameter.shape[0]
