"""Questions to graphs and nodes by names of torch's own; see `private_names`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.autograd.graph
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = [
    "LeafNode",
    "accumulates",
    "add_hook",
    "hooks_made",
    "is_built_in",
    "may_be_read",
    "no_hook_packed",
    "run_backward",
]

LeafNode: Any = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The type of leaves' nodes, ``AccumulateGrad``."""


def accumulates() -> bool:
    """True if the backward that runs now is for all leaves, not ``autograd.grad``."""
    is_for_all = getattr(torch.autograd, "_is_checkpoint_valid", None)
    return is_for_all is None or bool(is_for_all())


def is_built_in(node: Any) -> bool:
    """True if a node is torch's own: it cannot ask which kind of backward runs."""
    kind = type(node)
    return kind.__module__ == "builtins" and kind.__name__ != "CppFunction"


# ---- Saved tensors.


class _Handles(dict[Any, Any]):
    """Keeps the handle of a recomputed tensor where checkpoint would strike it out."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def no_hook_packed(node: Any, raw_names: Iterable[str]) -> bool:
    """True if saved tensors of a node are there as they are."""
    for name in raw_names:
        raw = getattr(node, name)
        if isinstance(raw, tuple):
            if any(x.unpack_hook is not None for x in raw):
                return False
        elif raw.unpack_hook is not None:
            return False
    return True


def may_be_read(node: Any, raw_names: Iterable[str]) -> bool:
    """True if saved tensors of a node may be read once more than autograd does.

    A tensor that activation checkpointing has packed is recomputed when it is first
    read, and refused when it is read again, though it lives as long as its node. We
    lift the refusal. Other hooks (offloading, say) are left alone.
    """
    for name in raw_names:
        saved = getattr(node, name)
        if saved.unpack_hook is None:
            continue
        handles = getattr(saved.data, "handles", None)
        if type(handles) is dict:
            saved.data.handles = _Handles(handles)
        elif type(handles) is not _Handles:
            return False
    return True


# ---- Hooks.

_n_own_hooks = 0


def hooks_made() -> int | None:
    """Count the hooks that others have registered so far; None: unknown."""
    n = getattr(RemovableHandle, "next_id", None)
    return None if n is None else n - _n_own_hooks


def add_hook(register: Callable[..., RemovableHandle], hook: Any) -> RemovableHandle:
    """Register a hook of our own; return its handle."""
    global _n_own_hooks
    _n_own_hooks += 1
    return register(hook)


# ---- The engine.

_run_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(
    ends: Sequence[Any],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[Any] = (),
    *,
    accumulates: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run a backward, without torch's checks of its arguments, which take 50 us.

    Args:
        ends: leaves or edges where it starts.
        gradients: of these.
        wanted: leaves or edges where it ends; empty: at all leaves.
        accumulates: add to ``.grad``, as ``torch.autograd.backward`` does, and return
            nothing; False returns gradients, as ``torch.autograd.grad`` does.
    """
    if _run_engine is not None and all([dy is not None for dy in gradients]):
        found: tuple[Tensor | None, ...] = _run_engine(
            tuple(ends),
            tuple(gradients),
            False,
            False,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=accumulates,
        )
        return found
    if accumulates:
        torch.autograd.backward(ends, gradients, inputs=wanted or None)
        return ()
    return torch.autograd.grad(ends, wanted, grad_outputs=gradients, allow_unused=True)
