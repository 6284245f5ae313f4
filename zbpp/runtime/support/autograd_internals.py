"""Questions to graphs and nodes by names of torch's own; see `private_names`."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = [
    "LeafNode",
    "NoGrad",
    "accumulates",
    "add_hook",
    "can_read_saved",
    "edge_at",
    "has_saved",
    "hooks_made",
    "is_built_in",
    "is_packed",
    "leaves_behind",
    "run_backward",
    "sequence_number",
]


Hook = Callable[..., Any]

LeafNode: Any = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The type of leaves' nodes, ``AccumulateGrad``."""


def accumulates() -> bool:
    """True if the backward that runs now is for all leaves, not ``autograd.grad``."""
    is_for_all = getattr(torch.autograd, "_is_checkpoint_valid", None)
    return is_for_all is None or bool(is_for_all())


class NoGrad:
    """``torch.no_grad()`` in a fifth of its time: a pass enters one every time."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _has_grad()
        _set_grad(False)

    def __exit__(self, *_: object) -> None:
        _set_grad(self._before)


_has_grad = torch.is_grad_enabled
_set_grad: Callable[[bool], object] = getattr(
    torch._C, "_set_grad_enabled", torch.set_grad_enabled
)


class _Handles(dict[Any, Any]):
    """Keeps the handle of a recomputed tensor where checkpoint would strike it out."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


@cache
def has_saved(node_type: Any, names: tuple[str, ...]) -> bool:
    """True if nodes of a type show these saved values, as ``_saved_<name>``.

    Where one is gone, the gradients of such nodes are all computed in B.
    """
    return all(hasattr(node_type, f"_saved_{name}") for name in names)


def can_read_saved(node: Any, name: str) -> bool:
    """True if a saved tensor of a node may be read once more than autograd does.

    A tensor that no hook has packed can be read at any time. One that activation
    checkpointing has packed is recomputed when it is first read, and refused when it is
    read again, though it is still there: it lives as long as its node. We lift the
    refusal; the recompute still happens once. Other hooks (offloading, say) are left
    alone.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or not hasattr(raw, "unpack_hook"):
        return False
    if raw.unpack_hook is None:
        return True
    holder = raw.data
    holder_type = getattr(torch.utils.checkpoint, "_Holder", None)
    if holder_type is None or type(holder) is not holder_type:
        return False
    handles = getattr(holder, "handles", None)
    if type(handles) is dict:
        holder.handles = _Handles(handles)
        return True
    return type(handles) is _Handles


def is_packed(node: Any, name: str) -> bool:
    """True if a hook has packed a saved tensor of a node; see `can_read_saved`.

    Or one of those in a saved list of tensors.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if isinstance(raw, tuple):
        return any(getattr(saved, "unpack_hook", saved) is not None for saved in raw)
    return raw is None or getattr(raw, "unpack_hook", raw) is not None


def is_built_in(node: Any) -> bool:
    """True if a node is torch's own: it cannot ask which kind of backward runs."""
    kind = type(node)
    return kind.__module__ == "builtins" and kind.__name__ != "CppFunction"


def run_backward(
    ends: Sequence[Any],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[Any],
    *,
    accumulates: bool,
) -> tuple[Tensor | None, ...]:
    """Run a backward whose arguments are known to be right.

    Without torch's checks, which take as long as two small nodes, but where a gradient
    is left to torch.

    Args:
        ends: where it starts.
        gradients: of these.
        wanted: where it ends; empty: at all leaves.
        accumulates: add to ``.grad``, as ``torch.autograd.backward`` does, and return
            nothing; False returns gradients, as ``torch.autograd.grad`` does.
    """
    run = _engine(gradients)
    if run is not None:
        returned: tuple[Tensor | None, ...] = run(
            tuple(ends),
            tuple(gradients),
            False,
            False,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=accumulates,
        )
        return returned
    if accumulates:
        torch.autograd.backward(ends, gradients, inputs=wanted or None)
        return ()
    return torch.autograd.grad(ends, wanted, grad_outputs=gradients, allow_unused=True)


def _engine(gradients: Sequence[Tensor | None]) -> Callable[..., Any] | None:
    """Return the engine's own call; None if there is none, or torch must make ones.

    On a CPU it is called without what torch prepares for threads of devices.
    """
    of_cpus = _ON_CPUS
    for dy in gradients:
        if dy is None:
            return None
        if of_cpus is not None and not dy.is_cpu:
            of_cpus = None
    return of_cpus or getattr(torch.autograd.graph, "_engine_run_backward", None)


_ON_CPUS: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)


_NO_MORE = (None,) * (len(GradientEdge._fields) - 2)


def edge_at(node: Any, output: int) -> GradientEdge:
    """``GradientEdge(node, output)``, in half its time: made by the hundred in a B."""
    return tuple.__new__(GradientEdge, (node, output, *_NO_MORE))


def leaves_behind(root: Any) -> list[Tensor]:
    """The leaves that a gradient goes to from here.

    Args:
        root: a leaf, or a node and the number of its output.
    """
    if isinstance(root, Tensor):
        return [root]
    left, seen, leaves = [root[0]], set(), []
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        left += [after for after, _ in node.next_functions]
    return leaves


_n_own_hooks = 0


def hooks_made() -> int | None:
    """Count the hooks that others have registered so far; None: unknown."""
    n = getattr(RemovableHandle, "next_id", None)
    return None if n is None else n - _n_own_hooks


def add_hook(register: Callable[[Hook], RemovableHandle], hook: Hook) -> Any:
    """Register a hook of our own; return its handle."""
    global _n_own_hooks
    _n_own_hooks += 1
    return register(hook)


def sequence_number(node: Any) -> int:
    """Return the number of a node, which no other that its thread has made has.

    Leaves' nodes have one above all others.
    """
    return int(node._sequence_nr())
