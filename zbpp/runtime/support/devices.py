"""The available devices, and whether they run ahead of the host.

    host    a b c ...            issues kernels and continues
    device    a   b   c ...      computes them behind it, in streams that events order

A torch has one accelerator, which `torch.accelerator` and `torch.get_device_module`
serve under the same names whatever it is: CUDA, XPU, an NPU. Everything else asks here,
and names no kind of device.
"""

import os

import torch

from zbpp.core import RequestError

_HAVE_NO_STREAMS = ("cpu", "meta", "mps")
"""Torch makes no streams for Metal, so it is run as a CPU is: by plain copies."""

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def built_for() -> str | None:
    """Kind of the accelerator that this torch is built for, as ``"cuda"``; or None."""
    built = torch.accelerator.current_accelerator()
    return None if built is None or built.type in _HAVE_NO_STREAMS else built.type


def accelerator() -> str | None:
    """Kind of the accelerator that this torch finds; None: there is none."""
    kind = built_for()
    return kind if kind is not None and torch.accelerator.is_available() else None


def runs_ahead(device: torch.device) -> bool:
    """True if the host continues while the device computes.

    It then has streams, events, a generator and an allocator, and host
    memory is pinned for it.
    """
    return device.type != "cpu" and device.type == built_for()


def is_missing(device: torch.device) -> bool:
    """True for an accelerator that torch does not find."""
    return device.type not in _HAVE_NO_STREAMS and device.type != accelerator()


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch's and Python's allocators raise when memory runs out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(x in text for x in _OUT_OF_MEMORY)


def device_name(device: torch.device) -> str:
    """Name of the product; of the kind, where that is all that torch knows."""
    if not runs_ahead(device):
        return device.type
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_name"):
        return device.type
    return str(module.get_device_name(device))


def check_kind(name: str, *, auto: bool = True) -> None:
    """Refuse a kind of device that torch does not know, or one with a number.

    A run asks later whether it is there.
    """
    if auto and name == "auto":
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "meta" or device.index is not None:
        choices = f"{'auto, ' * auto}cpu, cuda or another accelerator that torch knows"
        raise RequestError(f"--device {name}: choose {choices}, without a number")


def own_device(asked: torch.device | str | None = None) -> torch.device:
    """Return this process's device, a GPU with its index.

    To be asked before the process group is made: NCCL takes the current GPU. It is the
    one that the script has made current, else that of ``LOCAL_RANK`` among those that
    the process sees: Slurm and Ray show each process one device, as number 0. Where
    processes see fewer GPUs than they need, they share them. Without a kind it is the
    CPU where there is no accelerator.
    """
    device = torch.device(asked or accelerator() or "cpu")
    if device.index is not None:
        return device
    if is_missing(device):
        raise RequestError(f"device {device}: torch finds none here; see `zbpp doctor`")
    if not runs_ahead(device):
        return device
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    if torch.get_device_module(device).is_initialized():
        index = torch.accelerator.current_device_index() or index
    return torch.device(device.type, index)


def asked_device(name: str) -> torch.device:
    """Return this process's device for ``--device``: auto, cpu or another kind."""
    check_kind(name)
    return own_device(None if name == "auto" else name)
