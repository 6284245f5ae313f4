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
    graph_inputs,
    inductor_options,
    missing,
)

__all__ = ["Finish", "finished_by", "zbpp"]

Finish = Callable[..., Callable[[list[Any]], Any]]
"""Makes what runs a finished graph: ``finish(graph, inputs, **about)``."""

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


def finished_by(finish: Finish) -> Callable[..., Any]:
    """Return a backend that does all that ours does, but for the kernels.

    Args:
        finish: makes what runs a graph in their place.
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        chosen = inductor_options(None, None) | _NO_GRAPHS
        return compile_with(_Compiler(inputs, finish), graph, inputs, chosen)

    return backend


class _Compiler:
    """Compiles the graphs of one region.

    Args:
        inputs: examples of the region's.
        finish: see `finished_by`; None: Inductor.
    """

    def __init__(self, inputs: Sequence[Any], finish: Finish | None = None) -> None:
        self._finish = finish or compile_graph
        self._is_tensor = [isinstance(x, Tensor) for x in inputs]
        self._weights: dict[int, int] = {}
        """Of each weight, its place among the graph's inputs, and its own number."""
        self._dealt: set[int] = set()
        """Places of parts of DTensors."""
        self._n_inputs = 0
        self._is_known = True
        for number, x in enumerate(inputs):
            found = graph_inputs(x)
            self._is_known &= found is not None
            n, own = found or (1, 0)
            if isinstance(x, nn.Parameter) and x.requires_grad:
                place = self._n_inputs + own
                self._weights[place] = number
                if n > 1:
                    self._dealt.add(place)
            self._n_inputs += n
        self._n_forward = -1
        self.__name__ = "zbpp"

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **about: Any
    ) -> Any:
        """Compile a finished graph: a forward, or a backward."""
        if not about.get("is_backward"):
            self._n_forward = len(inputs)
            return self._finish(graph, inputs, **about)
        (results,) = next(iter(reversed(graph.graph.nodes))).args
        n_results = len(results)
        why = self._refusal(n_results)
        pieces = [] if why else cut_weights(graph.graph, self._weights.keys())
        if pieces:
            graph.recompile()
        elif not why:
            why = "no product's weight"
        edges = _numbers(self._is_tensor)
        own = [tuple(self._weights[i] for i in piece.slots) for piece in pieces]
        region = Region(
            pieces,
            [tuple(edges[i] for i in numbers) for numbers in own],
            sum(self._is_tensor),
            frees_of(pieces),
            why,
            own,
            [i for piece in pieces for i in piece.slots if i in self._dealt],
        )
        compiled = self._finish(graph, inputs, **about)
        return run_with(compiled, n_results, region)

    def _refusal(self, n_results: int) -> str:
        """Say why nothing of the region can wait; empty: something may."""
        if not self._is_known:
            return "compiled with tensors made of tensors that are no DTensors"
        if self._n_forward != self._n_inputs or n_results < self._n_inputs:
            return "compiled with inputs that share memory"
        return ""


def _numbers(is_tensor: Sequence[bool]) -> list[int]:
    """Of each input, the tensors before it: its edge, as numbers have none."""
    numbers, n = [], 0
    for one in is_tensor:
        numbers.append(n)
        n += one
    return numbers
