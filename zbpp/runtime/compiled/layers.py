"""Calls of layers, compiled so that their weight gradients wait for W.

"blocks"   each layer by itself; layers of one kind share what is compiled
"chunks"   all layers of a chunk at once
"""

from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from zbpp.runtime.compiled.backend import Finish, finished_by, zbpp

__all__ = [
    "Call",
    "Compiling",
    "compiled",
    "compiled_by",
    "in_a_row",
    "is_worth_it",
]

Compiling = Literal["blocks", "chunks", False]
"""The parts of a model that are compiled."""

_MOST_KINDS = 64
"""Compilations of one function before torch gives up: layers that differ in a number of
their own (``layer_idx``) need one each, and torch's 8 are few."""

Call = Callable[[object], object]

_numbers = count()


def is_worth_it(layer: nn.Module) -> bool:
    """True for layers of several modules: in a lone one there is nothing to fuse."""
    return any(True for _ in layer.children())


def compiled(call: Call) -> Call:
    """Return a call that is compiled when it first runs, and split by zbpp."""
    compile: Any = torch.compile
    made: Call = compile(call, backend=zbpp, recompile_limit=_MOST_KINDS)
    return made


def compiled_by(call: Call, finish: Finish) -> Call:
    """Return the call that `compiled` would, but for its kernels, as one graph.

    Args:
        call: to be compiled.
        finish: makes what runs a finished graph; see `finished_by`.
    """

    def run(*args: Any, **kwargs: Any) -> object:
        return call(*args, **kwargs)

    # a code object of its own: torch keeps what it has compiled with that
    code = run.__code__.replace(co_name=f"layer_{next(_numbers)}")
    own = FunctionType(code, run.__globals__, None, None, run.__closure__)
    compile: Any = torch.compile
    made: Call = compile(own, backend=finished_by(finish), fullgraph=True)
    return made


def in_a_row(calls: Sequence[Call]) -> Call:
    """Return the call of several, one after the other."""

    def run(value: object) -> object:
        for call in calls:
            value = call(value)
        return value

    return run
