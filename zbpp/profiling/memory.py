"""Bytes that F, B and W of a layer leave and need.

An accelerator's allocator counts them in a profile, and `zbpp.memory` on fake tensors.
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.values import Tensors, mapped

__all__ = [
    "Allocator",
    "PassBytes",
    "columns_of_bytes",
    "copied",
    "is_out_of_memory",
    "measure_bytes",
    "peak_held",
]

_WORDS = ("can't allocate memory", "out of memory", "not enough memory")


class PassBytes(NamedTuple):
    """Bytes of one layer's passes.

    Args:
        left: by F until B, without its input and output.
        left_input: the part of the input that stays until B.
        left_output: the same of the output.
        change_b: what B leaves, less what it frees.
        peak_f, peak_b, peak_w: most inside a pass above what was there before.
    """

    left: int
    left_input: int
    left_output: int
    change_b: int
    peak_f: int
    peak_b: int
    peak_w: int


class Counter(Protocol):
    """Counts the bytes that are allocated within it, and what is freed anywhere."""

    @property
    def now(self) -> int:
        """Bytes at present."""

    @property
    def most(self) -> int:
        """Most since `restart`."""

    def restart(self) -> int:
        """Begin a span: return `now`, above which `most` is measured."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


class Allocator(nullcontext[None]):
    """Counts by the allocator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @property
    def now(self) -> int:
        """Bytes at present."""
        gc.collect()  # graphs of earlier passes may be in circles
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.memory_allocated(self._device)

    @property
    def most(self) -> int:
        """Most since `restart`."""
        return torch.accelerator.max_memory_allocated(self._device)

    def restart(self) -> int:
        """Begin a span: return `now`, above which `most` is measured."""
        now = self.now
        torch.accelerator.reset_peak_memory_stats(self._device)
        return now


def measure_bytes(
    stage: Stage,
    index: int,
    microbatch: int,
    value: Tensors | None,
    counter: Counter,
    *,
    is_last: bool,
) -> tuple[PassBytes, Tensors]:
    """Run F, B and W of a layer that is a chunk of its own.

    Args:
        stage: has begun a step.
        index: of the chunk.
        microbatch: its number in the step.
        value: what it reads; None: the batch.
        counter: of bytes.
        is_last: the loss is a part of it.

    Returns:
        Its bytes, and a copy of its output on the host.
    """
    base = counter.restart()
    with counter:
        x = value and mapped(value, partial(_on, stage.device))
        size_x = counter.now - base
        y = stage.forward(index, microbatch, x)
        peak_f = counter.most - base
    output = mapped(y, partial(_on, torch.device("cpu")))
    with_both, x = counter.now, None
    with_output, y = counter.now, ()
    now = counter.now
    left_input = size_x - (with_both - with_output)
    left_output = max(0, sum(t.nbytes for t in output) - (with_output - now))
    left = now - base - left_input - left_output
    base = counter.restart()
    with counter, _on_this_thread():
        dy = (
            None
            if is_last
            else tuple(
                torch.zeros_like(t, device=stage.device)
                for t in output
                if t.requires_grad
            )
        )
        dx = stage.backward_input(index, microbatch, dy)
        peak_b = counter.most - base
        del dx, dy
    # the output is the next layer's input, which has its own B
    change_b = counter.now - base + left_output
    base = counter.restart()
    with counter, _on_this_thread():
        stage.backward_weight(index, microbatch)
        peak_w = counter.most - base
    return PassBytes(
        left, left_input, left_output, change_b, peak_f, peak_b, peak_w
    ), output


def _on_this_thread() -> AbstractContextManager[Any]:
    """Let no thread of autograd free tensors of a backward after it has returned."""
    return torch.autograd.set_multithreading_enabled(False)


def columns_of_bytes(
    layers: Sequence[PassBytes],
) -> Mapping[str, tuple[float, ...]]:
    """Columns of `zbpp.core.LayerCosts`; a cut shares the memory of its message."""
    inputs = [layers[0].left_input]
    for before, layer in pairwise(layers):
        inputs.append(max(before.left_output, layer.left_input))
    m_b = [max(0, x.left + left) for x, left in zip(layers, inputs, strict=True)]
    columns = {
        "m_b": m_b,
        "m_w": [max(0, m + x.change_b) for m, x in zip(m_b, layers, strict=True)],
        "peak_f": [x.peak_f for x in layers],
        "peak_b": [max(0, x.peak_b) for x in layers],
        "peak_w": [max(0, x.peak_w) for x in layers],
    }
    return {name: tuple(map(float, column)) for name, column in columns.items()}


def copied(tensors: Tensors) -> Tensors:
    """Copy tensors: a layer may change in place what it reads."""
    return mapped(tensors, lambda x: _on(x.device, x))


def _on(device: torch.device, x: Tensor) -> Tensor:
    return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)


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
