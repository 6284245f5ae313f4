"""Calls of layers, compiled so that their weight gradients wait for W."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from zbpp.runtime.compiled.backend import zbpp

__all__ = ["Call", "Compiling", "compiled", "is_worth_it"]

Compiling = Literal["blocks"] | bool
"""The parts that are compiled: ``"blocks"`` or True, each layer by itself."""

_MAX_KINDS = 64
"""Compilations of one function before torch gives up: layers that differ in a number of
their own (``layer_idx``) need one each, and torch's 8 are few."""

Call = Callable[[object], object]


def is_worth_it(layer: nn.Module) -> bool:
    """True for layers of several modules: in a lone one there is nothing to fuse."""
    return any(True for _ in layer.children())


def compiled(call: Call) -> Call:
    """Return a call that is compiled when it first runs, and split by zbpp."""
    compile: Any = torch.compile
    made: Call = compile(call, backend=zbpp, recompile_limit=_MAX_KINDS)
    return made
