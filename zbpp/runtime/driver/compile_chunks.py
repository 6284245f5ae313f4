"""Compile the layers of a chunk."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.compiled.backend import Call, Compiling, compiled, is_worth_it

__all__ = ["check_compile", "compiled_chunk", "compiled_layer"]

_PART = "compiles"
"""Attribute of a layer that says which module in it is compiled; None: none is."""


def check_compile(how: object) -> None:
    """Refuse what is not a `Compiling`.

    Raises:
        RequestError: it is something else.
    """
    if how != "blocks" and not isinstance(how, bool):
        raise RequestError(f'compile is {how!r}; it must be "blocks" or False')


def compiled_chunk(chunk: Chunk, how: Compiling) -> Chunk:
    """Return a chunk whose layers' calls are compiled; its modules stay as they are."""
    if not how:
        return chunk
    calls = {
        index: call
        for index, layer in chunk.numbered()
        if (call := compiled_layer(layer)) is not None
    }
    return replace(chunk, calls=calls)


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
        layer, held[self._name] = held[self._name], self._compiled
        try:
            output: object = self._layer(value)
        finally:
            held[self._name] = layer
        return output
