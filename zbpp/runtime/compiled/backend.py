"""The backend: ``torch.compile(block, backend="zbpp")``.

    dy ──┬── mm ── dx                          stays: B
         ├── sum ── db                         stays
         └── permute ── mm ── permute ── dw    goes to W; B puts dy and x out instead
    x  ─────────────────┘

Inductor decomposes and partitions the block as usual. This backend then cuts the last
product on the way to each weight's gradient out of the backward graph, with the views
and casts behind it. Such a piece becomes a small graph, which W runs operator by
operator: a product is one kernel already. In a plain ``loss.backward()`` nothing waits,
and the backward computes all pieces at once.

torch finds the backend by name, through the entry point of the package.
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
)

Compiling = Literal["blocks"] | bool
"""``"blocks"`` or True: compile each layer by itself."""

Call = Callable[[object], object]

_MAX_KINDS = 64
"""Compilations of one function: layers with different numbers (``layer_idx``) need one
each, more than torch's 8."""

_NO_GRAPHS = {"triton.cudagraphs": False}
"""A CUDA graph's next run would overwrite tensors that W still reads."""

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
    """The gradient of one weight, which W can compute."""

    slot: int
    """Its place among the results of the backward."""
    edge: int
    """Number of the node's edge to the weight."""
    operands: Sequence[int]
    """Places of its operands, among all that B returns for W."""
    compute: Callable[..., tuple[Tensor]]
    """Takes the operands; returns the gradient, in a tuple."""


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
        graph: of Dynamo.
        inputs: examples.
        mode: of `torch.compile`.
        options: of Inductor.

    Raises:
        RuntimeError: Inductor has no such mode or option.
    """
    settings = inductor_options(mode, options) | _NO_GRAPHS
    call: Callable[..., Any] = compile_with(_Compiler(inputs), graph, inputs, settings)
    return call


class _Compiler:
    """Compiles the graphs of one region, for examples of its inputs."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.__name__ = "zbpp"
        self._n_inputs, self._n_forward = len(inputs), -1
        self._edges: dict[int, int] = {}
        """Edge of the node by the place of a weight's gradient among the backward's
        results: inputs that are numbers have no edge."""
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
        # the places differ where inputs share memory, or are several tensors (DTensor)
        if self._n_forward == self._n_inputs <= len(results):
            pieces = cut_weights(graph.graph, self._edges)
            graph.recompile()
        run = compile_graph(graph, inputs, **how)
        return _run_with(run, len(results), pieces, self._n_tensors)


def cut_weights(graph: fx.Graph, edges: Mapping[int, int]) -> list[Piece]:
    """Cut the weights' products out of a backward's graph, in place.

    The graph then returns None in their places, and their operands behind all results.
    `edges` has `Piece.edge` of each gradient that may wait, by its place.
    """
    output = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(output.args[0])
    for_w: list[fx.Node] = []
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
        for_w += [x for x in operands if x not in for_w]
        places = [for_w.index(x) for x in operands]
        compute = fx.GraphModule({}, piece).forward
        pieces.append(Piece(slot, edge, places, compute))
        results[slot] = None
    visible = output.meta.get("user_visible_output_idxs")
    if visible is not None:
        output.meta["user_visible_output_idxs"] = [
            i for i in visible if results[i] is not None
        ]
    output.args = ((*results, *for_w),)
    graph.eliminate_dead_code()
    return pieces


def _body(node: Any, user: fx.Node) -> set[fx.Node]:
    """Return the nodes from products to one that only `user` uses; empty: none fit."""
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
    """Return the function that autograd runs in place of a compiled backward.

    `run` is the backward without the pieces, whose operands follow its `n_results`. A
    node without `n_edges` edges belongs to another kind of call.
    """

    def backward(args: list[Any]) -> list[Any]:
        results: list[Any] = list(run(args))
        for_w = results[n_results:]
        del results[n_results:]
        waiting = getattr(current_node(), "zbpp_waiting", None) or {}
        for slot, _, operands, compute in pieces:
            values = [for_w[i] for i in operands]
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
    """Return the pieces of a node's backward, if this backend has compiled it."""
    forward = getattr(type(node), "_forward_cls", None)
    compiled_backward = getattr(forward, "compiled_bw", None)
    pieces, n_edges = getattr(compiled_backward, "zbpp_pieces", ((), -1))
    return pieces if n_edges == len(node.next_functions) else ()


def defer_piece(
    node: Any, slot: int, put: Callable[[Sequence[Tensor]], None] | None
) -> None:
    """Pass the operands of a piece to `put` when its node runs, and do not compute it.

    The node has the note, so passes that overlap do not share it. None ends it.
    """
    waiting = getattr(node, "zbpp_waiting", None) or {}
    node.zbpp_waiting = {**waiting, slot: put}


# ---- Layers.


def is_worth_it(layer: nn.Module) -> bool:
    """True for layers of several modules: a single module has nothing to fuse."""
    return any(True for _ in layer.children())


def compiled(call: Call) -> Call:
    """Compile a call at its first run, with this backend."""
    compile: Any = torch.compile
    wrapped: Call = compile(call, backend=zbpp, recompile_limit=_MAX_KINDS)
    return wrapped
