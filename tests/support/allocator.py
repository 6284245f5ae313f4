"""Estimates of a chunk's passes beside the allocator's own events."""

from collections.abc import Callable
from typing import Any

import torch
from memory_events import Piece, inputs_of, measure_passes
from torch import Tensor, nn

from zbpp.core import PassKind
from zbpp.memory.layers import model_memory
from zbpp.memory.passes import ChunkPasses

Parts = tuple[list[nn.Module], tuple[Any, Any], Callable[..., Tensor]]

SMALL = 2**16
"""Bytes that are no error: random states of checkpoints, small scratch memory."""


def worst(
    parts: Parts,
    own: range,
    autocast: torch.dtype | None = None,
    *,
    small: int = SMALL,
    runs: int = 1,
) -> tuple[float, ChunkPasses]:
    """Largest error of left and peak, as a share of what the chunk holds then.

    So ``small`` an error is none. Each pass is measured in the best of some runs, as
    threads of the network may hold a tensor for a moment longer.
    """
    layers, batch, loss_fn = parts
    memory = model_memory(layers, batch, loss_fn, autocast=autocast)
    chunk = memory.chunk(own)
    inputs = inputs_of(layers, batch[0], autocast)
    is_last = own.stop == len(layers)
    targets = batch[1] if is_last else None
    mine = layers[own.start : own.stop]
    piece = Piece(mine, inputs[own.start], targets, own.start == 0, is_last)
    found = [measure_passes(piece, loss_fn, autocast) for _ in range(runs)]
    m_b, m_w, made = chunk.m_b, chunk.m_w, chunk.gradients
    rows = [
        ("F2", (m_b, chunk.peak(PassKind.F)), made),
        ("B2", (m_w - m_b, chunk.peak(PassKind.B)), made + m_b),
        ("W2", (-m_w, chunk.peak(PassKind.W)), made + m_w),
        ("BW3", (-m_b, chunk.peak(PassKind.BW)), made + m_b),
    ]
    errors = [
        min(
            max(0, abs(a - real[job][i]) - small) / (held + real[job][i])
            for real in found
        )
        for job, estimated, held in rows
        for i, a in enumerate(estimated)
    ]
    return max(errors), chunk
