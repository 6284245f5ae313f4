"""Notes that tell the user where in the model an error was raised."""

from typing import Any

from torch import Tensor

from zbpp.core import Pass, PassKind
from zbpp.runtime.support.pytree import map_tensors

_CALLED = {
    PassKind.F: "forward",
    PassKind.B: "backward of the inputs",
    PassKind.W: "backward of the weights",
    PassKind.BW: "backward",
}


def note_pass(error: Exception, job: Pass, layers: range) -> None:
    """Note the pass in which an error was raised, with its chunk and micro-batch."""
    error.add_note(
        f"{job} is the {_CALLED[job.kind]} of micro-batch {job.microbatch} in chunk "
        f"{job.chunk}, layers {layers[0]} to {layers[-1]}"
    )


def note_layer(error: Exception, name: str, value: object) -> None:
    """Note the layer in whose forward an error was raised, and its argument."""
    error.add_note(f"raised in {name}; the layer was called with {_words(value)}")
    is_tuple = isinstance(value, tuple) and len(value) > 1
    if is_tuple and isinstance(error, TypeError) and "positional arg" in str(error):
        error.add_note(
            "a layer passes its output to the next layer as one argument, a tuple "
            "too: let the layer take one argument, and unpack it there"
        )
    if isinstance(error, RuntimeError) and "leaf Variable" in str(error):
        error.add_note(
            "the first layer of a chunk may write in place to its inputs "
            "only if it did in the chunk's first forward: let it write to x.clone()"
        )


def _words(value: object) -> str:
    """A layer's argument, with shapes and dtypes for its tensors."""

    def look(tensor: Tensor) -> Any:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    words = map_tensors(value, look, lambda thing: type(thing).__name__)
    return str(words).replace("'", "")
