"""Compile the layers of a chunk, or the chunk."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast, get_args

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.compiled.layers import Compiling, compiled, in_a_row, is_worth_it
from zbpp.runtime.ties.alias import AliasedLayer

__all__ = ["check_compile", "compiled_chunk"]


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
        index: _compiled_call(chunk, index)
        for index, layer in chunk.numbered()
        if is_worth_it(layer)
    }
    whole = None
    if how == "chunks" and not chunk.leaves:
        whole = compiled(in_a_row([chunk.call(index) for index, _ in chunk.numbered()]))
    return replace(chunk, calls={**chunk.calls, **calls}, whole=whole)


def _compiled_call(chunk: Chunk, index: int) -> Callable[[object], object]:
    call = chunk.call(index)
    if isinstance(call, AliasedLayer):
        return call.running(compiled(chunk.layers[index - chunk.first]))
    return compiled(call)
