"""Join the processes of a pipeline: process group, fresh store per restart."""

import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbpp.runtime.support.devices import make_current, unique_name
from zbpp.runtime.support.errors import PeerError

__all__ = [
    "backend_for",
    "call_roll",
    "initialise",
    "place_in",
]

_log = logging.getLogger("zbpp")


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
    make_current(device)
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() or (n_processes == 1 and store is None):
        return
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_s)
    store = store or _launchers_store(n_processes, timeout)
    gpus = call_roll(store, rank, n_processes, unique_name(device), timeout_s)
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
