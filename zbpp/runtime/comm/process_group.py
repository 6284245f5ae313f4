"""Join the processes of a pipeline."""

import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbpp.runtime.support.devices import make_current, runs_ahead
from zbpp.runtime.support.errors import PeerError

_log = logging.getLogger("zbpp")

__all__ = ["initialise", "use_loopback"]


def initialise(device: torch.device, *, timeout_s: float, store: Any = None) -> None:
    """Join torch.distributed, if a launcher's environment asks for it.

    Does nothing where the process group exists, or where this process is alone.

    Args:
        device: of this process. NCCL and its likes serve accelerators, gloo the CPU
            and accelerators that processes share.
        timeout_s: how long to wait for the other processes, and for operations that
            have no time-out of their own.
        store: of `torch.distributed`, where the processes meet; None: the launcher's.

    Raises:
        PeerError: a process has not come.
    """
    make_current(device)
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() or (n_processes == 1 and store is None):
        return
    rank = int(os.environ["RANK"])
    place: dict[str, Any] = {}
    if store is not None:
        place = {"store": store, "rank": rank, "world_size": n_processes}
    backend = "gloo"
    if runs_ahead(device) and not _share_devices():
        backend = str(dist.get_default_backend_for_device(device.type))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **place)
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank} does not reach the others at the start: {error}"
        ) from error


def _share_devices() -> bool:
    """True if more processes than devices are on this machine: NCCL refuses that."""
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    n_devices = torch.accelerator.device_count()
    if n_processes > n_devices:
        _log.warning(
            "%d processes share %d GPUs: messages go through host memory; start as "
            "many processes as there are GPUs",
            n_processes,
            n_devices,
        )
    return n_processes > n_devices


def use_loopback() -> None:
    """Let gloo talk over the loopback interface: all processes are on this machine."""
    name = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
