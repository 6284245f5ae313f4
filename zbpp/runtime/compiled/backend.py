"""The backend: ``torch.compile(block, backend="zbpp")``.

Inductor compiles as ever: its decompositions, what it saves and what it computes again.
Each backward graph that it has finished comes by here, and loses the weights' products
(`cut`). torch finds the backend by its name, through the entry point of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from zbpp.runtime.compiled.cut import cut_weights
from zbpp.runtime.compiled.region import Region, last_uses, run_with
from zbpp.runtime.support.compile_internals import (
    compile_graph,
    compile_with,
    graph_inputs,
    inductor_options,
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
        self._n_inputs = sum(map(graph_inputs, inputs))
        self._n_gradients = self._n_tensors = 0
        self._edges: dict[int, int] = {}
        """Of each weight by the place of its gradient among the backward's results, the
        number of the node's edge: numbers among the inputs have none."""
        self._dtensors: set[int] = set()
        """Places of gradients that the node makes DTensors of."""
        for x in inputs:
            learns = isinstance(x, Tensor) and x.requires_grad
            n = graph_inputs(x) if learns else 1
            if learns and isinstance(x, nn.Parameter):
                self._edges[self._n_gradients] = self._n_tensors
                if n > 1:
                    self._dtensors.add(self._n_gradients)
            self._n_gradients += n
            self._n_tensors += isinstance(x, Tensor)
        self._n_forward = -1
        self.__name__ = "zbpp"

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **compile_kwargs: Any
    ) -> Any:
        """Compile a finished graph: a forward, or a backward."""
        if not compile_kwargs.get("is_backward"):
            self._n_forward = len(inputs)
            return compile_graph(graph, inputs, **compile_kwargs)
        (results,) = next(iter(reversed(graph.graph.nodes))).args
        n_results = len(results)
        why, pieces = "", []
        if self._n_forward != self._n_inputs or n_results < self._n_gradients:
            why = "compiled with inputs that share memory, or are several tensors"
        else:
            pieces = cut_weights(graph.graph, self._edges.keys())
        if pieces:
            graph.recompile()
        elif not why:
            why = "no product's weight"
        region = Region(
            pieces,
            [tuple(self._edges[i] for i in piece.slots) for piece in pieces],
            self._n_tensors,
            last_uses(pieces),
            {
                slot: (piece.recipe.dtype, n_dims)
                for piece in pieces
                for slot, n_dims in zip(piece.slots, piece.recipe.n_dims, strict=True)
                if slot in self._dtensors
            },
            why,
        )
        compiled = compile_graph(graph, inputs, **compile_kwargs)
        return run_with(compiled, n_results, region)
