"""CUDA graphs: the kernels of a function, launched by one call ever after.

A graph reads and writes the memory that its first run had. What it needs between its
kernels lies in a pool, which it shares with those that always run after it in turn.
Only CUDA's are made: other accelerators run their passes without
(`torch.accelerator.Graph` has not been tried).
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

__all__ = ["DevicePool", "MakePool", "Pool", "pools_on"]


class Pool(Protocol):
    """Memory of graphs that always run one after the other, in the same order."""

    def record(self, action: Callable[[], None]) -> Callable[[], None]:
        """Record what an action launches, without running it; return what runs it.

        Raises:
            RuntimeError: it does what no graph can, such as waiting for the device.
        """


MakePool = Callable[[], Pool]


class DevicePool:
    """A pool of a GPU.

    Args:
        stream: records; autograd runs a backward on the stream of its forward, so all
            pools have the same one.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, action: Callable[[], None]) -> Callable[[], None]:
        """See `Pool`. Other threads may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
        ):
            action()
        return graph.replay


def pools_on(device: torch.device) -> MakePool | None:
    """Return what makes the pools of one stage; None: the device has no graphs.

    Libraries keep scratch memory for each stream. So stages that compute side by side
    must not record on the same one.
    """
    if device.type != "cuda":
        return None
    return partial(DevicePool, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
