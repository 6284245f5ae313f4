"""Refuse wrappers and hooks of modules that would miss gradients of W."""

from collections.abc import Iterable

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.support.fsdp import is_unit
from zbpp.runtime.support.torch_internals import data_parallel, is_in_ddp


def check_module(
    module: nn.Module, name: str = "the module", *, on_mesh: bool = False
) -> None:
    """Refuse a module that would silently train on wrong gradients.

    `fully_shard` reduces a module's gradients at the end of its B, before W;
    `replicate` and DistributedDataParallel expect the gradients of one micro-batch
    after another. With `on_mesh` the pipeline itself reduces units of `fully_shard`,
    and of the `replicate` that works alike.
    """
    check_hooks(module.modules())
    wrapper = "DistributedDataParallel" if is_in_ddp() else None
    for path, part in module.named_modules():
        kind = data_parallel(part)
        if kind is not None and not (on_mesh and is_unit(part)):
            wrapper, name = kind, f"{name}.{path}" if path else name
            break
    if wrapper is None:
        return
    way = "split the bare module, and reduce its gradients after the last W"
    if on_mesh:
        way = (
            "give the bare layers and mesh=..., or wrap them by `replicate` of "
            "torch.distributed._composable.replicate_with_fsdp, or by `fully_shard`"
        )
    raise RequestError(
        f"{name} is wrapped by {wrapper}, which would miss weight gradients that are "
        f"computed in W; {way}"
    )


def check_hooks(modules: Iterable[nn.Module]) -> None:
    """Refuse deprecated backward hooks, which see one node of a graph only."""
    for module in modules:
        if module._is_full_backward_hook is False and module._backward_hooks:
            raise RequestError(
                f"a {type(module).__name__} has a hook of register_backward_hook(), "
                "which would miss the weight gradients that W computes; use "
                "register_full_backward_hook()"
            )
