"""Compile the layers of a chunk, or the chunk."""

from collections.abc import Callable
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
from zbpp.runtime.ties.bind import AliasedLayer

__all__ = ["check_compile", "compiled_chunk", "compiled_layer", "has_compiled_part"]

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
    has_parts = any(map(has_compiled_part, chunk.layers))
    if how == "chunks" and not chunk.leaves and not has_parts:
        whole = compiled(in_a_row([chunk.call(index) for index in calls]))
    return replace(chunk, calls=calls, whole=whole)


def compiled_layer(
    layer: nn.Module, compile: Callable[[Call], Call] = compiled
) -> Call | None:
    """Return the call of a layer that is compiled, or a part of it.

    Args:
        layer: of a model.
        compile: compiles a call.

    Returns:
        None: there is nothing to compile.
    """
    name = getattr(layer, _PART, "")
    if name:
        return _WithPart(layer, name, compile)
    return compile(layer) if name is not None and is_worth_it(layer) else None


def has_compiled_part(layer: nn.Module) -> bool:
    """True for a layer that says which module in it is compiled, if any."""
    return hasattr(layer, _PART)


def _compiled_call(call: Call, layer: nn.Module) -> Call:
    inner = compiled_layer(layer)
    if inner is None:
        return call
    return call.running(inner) if isinstance(call, AliasedLayer) else inner


class _WithPart:
    """Runs a layer with a module in it compiled.

    Args:
        layer: of a model.
        name: of the module.
        compile: compiles a call.
    """

    def __init__(
        self, layer: nn.Module, name: str, compile: Callable[[Call], Call]
    ) -> None:
        self._layer, self._name = layer, name
        self._compiled: Any = compile(layer._modules[name])  # type: ignore[arg-type]

    def __call__(self, value: object) -> object:
        held = self._layer._modules
        own, held[self._name] = held[self._name], self._compiled
        try:
            output: object = self._layer(value)
        finally:
            held[self._name] = own
        return output
