"""Questions to torch's compiler by names of its own; see `private_names`."""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = [
    "DTensorLayout",
    "Inner",
    "compile_graph",
    "compile_with",
    "compiled_backward",
    "current_node",
    "dtensor_gradient",
    "graph_inputs",
    "inductor_options",
    "is_compiled",
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


def is_compiled(node: Any) -> bool:
    """True for the node of a compiled region."""
    return type(node).__name__ == "CompiledFunctionBackward"


def compiled_backward(node: Any) -> Any:
    """Return what a compiled region's node runs; None: unknown, or not compiled yet."""
    forward = getattr(type(node), "_forward_cls", None)
    return getattr(forward, "compiled_bw", None)


_DTENSOR = ["_local_tensor", "device_mesh"]
"""The parts that compilation takes a DTensor into."""


def graph_inputs(value: Any) -> int:
    """Count what a region's input is in the graph that is compiled.

    A DTensor is its part and its mesh. Where it is more, as with sizes that are
    symbols, the number of all inputs tells.
    """
    return len(_DTENSOR) if type(value).__name__ == "DTensor" else 1


class DTensorLayout(NamedTuple):
    """The DTensor that a compiled region's gradient is a process's part of.

    Args:
        mesh: of the parameter.
        placements, shape, stride: of the gradient.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: Tensor) -> Tensor:
        """Return the DTensor with this part; called without a graph."""
        from torch.distributed.tensor import DTensor

        made: Tensor = DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )
        return made


def dtensor_gradient(node: Any, place: int, leaf: Any) -> DTensorLayout | None:
    """Return what a compiled region's node makes of a gradient of a DTensor.

    Args:
        node: of the region.
        place: of the gradient's part among the results of the backward.
        leaf: the parameter.

    Returns:
        None: it is placed otherwise than the parameter (a sum over processes that is
        not made yet, say), or this torch does not tell.
    """
    forward = getattr(type(node), "_forward_cls", None)
    about = getattr(forward, "maybe_subclass_metadata", None)
    for meta in getattr(about, "grad_input_metas", None) or ():
        if getattr(meta, "flat_tensor_start_idx", None) != place:
            continue
        if list(meta.attrs) == _DTENSOR and tuple(meta.meta[0]) == leaf.placements:
            stride = tuple(meta.outer_stride)
            return DTensorLayout(leaf.device_mesh, leaf.placements, leaf.shape, stride)
    return None


def _no_node() -> None:
    """Tell of no node."""


current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _no_node)
"""Returns the node that autograd runs now in this thread."""
