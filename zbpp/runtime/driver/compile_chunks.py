"""Compile the layers of a chunk, or the chunk."""

from dataclasses import replace
from typing import Any, cast, get_args

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.compiled.layers import (
    Call,
    Compiling,
    compiled,
    in_a_row,
    is_worth_it,
)
from zbpp.runtime.ties.alias import AliasedLayer

__all__ = ["check_compile", "compiled_chunk"]

_PART = "compiles"
"""Attribute of a layer that says which module in it is compiled; None: none is."""


def check_compile(how: object) -> Compiling:
    """Return what is to be compiled.

    Raises:
        RequestError: it is something else.
    """
    if how not in get_args(Compiling):
        raise RequestError(
            f'compile is {how!r}; it must be "blocks", "chunks", or False'
        )
    return cast(Compiling, how)


def compiled_chunk(chunk: Chunk, how: Compiling) -> Chunk:
    """Return a chunk whose calls are compiled; its modules stay as they are.

    A chunk with tied parameters, which each layer finds in its own place, is compiled
    layer by layer.

    Args:
        chunk: of a stage.
        how: what is compiled.
    """
    if not how:
        return chunk
    calls = {
        index: _compiled_call(chunk.call(index), layer)
        for index, layer in chunk.numbered()
    }
    whole = None
    has_parts = any(hasattr(layer, _PART) for layer in chunk.layers)
    if how == "chunks" and not chunk.leaves and not has_parts:
        whole = compiled(in_a_row([chunk.call(index) for index in calls]))
    return replace(chunk, calls=calls, whole=whole)


def _compiled_call(call: Call, layer: nn.Module) -> Call:
    name = getattr(layer, _PART, "")
    if name is None or not (name or is_worth_it(layer)):
        return call
    inner = _WithPart(layer, name) if name else compiled(layer)
    return call.running(inner) if isinstance(call, AliasedLayer) else inner


class _WithPart:
    """Runs a layer with a module in it compiled.

    Args:
        layer: of a model.
        name: of the module.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer, self._name = layer, name
        self._compiled: Any = compiled(layer._modules[name])  # type: ignore[arg-type]

    def __call__(self, value: object) -> object:
        held = self._layer._modules
        own, held[self._name] = held[self._name], self._compiled
        try:
            output: object = self._layer(value)
        finally:
            held[self._name] = own
        return output
