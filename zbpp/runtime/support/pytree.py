"""Tensors in tuples, lists and dicts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(
    thing: Any,
    change: Callable[[Tensor], Tensor],
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """The same thing with its tensors changed, in tuples, lists and dicts too.

    Args:
        thing: anything.
        change: called with every tensor.
        other: called with whatever else is not a tuple, list or dict; None: it stays.
    """
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, dict):
        return {key: map_tensors(value, change, other) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        items = [map_tensors(item, change, other) for item in thing]
        return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    return thing if other is None else other(thing)


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors in a thing, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(thing, note)
    return found
