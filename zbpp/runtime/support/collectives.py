"""Collectives that never end.

A collective breaks where another process has died or hangs. Torch has no class for
most of these errors, and their texts differ by place and version, so it counts where an
error was raised. An error of a layer is never taken for one.
"""

import traceback
from typing import Any

import torch.distributed as dist
from torch import nn

_RAISE_BROKEN = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
)
"""Modules of torch that begin collectives and wait for them, and do no more."""


def is_broken(error: RuntimeError) -> bool:
    """True for the error of a collective that another process has not ended."""
    if isinstance(error, dist.DistError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if type(error) is not RuntimeError or not frames:
        return False
    innermost = frames[-1]
    module = innermost.f_globals.get("__name__")
    if module == "torch._ops":  # an operator: functional collectives wait in one
        return "c10d" in str(innermost.f_locals.get("self"))
    return module in _RAISE_BROKEN


def groups_kept(module: nn.Module) -> dict[int, Any]:
    """A memo with which a deep copy of a module shares its process groups.

    Layers keep the groups of their collectives, and a group cannot be copied.
    """
    return {
        id(value): value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, dist.ProcessGroup)
    }
