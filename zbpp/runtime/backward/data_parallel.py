"""Wrappers of data parallelism, which do not see what W computes."""

from weakref import WeakSet

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.support.torch_internals import data_parallel, is_in_ddp

__all__ = ["check_module"]

_checked: WeakSet[nn.Module] = WeakSet()


def check_module(module: nn.Module, name: str = "the module") -> None:
    """Refuse what would train on wrong gradients, and say nothing.

    `fully_shard` reduces a module's gradients at the end of its B, so that those of W
    come too late; `replicate` and DistributedDataParallel expect the gradients of one
    micro-batch after another.

    Raises:
        RequestError: the module, or one inside, is wrapped by one of them.
    """
    wrapper = "DistributedDataParallel" if is_in_ddp() else None
    if module not in _checked:
        for path, part in module.named_modules():
            if (found := data_parallel(part)) is not None:
                wrapper, name = found, f"{name}.{path}" if path else name
                break
    if wrapper is not None:
        raise RequestError(
            f"{name} is wrapped by {wrapper}, which would miss weight gradients that "
            "are computed in W; split the bare module, and reduce its gradients over "
            "the replicas after the last W"
        )
    _checked.add(module)
