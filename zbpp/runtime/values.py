"""Values between chunks: their tensors in order, and the structure that holds them.

    value       {"h": h, "mask": m, "cache": None, "router": (r0, h)}
    tensors     (h, m, r0)
    structure   containers    torch's TreeSpec of the value
                entries       0, 1, None, 2, 0: the place of each leaf's tensor, or a
                              constant

Containers are what torch's pytrees know (tuples, lists, dicts, named tuples, classes
that are registered with them, as transformers' ModelOutput is) and dataclasses. A
tensor, and a tuple of several, have no structure.

What crosses a cut is contiguous and complete, in one process and between many: a
strided tensor is copied, and an input that has no influence on the loss gets a gradient
of zeros. A tensor that a value holds twice travels once, and is one tensor for its
reader too: two copies would have two sums of gradients, which are rounded apart.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.support.pytree import (
    LEAF,
    REGISTERED,
    TreeSpec,
    flatten_tree,
    register_dataclass,
    unflatten_tree,
)
from zbpp.runtime.support.torch_internals import arrived

__all__ = [
    "Nested",
    "Structure",
    "Tensors",
    "UnfitValueError",
    "as_tensors",
    "as_value",
    "filled",
    "gradients_of",
    "handed_over",
    "isolated",
    "leaves",
    "mapped",
    "nested",
    "ready",
    "with_tensors",
]

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
        """Pickle without torch's class of leaves, which warns when it is loaded."""
        return _load_structure, (_dump_containers(self.containers), self.entries)


def _dump_containers(spec: TreeSpec) -> Any:
    """Class, context and children of each container; None: a leaf."""
    if spec.is_leaf():
        return None
    return spec.type, spec.context, [*map(_dump_containers, spec.children())]


def _load_structure(containers: Any, entries: Any) -> Structure:
    return Structure(_load_containers(containers), entries)


def _load_containers(dumped: Any) -> TreeSpec:
    if dumped is None:
        return LEAF
    kind: type
    kind, context, children = dumped
    if is_dataclass(kind) and kind not in REGISTERED:  # so far only the sender has
        register_dataclass(kind)
    return TreeSpec(kind, context, [*map(_load_containers, children)])


class Nested(tuple[Tensor, ...]):
    """The tensors of a value that is neither a tensor nor a tuple of several."""

    structure: Structure


class UnfitValueError(TypeError):
    """Something in a value cannot travel; its text is what, and what could."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; it must be a tensor, or a container of tensors, None, numbers "
            "and texts: a tuple, list, dict, dataclass, or a class that is registered "
            "with torch.utils._pytree.register_pytree_node"
        )


def as_tensors(value: Any, *, leaf: type = Tensor) -> Tensors:
    """Return a value as it travels.

    Args:
        value: a tensor, or containers of tensors, None, bools, numbers and texts.
        leaf: class of what stands for tensors.

    Raises:
        UnfitValueError: the value holds something else.
    """
    if isinstance(value, leaf):
        return (value,)  # type: ignore[return-value]
    items, containers = flatten_tree(value)
    tensors: list[Any] = []
    entries: list[int | _Constant] = []
    places: dict[int, int] = {}
    for item in items:
        kind: type = type(item)
        if isinstance(item, leaf):
            place = places.setdefault(id(item), len(tensors))
            if place == len(tensors):
                tensors.append(item)
            entries.append(place)
        elif kind in _PLAIN:
            entries.append(_Constant(kind, item))
        elif is_dataclass(kind):
            register_dataclass(kind)
            return as_tensors(value, leaf=leaf)
        else:
            raise UnfitValueError(f"a {kind.__name__}")
    is_flat = type(value) is tuple and len(value) == len(tensors) > 1
    if is_flat and all(isinstance(x, leaf) for x in value):
        return tuple(tensors)
    return nested(tensors, Structure(containers, tuple(entries)))


def as_value(tensors: Tensors) -> Any:
    """Return what a layer takes: the inverse of `as_tensors`."""
    if isinstance(tensors, Nested):
        return filled(tensors.structure, tensors)
    return tensors[0] if len(tensors) == 1 else tensors


def filled(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Put tensors, or what stands for them, in their places of a structure."""
    return unflatten_tree(
        [
            x.value if isinstance(x, _Constant) else tensors[x]
            for x in structure.entries
        ],
        structure.containers,
    )


def with_tensors(tensors: Tensors, others: Iterable[Tensor]) -> Tensors:
    """Return the same value with other tensors in the places of its own."""
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


def detached(tensors: Tensors) -> Tensors:
    """Cut them off their graph; they still say whether they need a gradient."""
    return mapped(tensors, lambda y: y.detach().requires_grad_(y.requires_grad))


def isolated(y: Tensor) -> Tensor:
    """Cut an output off its graph; copy it unless the forward has just computed it.

    Others may write to the rest while it waits to be read: the caller to the batch,
    and a layer to a buffer that it returns for every micro-batch. A tensor without a
    graph may be any of these, and so may one that was written to in place.
    """
    cut_off = y.detach()
    return cut_off.clone() if y.is_leaf or y._version else cut_off


def handed_over(y: Tensor) -> Tensor:
    """Return an output for the next chunk; it says whether it needs a gradient."""
    return isolated(y).requires_grad_(y.requires_grad)


def leaves(tensors: Tensors) -> Tensors:
    """Cut them off their graph, unless there is one tensor that has none.

    What a chunk puts out is cut off already, and nobody else reads it.
    """
    if type(tensors) is tuple and len(tensors) == 1:
        (x,) = tensors
        if x.requires_grad and x.is_leaf:
            return tensors
    return detached(tensors)
