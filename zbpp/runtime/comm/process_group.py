"""Join the processes of a pipeline: device, process group, fresh store per restart."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbpp.core import RequestError

__all__ = ["asked_device", "initialise", "own_device", "place_in"]


def own_device() -> torch.device:
    """This process's GPU, or the CPU where the machine has too few GPUs or none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        return torch.device("cpu")
    return torch.device("cuda", local)


def asked_device(name: str) -> torch.device:
    """Return this process's device for ``--device``, a GPU with its index.

    To be asked before the process group is made: NCCL takes the current GPU. With
    ``cuda`` and too few GPUs, processes share them: slow, but a way to test.

    Args:
        name: "auto" (see `own_device`), "cpu" or "cuda".

    Raises:
        RequestError: there is no GPU, or torch is built without CUDA.
    """
    if name == "auto":
        return own_device()
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise RequestError("--device cuda: torch finds no GPU; see `zbpp doctor`")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


def place_in(
    group: dist.ProcessGroup | None,
) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return a pipeline's processes, this one's rank and their number.

    Args:
        group: None: all processes, or this one alone.
    """
    if not dist.is_initialized():
        return None, 0, 1
    group = group or dist.group.WORLD
    return group, dist.get_rank(group), dist.get_world_size(group)


def initialise(device: torch.device, *, timeout_s: float, store: Any = None) -> None:
    """Join torch.distributed, if a launcher's environment asks for it.

    Does nothing where the process group exists, or where this process is alone.

    Args:
        device: NCCL serves GPUs of their own, gloo everything else.
        timeout_s: for operations that have no time-out of their own.
        store: of `torch.distributed`, where the processes meet; None: torchrun's,
            under a name of its own for each restart, as the addresses of a dead
            attempt would be stale.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() or (n_processes == 1 and store is None):
        return
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        main_store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=n_processes,
            is_master=_serves_store(),
            timeout=timeout,
        )
        name = f"zbpp_attempt_{attempt}"
        store = dist.PrefixStore(name, main_store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend=_backend(device),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=n_processes,
        timeout=timeout,
    )


def _backend(device: torch.device) -> str:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and local <= torch.cuda.device_count():
        return "nccl"
    return "gloo"


def _serves_store() -> bool:
    """Torchrun's agent serves the store; by hand (python script.py) rank 0 does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    return os.environ["RANK"] == "0"


def use_loopback() -> None:
    """Let gloo talk over the loopback interface: all processes are on this machine."""
    name = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
