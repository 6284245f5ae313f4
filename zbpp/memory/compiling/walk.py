"""Walk through a finished graph of the compiler, and count what its kernels would take.

    products, reductions, results    take memory
    pointwise steps before them      are fused, and take none
    a result of such steps           goes where an operand of its size ends

The compiler has further rules, so the peaks inside a graph are near to its own; what is
there in the end is its own.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from zbpp.memory.tracker import StorageTracker

__all__ = ["GraphWalk"]

_ATEN = torch.ops.aten
_VIEWS = {
    *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default),
    *(_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int),
    *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
    *(_ATEN.expand.default, _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.alias.default),
    *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default),
}
_FUSED = {
    *(_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.full.default),
    *(_ATEN.full_like.default, _ATEN.embedding.default, _ATEN.gather.default),
    *(_ATEN.select_scatter.default, _ATEN.slice_scatter.default),
    *(_ATEN.constant_pad_nd.default, _ATEN.copy.default, _ATEN.arange.start_step),
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.iota.default,
}
_REDUCED = {
    *(_ATEN.sum.dim_IntList, _ATEN.sum.default, _ATEN.mean.dim, _ATEN.mean.default),
    *(_ATEN.amax.default, _ATEN.amin.default, _ATEN.var_mean.correction),
    _ATEN.var.correction,
}


class GraphWalk:
    """Runs a graph node by node, and lets go of what has no further use.

    Args:
        graph: that is finished.
        mode: of all fake tensors.
    """

    def __init__(self, graph: fx.Graph, mode: Any) -> None:
        self._mode = mode
        self._nodes = list(graph.nodes)
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        self._is_real = {node: _is_real(node) for node in self._nodes}
        for node in reversed(self._nodes):
            if self._is_real[node] and _is_view(node):
                for above in node.all_input_nodes:
                    self._is_real[above] = True
        self._ends = self._last_uses()

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """By node, what nobody reads after it; fused steps read where they end up."""
        last: dict[fx.Node, int] = {}
        end = len(self._nodes) - 2
        place = {
            node: end if _is_late(node) else i for i, node in enumerate(self._nodes)
        }
        for node in reversed(self._nodes):
            mine = max([last.get(node, 0), place[node]])
            for above in node.all_input_nodes:
                at = mine if not self._is_real[node] or _is_view(node) else place[node]
                last[above] = max(last.get(above, 0), at)
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            found.setdefault(self._nodes[last.get(node, place[node])], []).append(node)
        return found

    def run(self, args: list[Any], tracker: StorageTracker) -> Any:
        """Run the graph; the list of its inputs is emptied.

        Args:
            args: its inputs.
            tracker: counts what takes memory.
        """
        known: dict[fx.Node, Any] = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for node in self._nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], known.__getitem__)
            if node.op != "placeholder":
                known[node] = self._one(node, known, tracker)
            for one in self._ends.get(node, ()):
                known.pop(one, None)
        raise AssertionError("a graph ends in its output")

    def _one(
        self, node: fx.Node, known: dict[fx.Node, Any], tracker: StorageTracker
    ) -> Any:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
        if not (_is_fused(node) or _is_view(node) or node.target in _REDUCED):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        with _disable_current_modes(), self._mode:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        del args, kwargs
        if not self._is_real[node] or _is_view(node):
            return result
        if _is_fused(node):
            self._take_place(node, _storage(result).nbytes(), known)
        tracker.count(result)
        return result

    def _take_place(
        self, node: fx.Node, n_bytes: int, known: dict[fx.Node, Any]
    ) -> None:
        """Let go of one operand of a result's size that nobody reads any more."""
        over = {
            one: _storage(known[one])
            for one in self._ends.get(node, ())
            if one in known and isinstance(known[one], Tensor)
        }
        for one, storage in over.items():
            if self._is_real[one] and storage.nbytes() == n_bytes:
                for other, its in over.items():
                    if its._cdata == storage._cdata:
                        del known[other]
                return


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _is_late(node: fx.Node) -> bool:
    """True for a sum that nothing in the graph reads: one kernel makes all, last."""
    if node.target not in _REDUCED:
        return False
    users = list(node.users)
    while any(user.op != "output" for user in users):
        if not all(_is_view(x) or _is_fused(x) for x in users if x.op != "output"):
            return False
        users = [user for one in users for user in one.users]
    return True


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS or getattr(node.target, "__name__", "") == "getitem"


def _is_fused(node: fx.Node) -> bool:
    """True for steps that the compiler makes within others."""
    tags = getattr(node.target, "tags", ())
    return node.target in _FUSED or torch.Tag.pointwise in tags


def _is_real(node: fx.Node) -> bool:
    """True for a result that takes memory, by its own kind and its readers'."""
    if not (_is_fused(node) or _is_view(node)):
        return True
    return any(
        not (_is_fused(user) or _is_view(user) or user.target in _REDUCED)
        for user in node.users
    )
