"""Settle the last step before a ``state_dict`` is taken or loaded, by torch's hooks.

Parameters that are read in any other way (`p.clone()`, `copy.deepcopy`, `pickle`) call
nothing that could settle: before that a script calls `pipeline.synchronize()`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["StateHooks"]


class _Settle:
    """A hook that calls an action. Copies and pickles of it do nothing: a copied
    module takes its hooks along, and is no part of the pipeline."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self._action = action

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._action is not None:
            self._action()

    def __reduce__(self) -> tuple[type["_Settle"], tuple[()]]:
        return _Settle, ()


class StateHooks:
    """The hooks of one pipeline on its modules and optimizers.

    Args:
        layers: whose modules get hooks; a model that holds them calls them too.
        optimizers: that get hooks.
        action: called before a state is taken or loaded; cheap if there is nothing to
            do.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        action: Callable[[], None],
    ) -> None:
        settle = _Settle(action)
        modules = dict.fromkeys(m for layer in layers for m in layer.modules())
        owners: list[Any] = [*modules, *optimizers]
        self._handles = [
            handle
            for owner in owners
            for handle in (
                owner.register_state_dict_pre_hook(settle),
                owner.register_load_state_dict_pre_hook(settle),
            )
        ]

    def remove(self) -> None:
        """Take the hooks away; those of other pipelines stay."""
        for handle in self._handles:
            handle.remove()
