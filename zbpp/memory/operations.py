"""Floating-point operations of the layers' forwards, counted on fake tensors."""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zbpp.memory.fake import FakeModel
from zbpp.memory.trace import UNKNOWN, UnknownNumbers, tensors_of
from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.support.pytree import tensors_in

__all__ = ["layer_operations"]


def _attention(q: Any, k: Any, v: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _grouped(rows: Any, weights: Any, *_: object, **__: object) -> int:
    """Products of a group each: every row with the weights of its own."""
    return int(2 * prod(rows) * weights[-1])


_FORMULAS = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_grouped_mm": _grouped,
}
_MORE: dict[Any, Any] = {
    getattr(torch.ops.aten, name): formula
    for name, formula in _FORMULAS.items()
    if hasattr(torch.ops.aten, name)
}
"""Operators that torch's counter has no formula for: of shapes."""


def layer_operations(fake: FakeModel) -> list[float]:
    """Operations of each layer's forward of one micro-batch: matrix products.

    A multiplication and an addition count as two. The input gradient of a product takes
    as many operations as the product, and so does its weight gradient.

    Raises:
        UnknownNumbers: a layer decides by numbers that are not known.
    """
    operations: list[float] = []
    tracker = StorageTracker()
    value: Any = fake.inputs
    with fake.mode, torch.no_grad():
        tracker.ignore([*tensors_of(fake.layers), *tensors_in(fake.inputs)])
        with tracker:
            for place, layer in enumerate(fake.layers):
                try:
                    with FlopCounterMode(
                        display=False, custom_mapping=_MORE
                    ) as counter:
                        value = layer(value)
                except UNKNOWN as error:
                    raise UnknownNumbers(place, str(error)) from error
                operations.append(float(counter.get_total_flops()))
    return operations
