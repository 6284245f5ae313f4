"""Floating-point operations of the layers' forwards, counted on fake tensors."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from zbpp.memory.fake import FakeModel, reading_fakes

__all__ = ["layer_operations"]


def layer_operations(fake: FakeModel) -> list[float]:
    """Operations of each layer's forward of one micro-batch: matrix products.

    A multiplication and an addition count as two. The input gradient of a product takes
    as many operations as the product, and so does its weight gradient.
    """
    found: list[float] = []
    value: Any = fake.inputs
    with fake.mode, torch.no_grad(), reading_fakes():
        for layer in fake.layers:
            with FlopCounterMode(display=False) as counter:
                value = layer(value)
            found.append(float(counter.get_total_flops()))
    return found
