"""Everything that training depends on, put back to the bit.

    parameters, buffers      values, and the tensors themselves
    gradients                taken away, and given back untouched
    optimizer state, groups  values, tensors, plain numbers
    random generators        torch's, Python's, numpy's

Copies of what lives on a GPU go to the host's memory: the GPU's may be full.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.executor import Executor
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.random_state import random_state, set_random_state

__all__ = ["training_kept"]

Restore = Callable[[], None]


@contextmanager
def training_kept(
    executors: Mapping[int, Executor], device: torch.device
) -> Iterator[None]:
    """Within this, passes and optimizer steps may run: nothing of them stays.

    Hooks of a user's own are called, and what they change outside of the model and
    the optimizers stays changed.

    Args:
        executors: of this process; their last steps must be validated.
        device: of the layers.
    """
    restores: list[Restore] = []
    for executor in executors.values():
        layers = nn.ModuleList(layer for _, layer in executor.stage.numbered())
        owned = executor.optimizer.optimizers.parameters()
        parameters = list(dict.fromkeys([*layers.parameters(), *owned]))
        restores += [_keep_gradient(p) for p in parameters]
        restores += [_keep_value(p) for p in parameters]
        restores += [_keep_buffers(module) for module in layers.modules()]
        restores += map(_keep_optimizer, executor.optimizer.optimizers.all)
    set_random = _keep_random(device)
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in restores:
                restore()
        set_random()


def _keep_value(tensor: Tensor) -> Restore:
    with torch.no_grad():
        if tensor.device.type == "cpu":
            held = tensor.detach().clone()
        else:
            held = tensor.detach().cpu()
    return lambda: _write(tensor, held)


def _write(tensor: Tensor, held: Tensor) -> None:
    if tensor.numel() and not tensor.is_inference():
        tensor.detach().copy_(held)


def _keep_gradient(parameter: Tensor) -> Restore:
    gradient, parameter.grad = parameter.grad, None

    def restore() -> None:
        parameter.grad = gradient

    return restore


def _keep_buffers(module: nn.Module) -> Restore:
    held = dict(module._buffers)
    values = [_keep_value(b) for b in held.values() if b is not None]

    def restore() -> None:
        module._buffers.clear()
        module._buffers.update(held)
        for restore_value in values:
            restore_value()

    return restore


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Restore:
    state = {key: _shallow(value) for key, value in optimizer.state.items()}
    values = [_keep_value(tensor) for tensor in tensors_in(state)]
    groups = [dict(group) for group in optimizer.param_groups]
    values += [
        _keep_value(value)
        for group in groups
        for value in group.values()
        if isinstance(value, Tensor)
    ]
    plain = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, bool | int | float | str | None)
    }

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, held in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(held)
        vars(optimizer).update(plain)
        for restore_value in values:
            restore_value()

    return restore


def _shallow(value: Any) -> Any:
    """A container of its own, with the same tensors in it."""
    if isinstance(value, dict):
        return {key: _shallow(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shallow(entry) for entry in value]
    return value if isinstance(value, Tensor) else copy.copy(value)


def _keep_random(device: torch.device) -> Restore:
    return partial(set_random_state, random_state(device), device)
