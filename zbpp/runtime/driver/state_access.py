"""Who looks at parameters or optimizer state between steps finds validated ones."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["eval_mode", "settle_before_access"]


def settle_before_access(
    layers: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    action: Callable[[], None],
) -> None:
    """Call something before any state_dict is made or loaded.

    Args:
        layers: whose hooks are set; a model that holds them calls them too.
        optimizers: likewise.
        action: cheap if there is nothing to do.
    """

    def hook(*_: Any, **__: Any) -> None:
        action()

    owners: list[Any] = [*layers, *optimizers]
    for owner in owners:
        owner.register_state_dict_pre_hook(hook)
        owner.register_load_state_dict_pre_hook(hook)


@contextmanager
def eval_mode(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Layers in eval mode; afterwards each module is in its own mode again."""
    modes = [
        (module, module.training) for layer in layers for module in layer.modules()
    ]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
