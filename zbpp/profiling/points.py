"""Parts of the layers' passes: communication as long as alone, and what computes.

    F of a layer, alone   2.0 | 1.0 | 2.0 | 1.0 | 0.2    computes, communicates, ...
    F in a step, 6.6      2.2 | 1.0 | 2.2 | 1.0 | 0.2    its parts

In a step a pass takes longer than alone for what the host does beside it, or for layers
that are recomputed, and shorter by the cut of the graph. All that computes.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle

from zbpp.core import Lane, Parts
from zbpp.core.costs.parts import PartTimes, merged

__all__ = ["layer_parts"]


def layer_parts(
    alone: Sequence[Mapping[str, Sequence[float]]],
    times: Mapping[str, Sequence[float]],
    loss: float,
) -> tuple[Parts, ...] | None:
    """Parts of all layers; None if none of them communicates.

    Args:
        alone: what F and B of each layer compute, communicate, compute, ... alone, with
            the loss at the end of the last F.
        times: of ``f``, ``b`` and ``w`` of each layer in a step.
        loss: time of the loss, on top of the last F.
    """
    if all(len(lengths) == 1 for each in alone for lengths in each.values()):
        return None
    losses = [0.0] * (len(alone) - 1) + [loss]
    rows = zip(alone, times["f"], times["b"], times["w"], losses, strict=True)
    return tuple(
        Parts(_fitted(x["F"], f, at_end), _fitted(x["B"], b), ((Lane.COMPUTE, w),))
        for x, f, b, w, at_end in rows
    )


def _fitted(lengths: Sequence[float], time: float, loss: float = 0.0) -> PartTimes:
    """Scale what computes so that a pass takes a time, with its loss taken off."""
    fitted = list(lengths)
    if len(fitted) % 2:
        fitted[-1] = max(0.0, fitted[-1] - loss)
    on_network = min(sum(fitted[1::2]), time)
    fitted[1::2] = _scaled(fitted[1::2], on_network)
    fitted[::2] = _scaled(fitted[::2], time - on_network)
    return merged(zip(cycle((Lane.COMPUTE, Lane.NETWORK)), fitted, strict=False))


def _scaled(lengths: Sequence[float], total: float) -> list[float]:
    """Scale lengths to a sum; equal ones if there is nothing to go by."""
    whole = sum(lengths)
    if not whole:
        return [total / len(lengths)] * len(lengths) if lengths else []
    return [total * length / whole for length in lengths]
