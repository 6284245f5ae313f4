"""Compiled layers on fake tensors: the finished graphs of the compiler, as fused code.

torch compiles up to its finished graphs, and zbpp's backend cuts these: what F keeps
for B, and what B leaves for W, are then those of a run. No code is made of them. They
run here, by the rules that Inductor goes by:

    products, convolutions, attention    kernels of torch, which write their results
    all else                             fused into the kernels that need it: it takes
                                         memory where one of those, or the graph's
                                         result, reads it, or it ends a reduction
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.compiled.layers import Call, compiled_by
from zbpp.runtime.driver.compile_chunks import compiled_layer
from zbpp.runtime.support.compile_internals import compile_errors

__all__ = ["CompiledLayers", "checkpointed"]


def checkpointed(layer: nn.Module, value: Any) -> Any:
    """Run a layer that B runs once more; it is not compiled."""
    return checkpoint(layer, value, use_reentrant=False)


class CompiledLayers:
    """Runs layers compiled; each is compiled once."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self.tracker: StorageTracker | None = None
        """Counts what the graphs make."""
        self._calls: dict[nn.Module, Call] = {}
        self._is_apart = False
        self.refused: set[nn.Module] = set()
        """Layers that the compiler makes no single graph of: they run as they are."""

    def refuse(self, layer: nn.Module) -> bool:
        """Let a layer run as it is from now on; False: it does already.

        A graph computes no elements, and layers of experts may decide by some.
        """
        is_new = layer not in self.refused
        self.refused.add(layer)
        return is_new

    def run(self, layer: nn.Module, value: Any) -> Any:
        """Run a layer; one in which there is nothing to fuse runs as it is."""
        if layer not in self._calls:
            made = compiled_layer(layer, partial(self._compiled, layer))
            self._calls[layer] = made or layer
        return self._calls[layer](value)

    def _compiled(self, layer: nn.Module, part: Call) -> Call:
        """Return a compiled call of a layer, or of a module in it."""
        made: Any = compiled_by(part, self._finish)

        def call(*args: Any, **kwargs: Any) -> Any:
            if layer in self.refused:
                return part(*args, **kwargs)
            self._is_apart = True
            try:
                with _disable_current_modes():  # else the compiler stands aside
                    return made(*args, **kwargs)
            except compile_errors():
                self.refused.add(layer)
            finally:
                self._is_apart = False
            return part(*args, **kwargs)

        return call

    def _finish(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **_: Any
    ) -> Callable[[list[Any]], Any]:
        """Return what runs a finished graph; it empties its list."""
        run = _FusedGraph(graph)

        def boxed(args: list[Any]) -> Any:
            tracker = self.tracker
            assert tracker is not None, "a layer runs while it is traced"
            with ExitStack() as stack:
                if self._is_apart:
                    stack.enter_context(self._mode)
                    stack.enter_context(tracker)
                return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._grouped_mm.default,
    _ATEN.convolution.default,
    _ATEN.convolution_backward.default,
}
_PREFIXES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_REDUCTIONS = {
    _ATEN.sum.dim_IntList,
    _ATEN.sum.default,
    _ATEN.mean.dim,
    _ATEN.amax.default,
    _ATEN.amin.default,
    _ATEN.var_mean.correction,
    _ATEN.prod.dim_int,
    _ATEN.any.dim,
}


def _is_kernel(node: fx.Node) -> bool:
    """True if a node is computed by a kernel of torch's own."""
    name = getattr(node.target, "__name__", "")
    is_collective = getattr(node.target, "namespace", "") == "_c10d_functional"
    return node.target in _PRODUCTS or name.startswith(_PREFIXES) or is_collective


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


class _FusedGraph:
    """A graph whose fused nodes take no memory of their own.

    Args:
        module: of the compiler; each node knows its result's sizes.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._nodes = list(module.graph.nodes)
        self._module = module
        self._stored = {node for node in self._nodes if self._is_stored(node)}
        self._frees: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(self._nodes):
            reads = dict.fromkeys(self._reads(node)) if self._runs(node) else ()
            self._frees[node] = [x for x in reads if x not in seen]
            seen.update(reads)

    def _runs(self, node: fx.Node) -> bool:
        return node in self._stored or node.op == "output"

    def _is_stored(self, node: fx.Node) -> bool:
        """True if the result of a node takes memory, or is a view of what does."""
        if node.op != "call_function":
            return True
        if _is_kernel(node) or node.target in _REDUCTIONS:
            return True
        users = [*node.users]
        while users:
            user = users.pop()
            if user.op == "output" or _is_kernel(user):
                return True
            if _is_view(user):
                users += user.users
        return False

    def _reads(self, node: fx.Node) -> Iterable[fx.Node]:
        """The results in memory that a node is computed from, through fused ones."""
        for above in node.all_input_nodes:
            if above in self._stored:
                yield above
            else:
                yield from self._reads(above)

    def __call__(self, args: list[Any]) -> Any:
        """Run on the inputs; the list is emptied."""
        values: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = args.pop(0)
            elif node.op == "get_attr":
                values[node] = getattr(self._module, node.target)
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            elif node in self._stored:
                self._run(node, values)
        raise AssertionError("a graph has an output")

    def _run(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        ready = all(x in self._stored for x in node.all_input_nodes)
        target: Any = node.target
        if ready and (_is_kernel(node) or _is_view(node) or _takes_one(node)):
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = target(*args, **kwargs)
            del args, kwargs
            self._free(node, values)
        else:
            self._reuse(node, values)
            values[node] = fx.node.map_aggregate(node.meta["val"], _empty_like)
            self._free(node, values)

    def _reuse(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Let go what a fused kernel reads and may write to: results of one size."""
        size = getattr(node.meta["val"], "nbytes", None)
        for dead in self._frees[node]:
            if getattr(values.get(dead), "nbytes", None) == size:
                del values[dead]
                return

    def _free(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        for dead in self._frees[node]:
            values.pop(dead, None)


def _takes_one(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    )
