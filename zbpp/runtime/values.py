"""Values between chunks: their tensors in order, and the structure around them.

    value       {"h": h, "mask": m, "cache": None, "router": (r0, h)}
    tensors     (h, m, r0)
    structure   containers    torch's TreeSpec of the value
                entries       0, 1, None, 2, 0: the place of each leaf's tensor, or a
                              constant

Containers are what torch's pytree knows (`zbpp.runtime.support.pytree`). A tensor, and
a tuple of several, have no structure.

What crosses a cut is contiguous and complete, in one process and between many: a
strided tensor is copied, and an input that has no influence on the loss gets a gradient
of zeros. A tensor that a value contains twice travels once, and is one tensor for its
reader too: two copies would have two sums of gradients, which are rounded apart.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.support.pytree import KNOWN, TreeSpec, flatten_tree, unflatten_tree
from zbpp.runtime.support.torch_internals import arrived

Tensors = tuple[Tensor, ...]
"""Value handed from chunk to chunk, or a micro-batch: one tensor or several."""

_PLAIN = {type(None), bool, int, float, str}


class _Constant(NamedTuple):
    """A leaf that is no tensor; its class tells 1 from True."""

    kind: type
    value: Any


class Structure(NamedTuple):
    """The rest of a value; see above."""

    containers: TreeSpec
    entries: tuple[int | _Constant, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a value of numbers, as torch warns when it loads its leaves."""
        places = range(len(self.entries))
        return _structure_of, (unflatten_tree(places, self.containers), self.entries)


def _structure_of(value: Any, entries: Any) -> Structure:
    return Structure(flatten_tree(value)[1], entries)


class Nested(tuple[Tensor, ...]):
    """The tensors of a value that is neither a tensor nor a tuple of several."""

    structure: Structure


def as_tensors(value: Any, where: str = "a value is") -> Tensors:
    """Return a value as it travels.

    Args:
        value: a tensor, or containers of tensors, None, bools, numbers and texts.
        where: it comes from, as an error's first words.

    Raises:
        RequestError: the value contains something else.
    """
    if isinstance(value, Tensor):
        return (value,)
    leaves, containers = flatten_tree(value)
    tensors: list[Tensor] = []
    entries: list[int | _Constant] = []
    places: dict[int, int] = {}
    for leaf in leaves:
        kind: type = type(leaf)
        if isinstance(leaf, Tensor):
            place = places.setdefault(id(leaf), len(tensors))
            if place == len(tensors):
                tensors.append(leaf)
            entries.append(place)
        elif kind in _PLAIN:
            entries.append(_Constant(kind, leaf))
        else:
            raise RequestError(
                f"{where} a {kind.__name__}; it must be a tensor, or a container of "
                f"tensors, None, numbers and texts: {KNOWN}"
            )
    is_flat = type(value) is tuple and len(value) == len(tensors) > 1
    if is_flat and all(isinstance(x, Tensor) for x in value):
        return tuple(tensors)
    return nested(tensors, Structure(containers, tuple(entries)))


def as_value(tensors: Tensors) -> Any:
    """Return what a layer takes: the inverse of `as_tensors`."""
    if isinstance(tensors, Nested):
        return filled(tensors.structure, tensors)
    return tensors[0] if len(tensors) == 1 else tensors


def filled(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Put tensors, or what replaces them, in their places of a structure."""
    return unflatten_tree(
        [
            x.value if isinstance(x, _Constant) else tensors[x]
            for x in structure.entries
        ],
        structure.containers,
    )


def with_tensors(tensors: Tensors, others: Iterable[Tensor]) -> Tensors:
    """Return the same value with other tensors in the places of its tensors."""
    if isinstance(tensors, Nested):
        return nested(others, tensors.structure)
    return tuple(others)


def mapped(tensors: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    """Return the same value with a function of each of its tensors."""
    if type(tensors) is tuple and len(tensors) == 1:  # the common case, for speed
        return (function(tensors[0]),)
    return with_tensors(tensors, map(function, tensors))


def nested(tensors: Iterable[Tensor], structure: Structure) -> Nested:
    """Make a value of its two parts."""
    value = Nested(tensors)
    value.structure = structure
    return value


def gradients_of(
    inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensors:
    """Return the gradients of inputs as they travel; None: it has no influence."""
    return tuple(
        [
            torch.zeros_like(x) if dx is None else dx.contiguous()
            for x, dx in zip(inputs, gradients, strict=True)
        ]
    )


def ready(tensors: Tensors) -> Tensors:
    """Return the same value contiguous, with what a collective still writes awaited."""
    for y in tensors:
        if type(y) is not Tensor or not _is_contiguous(y):
            return mapped(tensors, _contiguous)
    return tensors


def _is_contiguous(y: Tensor) -> bool:
    return y.layout is not torch.strided or y.is_contiguous()


def _contiguous(y: Tensor) -> Tensor:
    y = arrived(y)
    return y if _is_contiguous(y) else y.contiguous()


def handed_over(y: Tensor) -> Tensor:
    """Cut an output off its graph; its ``requires_grad`` stays.

    It is copied unless the forward has just computed it.
    Others may write to the rest while it waits to be read: the caller to the batch,
    and a layer to a buffer that it returns for every micro-batch. A tensor without a
    graph may be any of these, and so may one that was written to in place.
    """
    cut_off = y.detach()
    cut_off = cut_off.clone() if y.is_leaf or y._version else cut_off
    return cut_off.requires_grad_(y.requires_grad)


def leaves(tensors: Tensors) -> Tensors:
    """Cut tensors off their graph, unless one of them has no graph.

    What a chunk puts out is cut off already, and has no other reader.
    """
    if type(tensors) is tuple and len(tensors) == 1:
        (x,) = tensors
        if x.requires_grad and x.is_leaf:
            return tensors
    return mapped(tensors, lambda x: x.detach().requires_grad_(x.requires_grad))
