"""Memory that F, B and W of a chunk leave and need, by the allocator's own count.

On CPUs torch's profiler lists every allocation with what is held after it; on GPUs the
allocator knows what it holds, and the most that it held.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from zbpp.profiling.passes import PassTiming
from zbpp.runtime.support.devices import runs_ahead

__all__ = [
    "allocated_by",
    "is_out_of_memory",
    "measure_memory",
    "peak_held",
]

_WORDS = ("can't allocate memory", "out of memory", "not enough memory")


def measure_memory(
    timing: PassTiming, device: torch.device
) -> dict[int, dict[str, dict[str, float]]]:
    """Run every chunk once more and count.

    Returns:
        For each chunk "left" and "peak", each by kind of pass, in bytes.
    """
    chunk_memory: dict[int, dict[str, dict[str, float]]] = {}
    for chunk, jobs in timing.jobs().items():
        left, peak = {}, {}
        for kind, action in jobs:
            left[kind], peak[kind] = allocated_by(action, device)
        chunk_memory[chunk] = {"left": left, "peak": peak}
    return chunk_memory


def allocated_by(
    action: Callable[[], Any], device: torch.device
) -> tuple[float, float]:
    """Bytes that an action leaves (below 0: frees), and the most held inside it."""
    if runs_ahead(device):
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        action()
        torch.accelerator.synchronize(device)
        after = torch.accelerator.memory_allocated(device)
        return after - before, torch.accelerator.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        action()
    held = most = 0.0
    for event in events.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return held, most


def peak_held(device: torch.device) -> float | None:
    """Largest memory so far: of torch on its GPU, else resident; None: not known."""
    if runs_ahead(device):
        return float(torch.accelerator.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak * (1 if sys.platform == "darwin" else 1024))


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch's and Python's allocators raise when memory runs out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)
