"""The values of an optimizer's parameter groups (learning rate, betas, ...) in time.

    O     before --(speculative step)--> after
          scheduler.step() changes the learning rate
    V     now; the step is taken once more with the values ``before``

A value that is not now what it was after the speculative step has been changed by the
caller, and stays; any other becomes what the second step makes of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["GroupValues", "copy_groups", "parameters_of"]

_Values = list[dict[str, Any]]


def copy_groups(optimizer: torch.optim.Optimizer) -> _Values:
    """All values but the parameters; tensors are copied."""
    return [
        {name: _copy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Those of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class GroupValues:
    """The values that a step belongs to, kept for taking it later.

    Args:
        optimizer: whose values are kept; the speculative step comes between this and
            `end`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.before = copy_groups(optimizer)
        self._after = self.before

    def end(self) -> None:
        """The speculative step has been taken."""
        self._after = copy_groups(self._optimizer)

    def run(self, action: Callable[[], object]) -> None:
        """Do something with the values as they were before the step."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        changed = [
            {name for name in ours if not _same(ours[name], theirs.get(name))}
            for ours, theirs in zip(
                copy_groups(self._optimizer), self._after, strict=False
            )
        ]
        for group, values in zip(groups, self.before, strict=False):
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]
            group.update({name: _copy(value) for name, value in values.items()})
        action()
        for group, ours, names in zip(groups, now, changed, strict=False):
            group.update({name: ours[name] for name in names})
            for name, value in group.items():  # schedulers may hold the same tensor
                held = ours.get(name)
                if isinstance(held, Tensor) and name not in names:
                    held.copy_(value)
                    group[name] = held


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and torch.equal(left, right)
    return bool(left == right)
