"""The only place that touches names which torch does not document.

Each has a fallback, so that a torch without the name is slower, not wrong.
"""

import importlib
from typing import Any

import torch
import torch.autograd.profiler
import torch.utils.checkpoint

__all__ = [
    "accumulates",
    "can_read_saved",
    "has_plain_step",
    "has_step_hooks",
    "mark_called",
    "plain_step",
    "profiling",
]


def profiling() -> bool:
    """Whether a profiler records; a range costs some 10 us even if none does.

    Seen in torch 2.9 to 2.13. Where the name is gone, ranges are always recorded.
    """
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def accumulates() -> bool:
    """Whether the backward that runs now is for all leaves, not ``autograd.grad``.

    Seen in torch 2.9 to 2.13. Where the name is gone, the answer is yes; torch's
    pipeline, which infers shapes by ``autograd.grad``, then adds that gradient too.
    """
    is_for_all = getattr(torch.autograd, "_is_checkpoint_valid", None)
    return is_for_all is None or bool(is_for_all())


class _Handles(dict[Any, Any]):
    """Keeps the handle of a recomputed tensor where checkpoint would strike it out."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def can_read_saved(node: Any, name: str) -> bool:
    """Whether a saved tensor of a node may be read once more than autograd does.

    A tensor that no hook has packed can be read at any time. One that activation
    checkpointing has packed is recomputed when it is first read, and refused when it is
    read again, though it is still there: it lives as long as its node. We lift the
    refusal; the recompute still happens once. Other hooks (offloading, say) are left
    alone.

    Seen in torch 2.13. Where a name is gone, the answer is no, and the gradients of
    the node are all computed in B.
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


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer calls functions of others.

    Seen in torch 2.9 to 2.13. Where a name is gone, the answer is yes.
    """
    module = importlib.import_module("torch.optim.optimizer")
    hooks = [
        *(getattr(module, f"_global_optimizer_{when}_hooks", None) for when in _WHEN),
        *(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in _WHEN),
    ]
    return any(hook is None or len(hook) > 0 for hook in hooks)


def has_plain_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is that of its class, and torch's wrapper around it is known.

    A learning-rate scheduler's wrapper only notes the call, and does not count.
    """
    replaced = vars(optimizer).get("step")
    return hasattr(type(optimizer).step, "hooked") and (
        replaced is None or hasattr(replaced, "_wrapped_by_lr_sched")
    )


_WHEN = ("pre", "post")


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Step without what torch wraps around every step: hooks and a profiler's range.

    Only for optimizers that have a plain step and no hooks.
    """
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def mark_called(optimizer: torch.optim.Optimizer) -> None:
    """Let a learning-rate scheduler know that a step was asked for before its own.

    The step itself comes later, and the scheduler would warn. Seen in torch 2.9 to
    2.13; elsewhere the mark does nothing.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
