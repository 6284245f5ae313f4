"""Parts of what a stage holds when memory runs out."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zbpp.core import format_bytes
from zbpp.profiling.memory import peak_held
from zbpp.runtime.executor import Executor
from zbpp.runtime.support.pytree import tensors_in

__all__ = ["Held", "account", "is_out_of_memory"]

_WORDS = ("can't allocate memory", "out of memory", "not enough memory")


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
    on_gpu = device.type == "cuda"
    parameters = [p for layer in layers for p in layer.parameters()]
    return Held(
        stage=stage,
        parameters=_bytes(parameters),
        gradients=_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=_bytes(t for one in optimizers for t in tensors_in(dict(one.state))),
        buffers=_bytes(b for layer in layers for b in layer.buffers()),
        total=torch.cuda.memory_allocated(device) if on_gpu else peak_held(device),
        in_flight=executor.stage.n_in_flight,
        exact=on_gpu,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes = {id(t): t.nbytes for t in list(tensors)}
    return sum(sizes.values())
