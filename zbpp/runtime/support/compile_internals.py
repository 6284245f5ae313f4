"""Questions to torch's compiler by names of its own; see `private_names`."""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx

__all__ = [
    "Inner",
    "compile_graph",
    "compile_with",
    "current_node",
    "inductor_options",
    "missing",
]

Inner = Callable[..., Any]
"""Compiles one finished graph: ``inner(graph, inputs, **about)``."""

_SETTINGS = {
    "force_non_lazy_backward_lowering": True,
    "enable_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    "bundled_autograd_cache": False,
    "force_autograd_cache": False,
}
"""Of AOTAutograd, while a region is compiled. Its cache knows nothing of the split: an
entry of a stock compilation would be taken, and nothing would wait for W. (Inductor's
own cache goes by the graph that it is given, so it is left on.) A backward that is
lowered when it first runs could not tell B in advance what is left to W."""


def missing() -> str | None:
    """The name that this torch lacks, without which no region is split."""
    for place, names in _NAMES.items():
        module = _module(place)
        for name in names:
            if not hasattr(module, name):
                return f"{place}.{name}"
    return None


_NAMES = {
    "torch._C": ("_current_autograd_node",),
    "torch._inductor.compile_fx": ("compile_fx", "compile_fx_inner"),
    "torch._functorch.config": ("patch", *_SETTINGS),
}


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch
        return importlib.import_module(name)


def compile_with(
    inner: Inner | None,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile as Inductor does, each finished graph by a function of ours.

    Args:
        inner: of ours; None: Inductor's own, and nothing of the rest changes.
        graph: as Dynamo hands it to a backend.
        inputs: its examples.
        options: of Inductor.
    """
    module = _module("torch._inductor.compile_fx")
    if inner is None:
        made: Callable[..., Any] = module.compile_fx(
            graph, inputs, config_patches=dict(options)
        )
        return made
    config = _module("torch._functorch.config")
    with ExitStack() as stack:
        patched: AbstractContextManager[object] = config.patch(_SETTINGS)
        stack.enter_context(patched)
        made = module.compile_fx(
            graph, inputs, inner_compile=inner, config_patches=dict(options)
        )
    return made


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **about: Any) -> Any:
    """Compile a finished graph by Inductor; what is returned takes a list."""
    module = _module("torch._inductor.compile_fx")
    return module.compile_fx_inner(graph, inputs, **about)


def inductor_options(
    mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None = None
) -> dict[str, Any]:
    """Return Inductor's options for what `torch.compile` is given.

    Raises:
        RuntimeError: there is no such mode or option.
    """
    wrapper: Any = torch._TorchCompileInductorWrapper  # typed from torch 2.14 on
    made = wrapper(mode, None if options is None else dict(options), dynamic)
    return dict(made.config)


def _no_node() -> None:
    """Tell of no node."""


current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _no_node)
"""Returns the node that autograd runs now in this thread."""
