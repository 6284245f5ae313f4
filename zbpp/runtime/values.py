"""Values between chunks: their tensors in order, and a text that tells the rest.

    value       {"h": h, "mask": m, "cache": None, "router": (r0, r1)}
    tensors     (h, m, r0, r1)
    structure   ["dict", ["h", {}], ["mask", {"from": [-1, 1]}], ["cache", null],
                 ["router", ["tuple", {}, {}]]]

    {}                  the next tensor
    {"from": [c, i]}    the next one too, which chunk c put out as its tensor i, and
                        the chunks since then have handed on as they got it; -1: batch
    {"kept": [c, i]}    the same, and not in this message: the receiver has kept it
    {"as": i}           tensor i again

A tensor, and a tuple of several, have no text: they travel as they always did. The text
is JSON, so that a receiver parses it and runs nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from zbpp.runtime.support.torch_internals import arrived

__all__ = [
    "Nested",
    "Origin",
    "Tensors",
    "UnfitValueError",
    "as_tensors",
    "as_value",
    "described",
    "detached",
    "filled",
    "leaves",
    "mapped",
    "nested",
    "omitted",
    "origins_in",
    "ready",
    "with_tensors",
]

Tensors = tuple[Tensor, ...]
"""Value handed from chunk to chunk, or a micro-batch: one tensor or several."""

Origin = tuple[int, int]
"""A chunk, and the place of a tensor among those that it put out; -1: the batch."""

_PLAIN = {type(None), bool, int, float, str}


class Nested(tuple[Tensor, ...]):
    """The tensors of a value that is neither a tensor nor a tuple of several."""

    structure: str
    """Tells the rest of the value; see above."""


class UnfitValueError(TypeError):
    """Something in a value cannot travel; its text is what, and what could."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; it must be a tensor, or tuples, lists and dicts (with texts as "
            "keys) of tensors, None, numbers and texts"
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
    tensors: list[Any] = []
    node = _Flattening(tensors, origins or {}, leaf).node(value)
    if type(value) is tuple and len(node) > 2 and all(x == {} for x in node[1:]):
        return tuple(tensors)
    return nested(tensors, json.dumps(node))


def as_value(tensors: Tensors) -> Any:
    """Return what a layer takes: the inverse of `as_tensors`."""
    if isinstance(tensors, Nested):
        return _built(_parsed(tensors.structure), iter(tensors), list(tensors))
    return tensors[0] if len(tensors) == 1 else tensors


def with_tensors(tensors: Tensors, others: Iterable[Tensor]) -> Tensors:
    """Return the same value with other tensors in the places of its own."""
    if isinstance(tensors, Nested):
        return nested(others, tensors.structure)
    return tuple(others)


def mapped(tensors: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    """Return the same value with a function of each of its tensors."""
    return with_tensors(tensors, map(function, tensors))


def nested(tensors: Iterable[Tensor], structure: str) -> Nested:
    """Make a value of its two parts."""
    value = Nested(tensors)
    value.structure = structure
    return value


def ready(tensors: Tensors) -> Tensors:
    """Return the same value, with what a collective still writes awaited."""
    for y in tensors:
        if type(y) is not Tensor:
            return mapped(tensors, arrived)
    return tensors


def detached(tensors: Tensors) -> Tensors:
    """Cut them off their graph; they still say whether they need a gradient."""
    if type(tensors) is tuple and len(tensors) == 1:  # the common case, for speed
        (y,) = tensors
        return (y.detach().requires_grad_(y.requires_grad),)
    return with_tensors(
        tensors, (y.detach().requires_grad_(y.requires_grad) for y in tensors)
    )


def leaves(tensors: Tensors) -> Tensors:
    """Cut them off their graph, unless there is one tensor that has none.

    What a chunk puts out is cut off already, and nobody else reads it.
    """
    if type(tensors) is tuple and len(tensors) == 1:
        (x,) = tensors
        if x.requires_grad and x.is_leaf:
            return tensors
    return detached(tensors)


class _Flattening:
    """Collects the tensors of a value, and writes its nodes."""

    def __init__(
        self, tensors: list[Any], origins: Mapping[int, Origin], leaf: type
    ) -> None:
        self._tensors = tensors
        self._origins = origins
        self._leaf = leaf
        self._constants: dict[int, int] = {}

    def node(self, value: Any) -> Any:
        if isinstance(value, self._leaf):
            return self._tensor(value)
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is list:
            return [kind.__name__, *map(self.node, value)]
        if kind is dict:
            unfit = [key for key in value if type(key) is not str]
            if unfit:
                raise UnfitValueError(f"a dict with the key {unfit[0]!r}")
            return ["dict", *([key, self.node(x)] for key, x in value.items())]
        raise UnfitValueError(f"a {kind.__name__}")

    def _tensor(self, tensor: Any) -> Any:
        place = len(self._tensors)
        if getattr(tensor, "requires_grad", True):
            self._tensors.append(tensor)
            return {}
        known = self._constants.setdefault(id(tensor), place)
        if known != place:
            return {"as": known}
        self._tensors.append(tensor)
        origin = self._origins.get(id(tensor))
        return {} if origin is None else {"from": [*origin]}


@lru_cache(1024)
def _parsed(structure: str) -> Any:
    return json.loads(structure)


def _built(node: Any, tensors: Iterator[Any], every: list[Any]) -> Any:
    if isinstance(node, dict):
        return every[node["as"]] if "as" in node else next(tensors)
    if not isinstance(node, list):
        return node
    kind, *items = node
    if kind == "dict":
        return {key: _built(item, tensors, every) for key, item in items}
    made = [_built(item, tensors, every) for item in items]
    return made if kind == "list" else tuple(made)


def _leaves(node: Any) -> Iterator[dict[str, Any]]:
    """The nodes of the tensors, in order, also of those that are not in the message."""
    if isinstance(node, dict):
        if "as" not in node:
            yield node
    elif isinstance(node, list):
        kind, *items = node
        for item in items:
            yield from _leaves(item[1] if kind == "dict" else item)


@lru_cache(1024)
def origins_in(structure: str) -> tuple[Origin | None, ...]:
    """Origin of each tensor of a value, None for those that are new."""
    return tuple(
        (node["from"][0], node["from"][1]) if "from" in node else None
        for node in _leaves(_parsed(structure))
    )


@lru_cache(1024)
def _relabelled(structure: str, old: str, new: str, which: tuple[bool, ...]) -> str:
    """Text with other labels for some of its tensors."""
    node = json.loads(structure)
    for leaf, changes in zip(_leaves(node), which, strict=True):
        if changes and old in leaf:
            leaf[new] = leaf.pop(old)
    return json.dumps(node)


def omitted(tensors: Nested, has: Callable[[Origin], bool]) -> Nested:
    """Return the value without the tensors that its receiver has.

    Args:
        tensors: the value.
        has: tells of an origin whether the receiver has kept its tensor.
    """
    origins = origins_in(tensors.structure)
    if not any(origins):
        return tensors
    which = tuple(origin is not None and has(origin) for origin in origins)
    left = (x for x, omit in zip(tensors, which, strict=True) if not omit)
    return nested(left, _relabelled(tensors.structure, "from", "kept", which))


def filled(tensors: Nested, kept: Mapping[Origin, Tensor]) -> Nested:
    """Return the whole value: the inverse of `omitted`."""
    own = iter(tensors)
    every = [
        kept[node["kept"][0], node["kept"][1]] if "kept" in node else next(own)
        for node in _leaves(_parsed(tensors.structure))
    ]
    all_of_them = (True,) * len(every)
    return nested(every, _relabelled(tensors.structure, "kept", "from", all_of_them))


def described(structure: str | None, texts: Iterable[str]) -> str:
    """Return words for a value whose tensors are described by texts."""
    own = iter(texts)
    if structure is None:
        return ", ".join(own)
    return _words(_parsed(structure), own)


def _words(node: Any, texts: Iterator[str]) -> str:
    if isinstance(node, dict):
        if "as" in node:
            return f"tensor {node['as']} again"
        return "one that was sent before" if "kept" in node else next(texts)
    if not isinstance(node, list):
        return repr(node)
    kind, *items = node
    if kind == "dict":
        pairs = (f"{key!r}: {_words(item, texts)}" for key, item in items)
        return f"{{{', '.join(pairs)}}}"
    words = [_words(item, texts) for item in items]
    if kind == "list":
        return f"[{', '.join(words)}]"
    return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"
