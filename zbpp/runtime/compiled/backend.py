"""The backend: ``torch.compile(block, backend="zbpp")``.

Inductor compiles as ever: its decompositions, what it saves and what it computes again.
Each backward graph that it has finished comes by here, and loses the weights' products
(`cut`). torch finds the backend by its name, through the entry point of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from zbpp.runtime.compiled.cut import cut_weights
from zbpp.runtime.compiled.region import Region, frees_of, run_with
from zbpp.runtime.support.compile_internals import (
    compile_graph,
    compile_with,
    inductor_options,
    is_subclass,
    missing,
)

__all__ = ["zbpp"]

_NO_GRAPHS = {"triton.cudagraphs": False}
"""A captured graph's next run writes where W still reads."""


def zbpp(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph by Inductor, so that its weight gradients can wait for W.

    Args:
        graph: as Dynamo hands it over.
        inputs: its examples.
        mode: of `torch.compile`.
        options: of Inductor.

    Raises:
        RuntimeError: Inductor has no such mode or option.
    """
    chosen = inductor_options(mode, options) | _NO_GRAPHS
    lacking = missing()
    if lacking is not None:
        return compile_with(None, graph, inputs, chosen)
    return compile_with(_Compiler(inputs), graph, inputs, chosen)


class _Compiler:
    """Compiles the graphs of one region.

    Args:
        inputs: examples of the region's.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        self._is_tensor = [x is not None for x in tensors]
        self._weights = {
            i
            for i, x in enumerate(tensors)
            if isinstance(x, nn.Parameter) and x.requires_grad
        }
        self._has_subclass = any(is_subclass(x) for x in tensors if x is not None)
        self._n_forward = -1
        self.__name__ = "zbpp"

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **about: Any
    ) -> Any:
        """Compile a finished graph: a forward, or a backward."""
        if not about.get("is_backward"):
            self._n_forward = len(inputs)
            return compile_graph(graph, inputs, **about)
        (results,) = next(iter(reversed(graph.graph.nodes))).args
        n_results = len(results)
        why = self._refusal(n_results)
        pieces = [] if why else cut_weights(graph.graph, self._weights)
        if pieces:
            graph.recompile()
        elif not why:
            why = "no product's weight"
        numbers = _numbers(self._is_tensor)
        edges = [tuple(numbers[i] for i in piece.slots) for piece in pieces]
        region = Region(pieces, edges, sum(self._is_tensor), frees_of(pieces), why)
        compiled = compile_graph(graph, inputs, **about)
        return run_with(compiled, n_results, region)

    def _refusal(self, n_results: int) -> str:
        """Say why nothing of the region can wait; empty: something may."""
        n = len(self._is_tensor)
        if self._has_subclass:
            return "compiled with tensors that are split over processes"
        if self._n_forward != n or n_results < n:
            return "compiled with inputs that share memory"
        return ""


def _numbers(is_tensor: Sequence[bool]) -> list[int]:
    """Of each input, the tensors before it: its edge, as numbers have none."""
    numbers, n = [], 0
    for one in is_tensor:
        numbers.append(n)
        n += one
    return numbers
