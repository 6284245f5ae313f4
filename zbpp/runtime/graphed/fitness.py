"""Chunks that can be recorded: those of which a replay does all that a pass does.

A graph repeats kernels on the memory of its first run. What a layer does on the host
(draw a seed, count calls, call a hook) it does not repeat, and what it writes it writes
unseen: where a step may be rolled back, buffers that change could not be restored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.chunk import Chunk
from zbpp.runtime.state_recorder import BufferRecorder, ForwardState
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import Nested, Tensors

__all__ = ["identity_of", "kind_of", "reason_against", "watched"]

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


def reason_against(chunk: Chunk) -> str:
    """Say why a chunk is not recorded, as far as it shows; empty: nothing does."""
    if chunk.leaves or chunk.shards or chunk.widen is not None:
        return "it has parameters that other layers or replicas have a part in"
    for module in _modules(chunk):
        if any(getattr(module, name, None) for name in _HOOKS):
            return f"a {type(module).__name__} has hooks"
    for _, name, p in chunk.all_leaves():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return f"{name} has hooks"
        if type(p) is not nn.Parameter or p.layout is not torch.strided:
            return f"{name} is a {type(p).__name__}"
    return ""


def watched(
    chunk: Chunk, device: torch.device, run: Callable[[], Tensors]
) -> tuple[Tensors, str]:
    """Run a forward as it is; say as well why it must not be recorded, or nothing."""
    state = ForwardState(BufferRecorder(chunk.layers), device)
    outputs = run()
    changed = state.buffers.changed(compares=True)
    state.end()
    if state.draws:
        return outputs, "it draws random numbers"
    if changed:
        return outputs, "it changes buffers"
    if isinstance(outputs, Nested):
        return outputs, "it gives more than tensors"
    return outputs, ""


def kind_of(taken: Tensors, targets: object) -> Any:
    """Describe what a forward reads: graphs are of micro-batches of one kind.

    None: of a kind that is not recorded.
    """
    if isinstance(taken, Nested):
        return None
    if any(type(x) is not Tensor or x.layout is not torch.strided for x in taken):
        return None
    numbers = [(x.shape, x.dtype, x.requires_grad) for x in taken]
    return (*numbers, repr(map_tensors(targets, _described)))


def _described(x: Tensor) -> Any:
    return x.dtype, tuple(x.shape)


def identity_of(chunk: Chunk) -> Any:
    """Tell what graphs of a chunk hold on to: memory, flags, and modes of modules."""
    modules = list(_modules(chunk))
    held: list[Tensor] = [p for _, _, p in chunk.all_leaves()]
    held += [b for module in modules for b in module.buffers(recurse=False)]
    where = [(x.data_ptr(), x.requires_grad) for x in held]
    return where, [module.training for module in modules]


def _modules(chunk: Chunk) -> list[nn.Module]:
    return [module for layer in chunk.layers for module in layer.modules()]
