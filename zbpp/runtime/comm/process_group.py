"""Join the processes of a pipeline: device, process group, fresh store per restart."""

import logging
import os
import platform
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbpp.core import RequestError
from zbpp.runtime.support.devices import accelerator, check_kind, is_missing, runs_ahead
from zbpp.runtime.support.errors import PeerError

__all__ = [
    "asked_device",
    "backend_for",
    "call_roll",
    "initialise",
    "own_device",
    "place_in",
]

_log = logging.getLogger("zbpp")


def own_device(asked: torch.device | str | None = None) -> torch.device:
    """Return this process's device, a GPU with its index.

    To be asked before the process group is made: NCCL takes the current GPU. It is the
    one that the script has made current, else that of ``LOCAL_RANK`` among those that
    the process sees: Slurm and Ray show each process its own alone, as number 0. Where
    processes see fewer GPUs than they need, they share them.

    Args:
        asked: ``"cuda"``, or another accelerator's kind, is this process's one; None:
            that, or the CPU where there is none.

    Raises:
        RequestError: torch finds no such device, or is built without it.
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
    """Return this process's device for ``--device``.

    Args:
        name: "auto", "cpu" or an accelerator's kind; see `own_device`.

    Raises:
        RequestError: torch finds no such device, or is built without it.
    """
    check_kind(name)
    return own_device(None if name == "auto" else name)


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
        device: NCCL and its likes serve devices of their own, gloo everything else.
        timeout_s: how long to wait for the other processes, and for operations that
            have no time-out of their own.
        store: of `torch.distributed`, where the processes meet; None: torchrun's,
            under a name of its own for each restart, as the addresses of a dead
            attempt would be stale.

    Raises:
        PeerError: a process has not come.
    """
    if runs_ahead(device) and device.index is not None:
        torch.accelerator.set_device_index(device)
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() or (n_processes == 1 and store is None):
        return
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_s)
    store = store or _launchers_store(n_processes, timeout)
    gpus = call_roll(store, rank, n_processes, _gpu_name(device), timeout_s)
    try:
        dist.init_process_group(
            backend=backend_for(gpus, device.type),
            store=store,
            rank=rank,
            world_size=n_processes,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank} does not reach the others at the start: {error}"
        ) from error


def _launchers_store(n_processes: int, timeout: timedelta) -> Any:
    """The store that torchrun or rank 0 serves, under a name for this attempt."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    main_store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=n_processes,
        is_master=_serves_store(),
        timeout=timeout,
        wait_for_workers=False,  # `call_roll` does, and names those that do not come
    )
    name = f"zbpp_attempt_{attempt}"
    return dist.PrefixStore(name, main_store)  # type: ignore[attr-defined]


def call_roll(
    store: Any, rank: int, n_processes: int, gpu: str, timeout_s: float
) -> list[str]:
    """Wait until all processes have come to the store; all must call.

    Args:
        store: where they meet.
        rank: of this process.
        n_processes: how many must come.
        gpu: name of this process's; empty: it has none.
        timeout_s: how long to wait for the others.

    Returns:
        The names of all processes' GPUs, by rank.

    Raises:
        PeerError: a process has not come; it is named.
    """
    keys = [f"gpu_of_{number}" for number in range(n_processes)]
    store.set(keys[rank], gpu)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        plural = "s" * (len(missing) > 1)
        raise PeerError(
            f"rank {rank} waits at the start for rank{plural} "
            f"{', '.join(map(str, missing))}: no answer in {timeout_s:g} s"
        ) from error
    return [store.get(key).decode() for key in keys]


def backend_for(gpus: Sequence[str], kind: str) -> str:
    """Return NCCL's name where each process has a GPU of its own, else gloo's.

    Args:
        gpus: names of the processes' GPUs; empty: a process has none.
        kind: of the GPUs; torch takes other backends than NCCL for some.

    >>> backend_for(["GPU-1a", "GPU-2b"], "cuda")
    'nccl'
    >>> backend_for(["GPU-1a", "GPU-1a"], "cuda"), backend_for(["1a", "2b"], "xpu")
    ('gloo', 'xccl')
    """
    if "" in gpus:
        return "gloo"
    if len(set(gpus)) < len(gpus):
        _log.warning(
            "%d processes share %d GPUs: messages go through host memory; start as "
            "many processes as there are GPUs",
            len(gpus),
            len(set(gpus)),
        )
        return "gloo"
    return str(dist.get_default_backend_for_device(kind))


def _gpu_name(device: torch.device) -> str:
    """Its own on every machine: CUDA and XPU have a UUID, which holds also where each
    process sees its own device alone, as number 0."""
    if not runs_ahead(device):
        return ""
    about = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(about, "uuid", f"{platform.node()} {device}"))


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
