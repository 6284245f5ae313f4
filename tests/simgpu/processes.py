"""Runs in several processes, each with a simulated device, over a simulated NCCL."""

import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool import Pool

import simgpu
from simgpu.jobs import name_jobs

__all__ = ["Found", "SimulatedPool", "watched"]

DEFAULTS: dict[str, float] = {
    "queues": float(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "0")),
    "n_streams": 32,
    "n_running": 0,
    "patience_s": 30.0,
    "delay_s": 0.0,
    "fails_at": 0,
    "rendezvous": 1,
}
"""Settings of the device; what a run does not name is set back to these."""

_has_names = False


class SimulatedPool(Pool):
    """A pool of processes with a simulated device each; zbpp finds NCCL."""

    def __init__(self) -> None:
        super().__init__(["simgpu"], device="cuda:0", prepare=prepare)

    def explain(self, folder: Path) -> list[str]:
        """Name what each host and stream of processes that are stuck waits for."""
        return [
            line
            for file in sorted(folder.glob("stuck_*.json"))
            for line in waits_in(
                file.stem.removeprefix("stuck_"), json.loads(file.read_text("utf-8"))
            )
        ]


def waits_in(rank: str, state: dict[str, Any]) -> list[str]:
    """Lines for the hosts of a rank, and for the first operations of its streams."""
    hosts = [
        f"rank {rank}: the host waits in [{host['label']}] for {host['what']}"
        for host in state["hosts"]
    ]
    heads = [(x["id"], x["operations"][0]) for x in state["streams"] if x["operations"]]
    return hosts + [
        f"rank {rank}, stream {stream}: {head['name']} in [{head['label']}] "
        + ("is under way" if head["started"] else "has not started")
        for stream, head in heads
    ]


def prepare(folder: str, rank: int, n: int) -> None:
    """Let this process be a rank, with its messages in a folder."""
    global _has_names
    simgpu.use_processes(folder, rank, n)
    if not _has_names:
        name_jobs()
        _has_names = True


@dataclass(frozen=True)
class Found:
    """What a function returned on a rank, and what the device has seen meanwhile."""

    value: Any
    reports: list[str]
    counts: dict[str, int]
    digest: int


def watched(
    function: Callable[..., Any],
    *args: Any,
    policy: str = "lazy",
    seed: int = 0,
    **settings: float,
) -> Found:
    """Call a function on the device in a fresh state, with some settings."""
    simgpu.begin(policy, seed, **(DEFAULTS | settings))
    value = function(*args)
    gc.collect()
    simgpu.native.synchronize()
    return Found(value, simgpu.reports(), simgpu.counts(), simgpu.digest())
