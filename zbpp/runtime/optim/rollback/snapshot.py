"""Roll back a step of any optimizer, by a copy of parameters and state."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.optim.param_groups import parameters_of
from zbpp.runtime.optim.rollback.copies import Copies, copy_value
from zbpp.runtime.support.pytree import tensors_in

__all__ = ["Snapshot"]


class Snapshot:
    """A copy of the parameters and of all state.

    Args:
        optimizer: its step may change its state, its groups and its parameters.
        ahead: copy after a valid step for the next one, where there is time for it;
            else the copy of the state is made in the step, and dropped after it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, ahead: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._ahead = ahead
        self._copies = Copies()  # of the parameters
        self._state_copies = Copies()
        self._taken: list[Tensor] = []
        self._state: dict[Any, Any] = {}
        self._plain: dict[str, Any] = {}

    @torch.no_grad()
    def speculate(self) -> None:
        """Copy what is not copied yet, then step."""
        optimizer = self._optimizer
        self._taken = []
        for parameter in self._stepped():
            self._copies.take(parameter)
            self._taken.append(parameter)
        self._state = copy_value(optimizer.state, self._state_copies.take)
        self._plain = {
            name: copy_value(value, Tensor.clone)
            for name, value in vars(optimizer).items()
            if isinstance(value, bool | int | float | Tensor)
        }
        try:
            with torch.enable_grad():
                optimizer.step()
        except BaseException:
            self.undo()
            raise

    @torch.no_grad()
    def commit(self) -> Iterator[None]:
        """Drop the copy of the state, or bring it up to date."""
        self._state = {}
        if not self._ahead:
            self._state_copies = Copies()
            return
        held = tensors_in(self._optimizer.state)
        self._state_copies.keep(held)
        for tensor in held:
            yield from self._state_copies.take_slowly(tensor)
        for parameter in self._stepped():
            yield from self._copies.take_slowly(parameter)

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back."""
        for parameter in self._taken:
            parameter.copy_(self._copies.of(parameter))
        self._state_copies = Copies()  # those that there are become the state
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        vars(self._optimizer).update(self._plain)

    def _stepped(self) -> list[Tensor]:
        """All parameters but those that have been frozen from the start."""
        state = self._optimizer.state
        return [
            p
            for p in parameters_of(self._optimizer)
            if p.requires_grad or p.grad is not None or p in state
        ]

    def forget(self) -> None:
        """Copy everything anew in the next step."""
        self._copies.forget()
        self._state_copies.forget()
