"""Bytes by the allocator's own events: `torch.profiler`, while passes and steps run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from zbpp.runtime.chunk import Chunk
from zbpp.runtime.compiled.layers import Compiling
from zbpp.runtime.driver.compile_chunks import compiled_chunk
from zbpp.runtime.optim.rollback import DeferredStep
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import as_tensors, with_tensors

__all__ = ["Event", "Range", "measure_passes", "measure_step", "profiled", "within"]

Event = tuple[int, int]
"""Time, and bytes that were allocated or (below 0) freed."""
Range = tuple[str, int, int]
"""Name, begin and end of a `record_function`."""


def profiled() -> profile:
    """A profiler of the CPU's allocations."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def events_of(run: profile) -> tuple[list[Event], list[Range]]:
    """All allocations and all ranges of ours, in time."""
    found: Any = run.profiler
    memory, ranges = [], []
    for event in found.kineto_results.events():
        if event.name() == "[memory]":
            if event.device_type() == torch.autograd.DeviceType.CPU:
                memory.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith("job "):
            start = event.start_ns()
            ranges.append((event.name()[4:], start, start + event.duration_ns()))
    return sorted(memory), sorted(ranges, key=lambda one: one[1])


def within(
    memory: Sequence[Event], ranges: Sequence[Range]
) -> dict[str, tuple[int, int]]:
    """Of each range: what was left above its begin, and the most that there was."""
    found = {}
    for name, begin, end in ranges:
        held = most = 0
        for time, n_bytes in memory:
            if begin <= time <= end:
                held += n_bytes
                most = max(most, held)
        found[name] = held, most
    return found


@dataclass(frozen=True)
class Piece:
    """A chunk to measure: its layers, and what it reads."""

    layers: list[nn.Module]
    inputs: Any
    targets: Any
    is_first: bool
    is_last: bool
    compile: Compiling = False


def measure_passes(
    piece: Piece, loss_fn: Any, autocast: torch.dtype | None
) -> dict[str, tuple[int, int]]:
    """Run two micro-batches of one chunk and a BW; left and peak of each pass.

    A value that a pass reads is made inside its range, and what it gives is dropped
    there.
    """
    index = 0 if piece.is_first else 1
    chunk = Chunk(index, 0, tuple(piece.layers))
    stage = Stage(
        [compiled_chunk(chunk, piece.compile)],
        n_chunks=index + 1 if piece.is_last else index + 2,
        loss_fn=loss_fn,
        device=torch.device("cpu"),
        autocast=autocast,
    )
    n = 4
    stage.begin(
        step=0,
        inputs=[as_tensors(piece.inputs)] * n if piece.is_first else None,
        targets=[piece.targets] * n if piece.is_last else None,
        n_microbatches=n,
    )
    with profiled() as run:
        for i in range(n):
            _one(stage, index, i, piece, joint=i == n - 1)
    return within(*events_of(run))


def _one(stage: Stage, index: int, i: int, piece: Piece, *, joint: bool) -> None:
    with record_function(f"job F{i}"):
        x = None
        if not piece.is_first:
            given = as_tensors(piece.inputs)
            x = with_tensors(
                given,
                (t.detach().clone().requires_grad_(t.requires_grad) for t in given),
            )
            del given
        y = stage.forward(index, i, x)
        sent = [(t.shape, t.dtype) for t in y if t.requires_grad]
        del x, y
    with record_function(f"job {'BW' if joint else 'B'}{i}"):
        dy = None
        if not piece.is_last:
            dy = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in sent)
        backward = stage.backward if joint else stage.backward_input
        dx = backward(index, i, dy)
        del dx, dy
    if not joint:
        with record_function(f"job W{i}"):
            stage.backward_weight(index, i)


def measure_step(
    layers: Sequence[nn.Module], *, deferred: bool
) -> tuple[int, int, int]:
    """Step AdamW twice, plain or speculatively: state, copies, and peak."""
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(parameters)
    rollback = DeferredStep(optimizer)
    with profiled() as run:
        with record_function("job state"):
            optimizer.step()
        with record_function("job copies"):
            if deferred:
                rollback.take()
                rollback.undo()
        with record_function("job O"):
            if deferred:
                rollback.take()
            else:
                optimizer.step()
    found = within(*events_of(run))
    for p in parameters:
        p.grad = None
    return found["state"][0], found["copies"][0], found["O"][1]


def inputs_of(
    layers: Sequence[nn.Module], inputs: Any, autocast: torch.dtype | None
) -> list[Any]:
    """Inputs of each layer."""
    found: list[Any] = []
    value = inputs
    context = torch.autocast(
        "cpu", dtype=autocast or torch.bfloat16, enabled=bool(autocast)
    )
    with context:
        for layer in layers:
            found.append(_cut(value))
            value = layer(value)
    return found


def _cut(value: Any) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return map_tensors(value, cut)
