"""Weights of a pipeline that has trained nothing yet, put back after a profile.

    parameters, buffers      values, and the tensors themselves
    gradients                taken away
    optimizers               without state again
    random generators        torch's, Python's, numpy's

Copies of what lives on a GPU go to the host's memory: the GPU's may be full.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zbpp.runtime.executor import Executor
from zbpp.runtime.support.random_state import random_state, set_random_state

__all__ = ["training_kept"]

Restore = Callable[[], None]


@contextmanager
def training_kept(
    executors: Mapping[int, Executor], device: torch.device
) -> Iterator[None]:
    """Within this, passes and optimizer steps may run: nothing of them stays."""
    generators = random_state(device)
    restores: list[Restore] = []
    for executor in executors.values():
        optimizers = executor.optimizer.optimizers
        layers = nn.ModuleList(layer for _, layer in executor.stage.numbered())
        parameters = dict.fromkeys([*layers.parameters(), *optimizers.parameters()])
        restores += [_keep_parameter(p) for p in parameters]
        restores += [_keep_buffers(module) for module in layers.modules()]
        restores += map(_keep_optimizer, optimizers.all)
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in restores:
                restore()
        set_random_state(generators, device)


def _keep_value(tensor: Tensor) -> Restore:
    value = tensor.detach()
    value = value.clone() if value.device.type == "cpu" else value.cpu()

    def restore() -> None:
        if tensor.numel() and not tensor.is_inference():
            tensor.detach().copy_(value)

    return restore


def _keep_parameter(parameter: Tensor) -> Restore:
    restore_value = _keep_value(parameter)

    def restore() -> None:
        restore_value()
        parameter.grad = None

    return restore


def _keep_buffers(module: nn.Module) -> Restore:
    buffers = dict(module._buffers)
    values = [_keep_value(b) for b in buffers.values() if b is not None]

    def restore() -> None:
        module._buffers.clear()
        module._buffers.update(buffers)
        for restore_value in values:
            restore_value()

    return restore


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Restore:
    options = [
        {key: copy.deepcopy(group[key]) for key in group.keys() - {"params"}}
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)

    return restore
