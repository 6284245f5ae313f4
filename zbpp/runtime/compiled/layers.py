"""Calls of layers, compiled so that their weight gradients wait for W."""

from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from zbpp.runtime.compiled.backend import Finish, finished_by, zbpp

__all__ = ["Call", "Compiling", "compiled", "compiled_by", "is_worth_it"]

Compiling = Literal["blocks"] | bool
"""The parts that are compiled: ``"blocks"`` or True, each layer by itself."""

_MAX_KINDS = 64
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
    made: Call = compile(call, backend=zbpp, recompile_limit=_MAX_KINDS)
    return made


def compiled_by(call: Call, finish: Finish) -> Call:
    """Return the call that `compiled` would, but for its kernels, as one graph.

    Args:
        call: to be compiled.
        finish: makes what runs a finished graph; see `finished_by`.
    """

    def run(*args: Any, **kwargs: Any) -> object:
        return call(*args, **kwargs)

    # torch keeps what it has compiled with the code object: each call gets its own
    code = run.__code__.replace(co_name=f"layer_{next(_numbers)}")
    function = FunctionType(code, run.__globals__, None, None, run.__closure__)
    compile: Any = torch.compile
    made: Call = compile(function, backend=finished_by(finish), fullgraph=True)
    return made
