"""Names of torch's compiler which torch does not document; see `torch_internals`.

Where one is gone, compiled regions run wholly in B, and reports say so.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = [
    "DealtGradient",
    "Inner",
    "compile_errors",
    "compile_graph",
    "compile_with",
    "compiled_backward",
    "current_node",
    "dealt_gradient",
    "graph_inputs",
    "inductor_options",
    "is_compiled",
    "missing",
    "without_kernels",
    "write_code",
    "writes_code",
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
    """The name that this torch lacks, without which no region is split.

    Seen in torch 2.13.
    """
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


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what is raised where torch can make no single graph of a function."""
    found: Any = getattr(
        sys.modules.get("torch._dynamo.exc"), "TorchDynamoException", ()
    )
    return (found,) if found else ()


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **about: Any) -> Any:
    """Compile a finished graph by Inductor; what is returned takes a list."""
    module = _module("torch._inductor.compile_fx")
    return module.compile_fx_inner(graph, inputs, **about)


def writes_code() -> bool:
    """True if this torch has the names that `write_code` needs. Seen in torch 2.13."""
    graph = getattr(_module("torch._inductor.graph"), "GraphLowering", None)
    names = "compile_to_module", "codegen"
    parts = _module("torch._inductor.async_compile")
    return all(hasattr(graph, name) for name in names) and hasattr(parts, _KERNELS)


_KERNELS = "AsyncCompile"
_CACHES = "fx_graph_cache", "fx_graph_remote_cache"  # of what is built


def write_code(
    graph: fx.GraphModule, inputs: Sequence[Any], **about: Any
) -> tuple[str, dict[str, Any]]:
    """Let Inductor write what runs a finished graph, and build none of its kernels.

    Returns:
        A module's source, whose ``call`` takes a list, and names that it needs.
    """
    found: list[tuple[str, dict[str, Any]]] = []

    def written(lowered: Any) -> Any:
        code, _ = lowered.codegen()
        found.append((code.value, dict(lowered.constants)))
        return SimpleNamespace(call=None)

    config = _module("torch._inductor.config")
    own = _module("torch._inductor.graph").GraphLowering
    options = dict.fromkeys(_CACHES, False) | {"cpp_wrapper": False}
    with config.patch(options), _instead(own, "compile_to_module", written):
        compile_graph(graph, inputs, **about)
    ((code, constants),) = found
    return code, constants


def without_kernels(code: str, kernels: Any) -> dict[str, Any]:
    """Return the names of a module that Inductor has written.

    Args:
        code: its source.
        kernels: stands for all that would build kernels.
    """
    names: dict[str, Any] = {"__name__": "written"}
    parts = _module("torch._inductor.async_compile")
    with _instead(parts, _KERNELS, lambda: kernels):
        exec(compile(code, "<written by Inductor>", "exec"), names)
    return names


@contextmanager
def _instead(holder: Any, name: str, new: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, new)
    try:
        yield
    finally:
        setattr(holder, name, before)


def inductor_options(
    mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None = None
) -> dict[str, Any]:
    """Return Inductor's options for what `torch.compile` is given.

    Raises:
        RuntimeError: there is no such mode or option.
    """
    made = torch._TorchCompileInductorWrapper(  # type: ignore[no-untyped-call]
        mode, None if options is None else dict(options), dynamic
    )
    return dict(made.config)


def is_compiled(node: Any) -> bool:
    """True for the node of a compiled region. Seen in torch 2.9 to 2.13."""
    return type(node).__name__ == "CompiledFunctionBackward"


def compiled_backward(node: Any) -> Any:
    """Return what a compiled region's node runs; None: unknown, or not compiled yet.

    Seen in torch 2.13.
    """
    forward = getattr(type(node), "_forward_cls", None)
    return getattr(forward, "compiled_bw", None)


def _no_node() -> None:
    """Tell of no node."""


current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _no_node)
"""Returns the node that autograd runs now in this thread. Seen in torch 2.13."""

_DTENSOR = ["_local_tensor", "device_mesh"]
"""The parts that compilation takes a DTensor into."""


def graph_inputs(value: Any) -> tuple[int, int] | None:
    """Count what a region's input is in the graph that is compiled.

    A DTensor is its part and its mesh, and sizes and strides that are symbols; what is
    no tensor of that kind is one.

    Seen in torch 2.13. Where the name is gone, all that look like one tensor are one,
    and the number of the graph's inputs tells that they are not.

    Returns:
        The number of inputs, and which one holds the numbers; None: other tensors made
        of tensors.
    """
    if not isinstance(value, Tensor):
        return 1, 0
    module = sys.modules.get("torch.utils._python_dispatch")
    check = getattr(module, "is_traceable_wrapper_subclass", None)
    if check is None or not check(value):
        return 1, 0
    parts: Any = value
    names, _ = parts.__tensor_flatten__()
    if names != _DTENSOR or check(parts._local_tensor):
        return None
    sizes = (*value.size(), *value.stride())
    symbols = sum(isinstance(n, torch.SymInt) for n in sizes)
    return len(names) + symbols, names.index(_DTENSOR[0])


class DealtGradient(NamedTuple):
    """The fate of a DTensor's gradient of which a compiled region has a part.

    Args:
        placements: of the gradient.
        meta: the compiler's own description.
    """

    placements: tuple[Any, ...]
    meta: Any

    def whole(self, part: Tensor, mesh: Any) -> Tensor:
        """Return the DTensor of a process's part.

        Args:
            part: the numbers of this process.
            mesh: of the parameter.
        """
        meta = self.meta
        parts = dict(zip(_DTENSOR, (part, mesh), strict=True))
        made: Tensor = meta.original_subclass_type.__tensor_unflatten__(
            parts, meta.meta, meta.outer_size, meta.outer_stride
        )
        return made


def dealt_gradient(node: Any, number: int) -> DealtGradient | None:
    """Return how a compiled region's node wraps the gradient of an input.

    Seen in torch 2.13.

    Args:
        node: of the region.
        number: of the input.

    Returns:
        None: the gradient is no DTensor of a known size, or this torch does not tell.
    """
    forward = getattr(type(node), "_forward_cls", None)
    about = getattr(forward, "maybe_subclass_metadata", None)
    metas = getattr(about, "grad_input_metas", None) or ()
    meta: Any = metas[number] if number < len(metas) else None
    if list(getattr(meta, "attrs", ())) != _DTENSOR:
        return None
    sizes = (*meta.outer_size, *meta.outer_stride)
    if not all(type(n) is int for n in sizes):
        return None
    return DealtGradient(tuple(meta.meta[0]), meta)
