"""Memory that F, B and W of a chunk leave and need, by the allocator's own count.

On CPUs torch's profiler lists every allocation with what is held after it; on GPUs the
allocator knows what it holds, and the most that it held.

Of a whole stage the parts are counted, to be told when memory runs out.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from zbpp.core import format_bytes
from zbpp.profiling.passes import PassTiming
from zbpp.runtime.executor import Executor
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import tensors_in

__all__ = [
    "Held",
    "account",
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
    found: dict[int, dict[str, dict[str, float]]] = {}
    for chunk, jobs in timing.jobs().items():
        left, peak = {}, {}
        for kind, action in jobs:
            left[kind], peak[kind] = allocated_by(action, device)
        found[chunk] = {"left": left, "peak": peak}
    return found


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
    return isinstance(error, RuntimeError) and any(one in text for one in _WORDS)


@dataclass(frozen=True)
class Held:
    """Bytes that one stage holds; ``total`` is that of the process on CPUs."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    total: float | None
    in_flight: int
    """Forwards whose backward is not done."""
    exact: bool
    """``total`` is the allocator's own, so that what is left over is known."""

    @property
    def known(self) -> int:
        """All parts together."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def each(self) -> float | None:
        """Bytes of one forward in flight, if that can be told."""
        if not self.exact or self.total is None or not self.in_flight:
            return None
        return max(0.0, self.total - self.known) / self.in_flight

    @property
    def text(self) -> str:
        """The parts, in words."""
        names = ("parameters", "gradients", "optimizer", "buffers")
        parts = [f"{name} {format_bytes(getattr(self, name))}" for name in names]
        flight = f"{self.in_flight} forward(s) in flight"
        if self.each is not None:
            flight += f" of {format_bytes(self.each)} each"
        whole = ""
        if self.total is not None:
            what = "held" if self.exact else "peak of the process, all in all,"
            whole = f"{what} {format_bytes(self.total)}: "
        return f"stage {self.stage} {whole}{', '.join(parts)}, {flight}"


def account(stage: int, executor: Executor) -> Held:
    """Count what a stage holds; shared memory counts once."""
    layers = [layer for _, layer in executor.stage.numbered()]
    optimizers = executor.optimizer.optimizers.all
    device = executor.stage.device
    on_gpu = runs_ahead(device)
    held = torch.accelerator.memory_allocated
    total = held(device) if on_gpu else peak_held(device)
    parameters = [p for layer in layers for p in layer.parameters()]
    return Held(
        stage=stage,
        parameters=_bytes(parameters),
        gradients=_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=_bytes(t for one in optimizers for t in tensors_in(dict(one.state))),
        buffers=_bytes(b for layer in layers for b in layer.buffers()),
        total=total,
        in_flight=executor.stage.n_in_flight,
        exact=on_gpu,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes = {id(t): t.nbytes for t in list(tensors)}
    return sum(sizes.values())
