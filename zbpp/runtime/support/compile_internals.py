"""Private functions of torch's compiler; see `private_names`."""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zbpp.runtime.support.private_names import missing_names

Inner = Callable[..., Any]
"""Compiles one finished graph: ``inner(graph, inputs, **about)``."""

_SETTINGS = {
    "force_non_lazy_backward_lowering": True,
    "enable_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    "bundled_autograd_cache": False,
    "force_autograd_cache": False,
}
"""Of AOTAutograd, while a region is compiled. Its cache does not distinguish a split
region from a plain one, of which nothing would wait for W. (Inductor's cache does: its
key is the graph.) And a backward that is lowered when it first runs has no pieces when
B is planned."""


_PLACES = ("torch._C:", "torch._inductor.", "torch._functorch.")
"""Where private names are that a split needs."""


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch
        return importlib.import_module(name)


def compile_with(
    inner: Inner,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Compile a graph of Dynamo by Inductor, with `inner` for each finished graph.

    A torch that lacks a name for it compiles the graph without `inner`.
    """
    compile_fx = _module("torch._inductor.compile_fx").compile_fx
    patches = dict(options)
    if any(name.startswith(_PLACES) for name in missing_names()):
        return compile_fx(graph, inputs, config_patches=patches)
    with _module("torch._functorch.config").patch(_SETTINGS):
        return compile_fx(graph, inputs, inner_compile=inner, config_patches=patches)


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **about: Any) -> Any:
    """Compile a finished graph by Inductor to a function of a list."""
    module = _module("torch._inductor.compile_fx")
    return module.compile_fx_inner(graph, inputs, **about)


def inductor_options(
    mode: str | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return Inductor's options for arguments of `torch.compile`.

    Raises:
        RuntimeError: there is no such mode or option.
    """
    wrapper: Any = torch._TorchCompileInductorWrapper  # typed from torch 2.14 on
    return dict(wrapper(mode, None if options is None else dict(options), None).config)


def _no_node() -> None:
    """Return no node, where torch cannot name it."""


current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _no_node)
"""Returns the node that autograd runs now in this thread."""
