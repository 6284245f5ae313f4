"""Values between chunks: their tensors in order, and the structure that holds them.

    value       {"h": h, "mask": m, "cache": None, "router": (r0, r1)}
    tensors     (h, m, r0, r1)
    structure   containers    torch's TreeSpec of the value, with the types of all
                entries       [[], [-1, 1], null, [], []], as JSON: one for each leaf

    []        the next tensor
    [c, i]    the next one too, which chunk c put out as its tensor i, and the chunks
              since then have handed on as they got it; c = -1: the batch
    [i]       tensor i again
    else      itself: None, a number or a text

Containers are what torch's pytrees know (tuples, lists, dicts, named tuples, classes
that are registered with them, as transformers' ModelOutput is) and dataclasses. A
tensor, and a tuple of several, have no structure.

A tensor that a value holds twice travels once, and is one tensor for who reads it too.
Gradients of all its uses are then added in the order in which they would be without a
cut: two copies would have two sums, which are rounded apart.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import (
    LEAF,
    REGISTERED,
    TreeSpec,
    flatten_tree,
    register_dataclass,
    unflatten_tree,
)
from zbpp.runtime.support.strides import copy_of
from zbpp.runtime.support.torch_internals import arrived

__all__ = [
    "GivenConstants",
    "Nested",
    "Origin",
    "SomeGradients",
    "Structure",
    "Tensors",
    "UnfitValueError",
    "as_tensors",
    "as_value",
    "described",
    "detached",
    "gradients_in",
    "gradients_of",
    "handed_over",
    "isolated",
    "leaves",
    "mapped",
    "nested",
    "origins_in",
    "ready",
    "some_gradients",
    "with_tensors",
]

Tensors = tuple[Tensor, ...]
"""Value handed from chunk to chunk, or a micro-batch: one tensor or several."""

Origin = tuple[int, int]
"""A chunk, and the place of a tensor among those that it put out; -1: the batch."""

_PLAIN = {type(None), bool, int, float, str}


class Structure(NamedTuple):
    """The rest of a value; see above."""

    containers: TreeSpec
    entries: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without torch's class of leaves, which warns when it is loaded."""
        return _load_structure, (_dump_containers(self.containers), self.entries)


def _dump_containers(spec: TreeSpec) -> Any:
    """Class, context and children of each container; None: a leaf."""
    if spec.is_leaf():
        return None
    return spec.type, spec.context, [*map(_dump_containers, spec.children())]


def _load_structure(containers: Any, entries: str) -> Structure:
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


class SomeGradients(tuple[Tensor, ...]):
    """The gradients of a chunk's inputs, of which some have no influence on the loss.

    These have no gradient rather than one of zeros: the chunks below then have none
    either, and weight decay, say, leaves their parameters alone, as without a cut.
    """

    missing: tuple[int, ...]
    """Places among the inputs that need a gradient; the others' are here, in order."""


class UnfitValueError(TypeError):
    """Something in a value cannot travel; its text is what, and what could."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; it must be a tensor, or a container of tensors, None, numbers "
            "and texts: a tuple, list, dict, dataclass, or a class that is registered "
            "with torch.utils._pytree.register_pytree_node"
        )


def as_tensors(
    value: Any, origins: Mapping[int, Origin] | None = None, *, leaf: type = Tensor
) -> Tensors:
    """Return a value as it travels.

    Args:
        value: a tensor, or containers of tensors, None, bools, numbers and texts.
        origins: of the tensors that were handed on as they came, by ``id``.
        leaf: class of what stands for tensors.

    Raises:
        UnfitValueError: the value holds something else.
    """
    if isinstance(value, leaf):
        return (value,)  # type: ignore[return-value]
    items, containers = flatten_tree(value)
    tensors: list[Any] = []
    entries: list[str] = []
    places: dict[int, int] = {}
    for item in items:
        if not isinstance(item, leaf):
            kind: type = type(item)
            if is_dataclass(kind):
                register_dataclass(kind)
                return as_tensors(value, origins, leaf=leaf)
            entries.append(_plain(item))
        elif id(item) in places:
            entries.append(f"[{places[id(item)]}]")
        else:
            places[id(item)] = len(tensors)
            origin = origins.get(id(item)) if origins else None
            entries.append("[]" if origin is None else json.dumps(origin))
            tensors.append(item)
    is_flat = type(value) is tuple and all(isinstance(x, leaf) for x in value)
    if is_flat and len(entries) > 1 and all(entry == "[]" for entry in entries):
        return tuple(tensors)
    return nested(tensors, Structure(containers, f"[{', '.join(entries)}]"))


def _plain(item: Any) -> str:
    if item is None:
        return "null"
    if type(item) not in _PLAIN:
        raise UnfitValueError(f"a {type(item).__name__}")
    return json.dumps(item)


@lru_cache(1024)
def _parsed(entries: str) -> list[Any]:
    """The entries of the leaves of a value."""
    parsed: list[Any] = json.loads(entries)
    return parsed


def _filled(structure: Structure, items: Sequence[Any]) -> Any:
    """Put items in the places of the tensors of a value."""
    following = iter(items)
    return unflatten_tree(
        [
            entry
            if type(entry) is not list
            else (items[entry[0]] if len(entry) == 1 else next(following))
            for entry in _parsed(structure.entries)
        ],
        structure.containers,
    )


def as_value(tensors: Tensors) -> Any:
    """Return what a layer takes: the inverse of `as_tensors`."""
    if isinstance(tensors, Nested):
        return _filled(tensors.structure, tensors)
    return tensors[0] if len(tensors) == 1 else tensors


@lru_cache(1024)
def origins_in(entries: str) -> tuple[Origin | None, ...]:
    """Origin of each tensor of a value, None for those that are new."""
    tensors = (x for x in _parsed(entries) if type(x) is list and len(x) != 1)
    return tuple((entry[0], entry[1]) if entry else None for entry in tensors)


def described(structure: Structure | None, texts: Iterable[str]) -> str:
    """Return words for a value whose tensors are described by texts."""
    if structure is None:
        return ", ".join(texts)
    return repr(_filled(structure, [*map(_Shown, texts)]))


class _Shown(str):
    """A text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


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


def gradients_of(gradients: Sequence[Tensor | None]) -> Tensors:
    """Return gradients as they travel; None: the input has no influence."""
    there = tuple([dx for dx in gradients if dx is not None])
    if len(there) == len(gradients):
        return there
    return some_gradients(there, [i for i, dx in enumerate(gradients) if dx is None])


def some_gradients(there: Iterable[Tensor], missing: Iterable[int]) -> SomeGradients:
    """Make `SomeGradients` of their two parts."""
    value = SomeGradients(there)
    value.missing = tuple(missing)
    return value


def gradients_in(tensors: Tensors) -> Sequence[Tensor | None]:
    """Return one gradient, or None, for each input: the inverse of `gradients_of`."""
    if not isinstance(tensors, SomeGradients):
        return tensors
    following = iter(tensors)
    n = len(tensors) + len(tensors.missing)
    return [None if i in tensors.missing else next(following) for i in range(n)]


def ready(tensors: Tensors) -> Tensors:
    """Return the same value, with what a collective still writes awaited."""
    for y in tensors:
        if type(y) is not Tensor:
            return mapped(tensors, arrived)
    return tensors


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
    if y.is_leaf or y._version:
        is_strided = y.layout is torch.strided
        cut_off = copy_of(cut_off) if is_strided else cut_off.clone()
    return cut_off


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


class GivenConstants:
    """The inputs of one forward that need no gradient, as they were before it.

    A chunk hands a tensor on if it puts out the very object that it was given, needs no
    gradient for it and has not written to it. So a mask travels as far as the layers
    hand it on, and no further; `comm.passthrough` tells why.

    Args:
        chunk: whose forward it is.
        inputs: the objects that its first layer is given.
    """

    def __init__(self, chunk: Chunk, inputs: Tensors) -> None:
        origins: Sequence[Origin | None] = (None,) * len(inputs)
        if isinstance(inputs, Nested):
            origins = origins_in(inputs.structure.entries)
        self._chunk = chunk
        self._given: list[tuple[Tensor, Mark, Origin]] = [
            (x, mark(x), origin or (chunk.index - 1, place))
            for place, (x, origin) in enumerate(zip(inputs, origins, strict=True))
            if not x.requires_grad
        ]

    def flatten(self, value: object) -> Tensors:
        """Return an output as it travels, with the origins of what it hands on.

        Raises:
            RequestError: it cannot travel.
        """
        unchanged = {
            id(x): origin
            for x, before, origin in self._given
            if before is not None and mark(x) == before
        }
        try:
            return as_tensors(value, unchanged)
        except UnfitValueError as error:
            first, n = self._chunk.first, len(self._chunk.layers)
            raise RequestError(
                f"chunk {self._chunk.index} (layers {first} to {first + n - 1}) puts "
                f"out {error}"
            ) from None
