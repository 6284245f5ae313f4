"""Notes on an error that say where in the model it was raised, written when it is."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from zbpp.core import Pass, PassKind
from zbpp.runtime.support.pytree import map_tensors

__all__ = ["note_layer", "note_pass"]

_CALLED = {
    PassKind.F: "forward",
    PassKind.B: "backward of the inputs",
    PassKind.W: "backward of the weights",
    PassKind.BW: "backward",
}


NameOf = Callable[[int, str], str]
"""The model's own name of a layer, by its index, or of a module in it, by its path."""


def note_pass(
    error: Exception,
    job: Pass,
    layers: Sequence[tuple[int, nn.Module]],
    name_of: NameOf,
) -> None:
    """Note the pass, its chunk and micro-batch, and of a backward the layer if known.

    Args:
        error: that was raised in the pass.
        job: the pass.
        layers: of its chunk.
        name_of: names them.
    """
    first, last = layers[0][0], layers[-1][0]
    error.add_note(
        f"{job} is the {_CALLED[job.kind]} of micro-batch {job.microbatch} in chunk "
        f"{job.chunk}, layers {first} to {last}"
    )
    if job.kind is not PassKind.F and (place := _module_in(error, layers)):
        error.add_note(f"raised in {name_of(*place)} (layer {place[0]})")


def note_layer(
    error: Exception, index: int, layer: nn.Module, value: object, name_of: NameOf
) -> None:
    """Note the layer that has failed, the module in it, and what the layer was given.

    Args:
        error: that was raised in the layer's forward.
        index: of the layer.
        layer: the module.
        value: its argument.
        name_of: names it.
    """
    place = _module_in(error, [(index, layer)]) or (index, "")
    error.add_note(
        f"raised in {name_of(*place)} (layer {index}); the layer was called with "
        f"{_words(value)}"
    )
    is_tuple = isinstance(value, tuple) and len(value) > 1
    if is_tuple and isinstance(error, TypeError) and "positional arg" in str(error):
        error.add_note(
            "what a layer puts out arrives at the next one as one argument, a tuple "
            "too: let the layer take one argument, and unpack it there"
        )
    if isinstance(error, RuntimeError) and "leaf Variable" in str(error):
        error.add_note(
            "the first layer of a chunk may write in place to what it is called with "
            "only if it did in the chunk's first forward: let it write to x.clone()"
        )


def _module_in(
    error: Exception, layers: Iterable[tuple[int, nn.Module]]
) -> tuple[int, str] | None:
    """The innermost module of some layers in which an error was raised."""
    places = {
        id(module): (index, path)
        for index, layer in layers
        for path, module in layer.named_modules()
    }
    place = None
    step: TracebackType | None = error.__traceback__
    while step is not None:
        held = step.tb_frame.f_locals.get("self")
        place = places.get(id(held), place)
        step = step.tb_next
    return place


def _words(value: object) -> str:
    """A layer's argument, with shapes and dtypes for its tensors."""

    def shape(tensor: Tensor) -> Any:
        kind = str(tensor.dtype).removeprefix("torch.")
        return _Word(f"{kind}{list(tensor.shape)}")

    return str(map_tensors(value, shape, lambda held: _Word(type(held).__name__)))


class _Word(str):
    """A text that is shown without quotes."""

    __slots__ = ()

    __repr__ = str.__str__
