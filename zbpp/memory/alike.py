"""Layers that are alike take the same memory: they are traced once.

Two layers are alike if their modules have the same types, tensors of the same sizes and
equal attributes. What cannot be compared makes a layer unlike all others, which costs
time and is never wrong. An attribute with a layer's own number (``layer_idx`` and the
like) is no difference: models use it for names and caches.
"""

from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["classes_of", "shortened"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_OPAQUE = (type, FunctionType, BuiltinFunctionType, Enum)
_OWN = {"_parameters", "_buffers", "_modules"}
_OWN_NUMBER = {"layer_idx", "layer_index", "layer_id", "layer_number"}
_MOST_PERIOD = 8
_KEPT = 3
"""A first, a middle and a last one of a run of layers that are alike."""


def classes_of(layers: Sequence[nn.Module]) -> list[int]:
    """Number layers so that those with the same number are alike."""
    uses: dict[int, int] = {}
    for layer in layers:
        for parameter in layer.parameters():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    numbers: dict[Any, int] = {}
    same: dict[int, int] = {}
    classes = []
    for index, layer in enumerate(layers):
        if id(layer) not in same:
            signature = _signature(layer, index, uses)
            same[id(layer)] = numbers.setdefault(signature, len(numbers))
        classes.append(same[id(layer)])
    return classes


def _signature(layer: nn.Module, index: int, uses: dict[int, int]) -> Any:
    parts: list[Any] = []
    for path, module in layer.named_modules():
        tensors = [
            (name, _of_tensor(tensor, uses))
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
        ]
        values = [
            (name, _of_value(value - index if _is_number(name, value) else value, []))
            for name, value in sorted(vars(module).items())
            if name not in _OWN and name not in getattr(module, "place_attributes", ())
        ]
        parts.append((path, type(module), tuple(tensors), tuple(values)))
    return tuple(parts)


def _of_tensor(tensor: Tensor | None, uses: dict[int, int] | None = None) -> Any:
    if tensor is None:
        return None
    shared = uses is not None and uses.get(id(tensor), 0) > 1
    return (
        tuple(tensor.shape),
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
        type(tensor).__name__,
        str(tensor.layout),
        str(getattr(tensor, "placements", None)),  # of a sharded one
        id(tensor) if shared else 0,
    )


def _is_number(name: str, value: Any) -> bool:
    return name in _OWN_NUMBER and type(value) is int


def _of_value(value: Any, seen: list[int]) -> Any:
    """Something hashable, equal for values that mean the same."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _OPAQUE):
        return id(value)
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if id(value) in seen:
        return "above"
    inside = [*seen, id(value)]
    if isinstance(value, list | tuple):
        return (type(value), *(_of_value(item, inside) for item in value))
    if isinstance(value, dict):
        items = ((k, _of_value(v, inside)) for k, v in value.items())
        return (type(value), *((_of_value(k, inside), v) for k, v in items))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(_of_value(item, inside) for item in value))
    if hasattr(value, "__func__"):  # a method: of a module or an object
        return (id(value.__func__), _of_value(value.__self__, inside))
    if isinstance(value, nn.Module):
        return type(value)
    return (type(value), id(value))


def shortened(classes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Keep three of every run of alike layers, or groups of layers.

    Returns:
        The layers to trace, and for each layer of the whole the place of the one that
        stands for it.

    >>> shortened([0, 1, 1, 1, 1, 1, 2])
    ([0, 1, 2, 5, 6], [0, 1, 2, 2, 2, 3, 4])
    """
    kept: list[int] = []
    stands: list[int] = []
    first = 0
    while first < len(classes):
        period, n = _longest_run(classes, first)
        for repeat in range(n):
            if n <= _KEPT or repeat < _KEPT - 1 or repeat == n - 1:
                place = len(kept)
                kept += range(first + repeat * period, first + (repeat + 1) * period)
            elif repeat < n - 1:
                place = len(kept) - period
            stands += range(place, place + period)
        first += n * period
    return kept, stands


def _longest_run(classes: Sequence[int], first: int) -> tuple[int, int]:
    """Period and number of repeats of the group that begins here and saves most."""
    best = (1, 1)
    saved = 0
    for period in range(1, _MOST_PERIOD + 1):
        group = list(classes[first : first + period])
        if len(group) < period:
            break
        n = 1
        while list(classes[first + n * period : first + (n + 1) * period]) == group:
            n += 1
        if (n - _KEPT) * period > saved:
            best, saved = (period, n), (n - _KEPT) * period
    return best
