"""The backend: ``torch.compile(block, backend="zbpp")``.

    dy ──┬── mm ── dx                          stays: B
         ├── sum ── db                         stays
         └── permute ── mm ── permute ── dw    goes to W; B puts dy and x out instead
    x  ─────────────────┘

Inductor compiles as ever: its decompositions, what it saves and what it computes again.
Each backward graph that it has finished comes by here, and loses the last product on
the way to a weight's gradient, with the views and casts behind it. They become a small
graph of their own, which W runs operator by operator: a product is one kernel already.
Where nobody waits for the pieces, all are computed at once, so that ``loss.backward()``
does what it always did.

torch finds the backend by its name, through the entry point of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from zbpp.runtime.support.compile_internals import (
    compile_graph,
    compile_with,
    current_node,
    inductor_options,
    missing,
)

__all__ = [
    "Call",
    "Compiling",
    "Piece",
    "compiled",
    "defer_piece",
    "is_worth_it",
    "pieces_of",
    "zbpp",
]

Compiling = Literal["blocks"] | bool
"""The parts that are compiled: ``"blocks"`` or True, each layer by itself."""

Call = Callable[[object], object]

_MAX_KINDS = 64
"""Compilations of one function before torch gives up: layers that differ in a number of
their own (``layer_idx``) need one each, and torch's 8 are few."""

_NO_GRAPHS = {"triton.cudagraphs": False}
"""A captured graph's next run writes where W still reads."""

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default, _ATEN._grouped_mm.default)
_BEHIND = (
    _ATEN.permute.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.reshape.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
    _ATEN.squeeze.default,
    _ATEN.alias.default,
    _ATEN.slice.Tensor,  # of a product that was padded
    _ATEN.mul.Tensor,  # by a number
    _ATEN.mul.Scalar,
    _ATEN.cat.default,
    torch.ops.prims.convert_element_type.default,
)
"""Steps that may follow a product on the way to its weight's gradient."""


class Piece(NamedTuple):
    """The gradient of one weight, to be computed in W.

    Args:
        slot: its place among the results of the backward.
        edge: number of the node's edge that it goes to.
        operands: places of what it is computed of, among all that B puts out for W.
        compute: takes the operands; returns the gradient, in a tuple.
    """

    slot: int
    edge: int
    operands: Sequence[int]
    compute: Callable[..., tuple[Tensor]]


# ---- Compilation.


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
    compiler = None if missing() else _Compiler(inputs)
    return compile_with(compiler, graph, inputs, chosen)


class _Compiler:
    """Compiles the graphs of one region.

    Args:
        inputs: examples of the region's.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.__name__ = "zbpp"
        self._n_inputs, self._n_forward = len(inputs), -1
        self._edges: dict[int, int] = {}
        """Of each weight by the place of its gradient among the backward's results, the
        number of the node's edge: numbers among the inputs have none."""
        self._n_tensors = 0
        for slot, x in enumerate(inputs):
            if isinstance(x, nn.Parameter) and x.requires_grad:
                self._edges[slot] = self._n_tensors
            self._n_tensors += isinstance(x, Tensor)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        """Compile a finished graph: a forward, or a backward."""
        if not how.get("is_backward"):
            self._n_forward = len(inputs)
            return compile_graph(graph, inputs, **how)
        (results,) = next(iter(reversed(graph.graph.nodes))).args
        pieces: list[Piece] = []
        # else inputs share memory, or are several tensors (DTensors): other places
        if self._n_forward == self._n_inputs <= len(results):
            pieces = cut_weights(graph.graph, self._edges)
            graph.recompile()
        run = compile_graph(graph, inputs, **how)
        return _run_with(run, len(results), pieces, self._n_tensors)


def cut_weights(graph: fx.Graph, edges: Mapping[int, int]) -> list[Piece]:
    """Take the weights' products out of a backward's graph, in place.

    The graph puts None out in their place, and their operands after all else.

    Args:
        graph: its first results are the gradients of its inputs.
        edges: `Piece.edge` of the gradients that may wait, by their places.
    """
    output = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(output.args[0])
    held: list[fx.Node] = []
    pieces = []
    for slot, edge in edges.items():
        body = _body(results[slot], output)
        if not body or results.count(results[slot]) > 1:
            continue
        ordered = [node for node in graph.nodes if node in body]
        used = [x for node in ordered for x in node.all_input_nodes if x not in body]
        operands = list(dict.fromkeys(used))
        piece = fx.Graph()
        copies = {x: piece.placeholder(x.name) for x in operands}
        for node in ordered:
            copies[node] = piece.node_copy(node, copies.__getitem__)
        piece.output((copies[results[slot]],))
        held += [x for x in operands if x not in held]
        places = [held.index(x) for x in operands]
        compute = fx.GraphModule({}, piece).forward
        pieces.append(Piece(slot, edge, places, compute))
        results[slot] = None
    visible = output.meta.get("user_visible_output_idxs")
    if visible is not None:
        output.meta["user_visible_output_idxs"] = [
            i for i in visible if results[i] is not None
        ]
    output.args = ((*results, *held),)
    graph.eliminate_dead_code()
    return pieces


def _body(node: Any, user: fx.Node) -> set[fx.Node]:
    """Return what leads from products to a result and serves nothing else, or nothing.

    Args:
        node: the result.
        user: of it.
    """
    if not isinstance(node, fx.Node) or list(node.users) != [user]:
        return set()
    above = node.all_input_nodes  # with symbols for sizes there are more
    if node.target in _PRODUCTS:
        is_plain = all(isinstance(x.meta.get("val"), Tensor) for x in above)
        return {node} if is_plain else set()
    if node.target not in _BEHIND:
        return set()
    parts = [_body(x, node) for x in above]
    return {node}.union(*parts) if parts and all(parts) else set()


# ---- At run time.


def _run_with(
    run: Callable[..., Any], n_results: int, pieces: Sequence[Piece], n_edges: int
) -> Any:
    """Return what autograd runs in place of a compiled backward.

    Args:
        run: what is left of it; puts operands of the pieces out after its results.
        n_results: of the backward as it was.
        pieces: that were cut off.
        n_edges: of the backward's node; another number is another way of calling.
    """

    def backward(args: list[Any]) -> list[Any]:
        results: list[Any] = list(run(args))
        held = results[n_results:]
        del results[n_results:]
        waiting = getattr(current_node(), "zbpp_waiting", None) or {}
        for slot, _, operands, compute in pieces:
            values = [held[i] for i in operands]
            put = waiting.get(slot)
            if put is not None:
                put(values)
            else:
                (results[slot],) = compute(*values)
        return results

    backward._boxed_call = True  # type: ignore[attr-defined]
    backward.zbpp_pieces = pieces, n_edges  # type: ignore[attr-defined]
    return backward


def pieces_of(node: Any) -> Sequence[Piece]:
    """Return what can wait of a node's backward: empty, if it is not compiled here."""
    forward = getattr(type(node), "_forward_cls", None)
    compiled_backward = getattr(forward, "compiled_bw", None)
    pieces, n_edges = getattr(compiled_backward, "zbpp_pieces", ((), -1))
    return pieces if n_edges == len(node.next_functions) else ()


def defer_piece(
    node: Any, slot: int, put: Callable[[Sequence[Tensor]], None] | None
) -> None:
    """Let the operands of a piece be kept when its node runs; it is not computed then.

    This is noted on the node, so that passes that run at once do not meet.

    Args:
        node: of the compiled part.
        slot: of the piece.
        put: takes the operands; None: nothing does any more.
    """
    waiting = getattr(node, "zbpp_waiting", None) or {}
    node.zbpp_waiting = {**waiting, slot: put}


# ---- Layers.


def is_worth_it(layer: nn.Module) -> bool:
    """True for layers of several modules: in a lone one there is nothing to fuse."""
    return any(True for _ in layer.children())


def compiled(call: Call) -> Call:
    """Return a call that is compiled when it first runs, and split by zbpp."""
    compile: Any = torch.compile
    wrapped: Call = compile(call, backend=zbpp, recompile_limit=_MAX_KINDS)
    return wrapped
