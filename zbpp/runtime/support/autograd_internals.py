"""Private functions and attributes of autograd; see `private_names`."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.autograd.graph
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

LeafNode: Any = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
"""The type of leaves' nodes, ``AccumulateGrad``."""


def accumulates() -> bool:
    """True if the backward that runs now is for all leaves, not ``autograd.grad``."""
    is_for_all = getattr(torch.autograd, "_is_checkpoint_valid", None)
    return is_for_all is None or bool(is_for_all())


def is_built_in(node: Any) -> bool:
    """True for nodes of torch, which act alike in each kind of backward."""
    kind = type(node)
    return kind.__module__ == "builtins" and kind.__name__ != "CppFunction"


# ---- Saved tensors.


class _Handles(dict[Any, Any]):
    """Keeps the handle of a recomputed tensor where checkpoint would strike it out."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def packed_by_hooks(node: Any, raw_names: Iterable[str]) -> list[Any]:
    """Return those of a node's saved tensors that a hook has packed."""
    raw = [getattr(node, name) for name in raw_names]
    tensors = [y for x in raw for y in (x if isinstance(x, tuple) else (x,))]
    return [saved for saved in tensors if saved.unpack_hook is not None]


def may_be_read(node: Any, raw_names: Iterable[str]) -> bool:
    """True if these saved tensors may be read once more than autograd reads them.

    Activation checkpointing recomputes a tensor at its first read, and refuses a
    second one although the tensor lives as long as its node. This lifts the refusal.
    Tensors of other hooks (for example offloading) may not be read again.
    """
    for saved in packed_by_hooks(node, raw_names):
        handles = getattr(saved.data, "handles", None)
        if type(handles) is dict:
            saved.data.handles = _Handles(handles)
        elif type(handles) is not _Handles:
            return False
    return True


# ---- Hooks.

_n_own_hooks = 0


def hooks_made() -> float:
    """Count the hooks that users have registered so far; nan: unknown."""
    return getattr(RemovableHandle, "next_id", math.nan) - _n_own_hooks


def add_hook(register: Callable[..., RemovableHandle], hook: Any) -> RemovableHandle:
    """Register a hook of zbpp, which `hooks_made` leaves out; return its handle."""
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

    It ends at the wanted leaves or edges, at all leaves where there are none. Where it
    accumulates, it adds to ``.grad`` and returns nothing.
    """
    if _run_engine is not None and all([dy is not None for dy in gradients]):
        result: tuple[Tensor | None, ...] = _run_engine(
            tuple(ends),
            tuple(gradients),
            False,
            False,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=accumulates,
        )
        return result
    if accumulates:
        torch.autograd.backward(ends, gradients, inputs=wanted or None)
        return ()
    return torch.autograd.grad(ends, wanted, grad_outputs=gradients, allow_unused=True)
