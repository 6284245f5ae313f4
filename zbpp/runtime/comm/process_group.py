"""Join the processes of a pipeline."""

import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.errors import PeerError

_log = logging.getLogger("zbpp")


def initialise(device: torch.device, *, timeout_s: float) -> None:
    """Join torch.distributed, if the environment of a launcher asks for it.

    Does nothing where the process group exists, or where this process is alone. NCCL
    and its likes serve accelerators, gloo CPUs and accelerators that processes share.
    The time-out is also that of operations without another one.
    """
    if runs_ahead(device) and device.index is not None:
        torch.accelerator.set_device_index(device)  # NCCL takes the current one
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    backend = "gloo"
    if runs_ahead(device):
        n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        n_devices = torch.accelerator.device_count()
        if n_processes <= n_devices:
            backend = dist.get_default_backend_for_device(device.type)
        else:
            _log.warning(
                "%d processes share %d GPUs: messages go through host memory; start "
                "as many processes as there are GPUs",
                n_processes,
                n_devices,
            )
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerError(
            f"rank {os.environ['RANK']} does not reach the others at the start: {error}"
        ) from error


def use_loopback() -> None:
    """Let gloo talk over the loopback interface: all processes are on this machine."""
    name = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
