"""Sleeping layers for the times of chunks, or for those of layers.

A message that occupies its sender does so at the end of its pass: the layers sleep for
that too, the last one in F and the first one in B.
"""

from collections.abc import Mapping

from torch import nn

from zbpp.core import ChunkCosts, LayerCosts
from zbpp.emulation.layers import EmulatedLayer

__all__ = ["sleeping_chunks", "sleeping_layers"]


def sleeping_chunks(times: ChunkCosts, chunks: range) -> list[nn.Module]:
    """Make one layer a chunk; a stage's first one carries its optimizer's time."""
    layers: list[nn.Module] = []
    for chunk in chunks:
        stage = times.placement.stage_of[chunk]
        first = times.placement.chunks_of[stage][0]
        layer = EmulatedLayer(
            times.f[chunk] / 1e3,
            times.b[chunk] / 1e3,
            times.w[chunk] / 1e3,
            step_s=times.optimizer[stage] / 1e3 if chunk == first else 0.0,
        )
        layers.append(layer)
    return layers


def sleeping_layers(
    costs: LayerCosts, sends: Mapping[int, float], own: range
) -> list[nn.Module]:
    """Make layers that sleep for their own times; the last one also for the loss.

    ``sends``: for how long a message in front of these layers occupies its sender.
    """
    forward, backward = sends.get(own.stop, 0.0), sends.get(own.start, 0.0)
    f, b, w, optimizer = map(costs.of, ("f", "b", "w", "optimizer"))
    loss = [0.0] * (costs.n_layers - 1) + [costs.loss]
    return [
        EmulatedLayer(
            (f[i] + loss[i] + (forward if i == own[-1] else 0.0)) / 1e3,
            (b[i] + (backward if i == own[0] else 0.0)) / 1e3,
            w[i] / 1e3,
            step_s=optimizer[i] / 1e3,
        )
        for i in own
    ]
