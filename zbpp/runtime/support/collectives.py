"""The backend that moves a device's tensors, and collectives that never end.

A collective breaks where another process has died or hangs. Torch has no class for
most of these errors, and their texts differ by place and version, so it counts where an
error was raised. A layer's own error is never taken for one.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbpp.core import RequestError

__all__ = [
    "BrokenCollective",
    "backend_of",
    "groups_kept",
    "is_broken",
    "noting_broken",
    "wire_of",
]

_RAISE_BROKEN = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
)
"""Modules of torch that begin collectives and wait for them, and do no more."""


class BrokenCollective(RuntimeError):
    """Another process has not ended a collective."""


@contextmanager
def noting_broken() -> Iterator[None]:
    """Within this, code only waits for collectives: an error says that one has broken.

    Raises:
        BrokenCollective: another process has not ended it.
    """
    try:
        yield
    except RuntimeError as error:
        raise BrokenCollective(str(error)) from error


def is_broken(error: RuntimeError) -> bool:
    """True for the error of a collective that another process has not ended."""
    if isinstance(error, (dist.DistError, BrokenCollective)):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if type(error) is not RuntimeError or not frames:
        return False
    innermost = frames[-1]
    module = innermost.f_globals.get("__name__")
    if module == "torch._ops":  # an operator: functional collectives wait in one
        return "c10d" in str(innermost.f_locals.get("self"))
    return module in _RAISE_BROKEN


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of what moves a device's tensors; a group may have several backends.

    NCCL, and what torch takes in its place for other accelerators, moves them on the
    device's streams. All else is treated as gloo is, which waits on the host.

    Raises:
        RequestError: the group has no backend for the device.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError as error:
        raise RequestError(
            f"the process group cannot move tensors of {device}: {error}; "
            "torch.distributed.init_process_group() without a backend can"
        ) from error
    name = str(backend.name())
    usual = dist.get_default_backend_for_device(device.type)
    return name if name == usual else "gloo"


def wire_of(backend: str, device: torch.device) -> torch.device:
    """Where tensors must be that a backend is to move for a device."""
    return torch.device("cpu") if backend == "gloo" else device


def groups_kept(module: nn.Module) -> dict[int, Any]:
    """A memo for a deep copy: it has the process groups of a module's parts as theirs.

    Layers keep the groups of their collectives, and a group cannot be copied.
    """
    return {
        id(value): value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, dist.ProcessGroup)
    }
