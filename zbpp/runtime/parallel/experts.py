"""Experts: parameters of which each process along ``ep`` has a part, as DTensors.

    layers.3.router            equal on all processes    summed over dp x cp x ep
    layers.3.experts.up (ep 0) experts 0 .. E/2 - 1      summed over dp x cp
    layers.3.experts.up (ep 1) experts E/2 .. E - 1      summed over dp x cp

The layers move tokens to their experts.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.comm.place import EXPERT_DIM
from zbpp.runtime.support.sharded import is_sharded, local_part


def deal(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module's parameters over a mesh, each along its first dimension.

        zbpp.deal(layer.mlp.experts, mesh["ep"])

    They are DTensors from then on, under their names: norms, sums, shards and
    checkpoints know by themselves what they are. In a forward of the module that has
    them ``self.weight`` is a plain tensor, the part of this process.

    Args:
        module: of experts, with those of all processes; the first process's count.
        mesh: of one dimension.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for part in module.modules():
        names = [name for name, _ in part.named_parameters(recurse=False)]
        for name in names:
            p = part._parameters[name]
            assert p is not None
            sharded = distribute_tensor(p.detach(), mesh, [Shard(0)])
            part.register_parameter(
                name, nn.Parameter(sharded, requires_grad=p.requires_grad)
            )
        if names:
            hooks = _LocalParts(names)
            part.register_forward_pre_hook(hooks.show)
            part.register_forward_hook(hooks.hide, always_call=True)


class _LocalParts:
    """Hooks of a forward, in which parameters are this process's part of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def show(self, module: Any, _: object) -> None:
        for name in self._names:
            vars(module)[name] = module._parameters[name].to_local()

    def hide(self, module: Any, *_: object) -> None:
        for name in self._names:
            vars(module).pop(name, None)


def experts_in(layer: nn.Module) -> set[nn.Parameter]:
    """The parameters of a bare layer that are sharded along ``ep``."""
    return {p for p in layer.parameters() if EXPERT_DIM in local_part(p).names}


def mesh_dims(p: Tensor) -> Sequence[str]:
    """Dimensions of a DTensor's mesh: its gradient's placements name the sums."""
    sharded: Any = p
    return (sharded.device_mesh.mesh_dim_names or ()) if is_sharded(p) else ()
