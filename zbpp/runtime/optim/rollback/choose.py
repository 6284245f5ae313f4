"""Choose the way in which an optimizer's speculative steps are rolled back."""

import torch

from zbpp.runtime.optim.log_messages import warn_snapshot_cost
from zbpp.runtime.optim.rollback.recompute import RecomputeRollback, Rollback, can_defer
from zbpp.runtime.optim.rollback.snapshot import Snapshot
from zbpp.runtime.optim.step_state import StepRules

__all__ = ["RollbackChooser"]


class RollbackChooser:
    """The ways that have been needed so far.

    Args:
        optimizer: of one stage.
        rules: what was asked for.
        is_reporter: whether it says what a snapshot costs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rules: StepRules,
        *,
        is_reporter: bool,
    ) -> None:
        self._optimizer = optimizer
        self._asked = rules.rollback
        self._is_reporter = is_reporter
        self._made: dict[str, Rollback] = {}
        self._last = ""

    def now(self) -> Rollback:
        """The rollback of the next step; the optimizer may have got hooks by now."""
        optimizer = self._optimizer
        deferred = self._asked != "snapshot" and can_defer(optimizer)
        way = "deferred" if deferred else "snapshot"
        if way != self._last:
            self.forget()  # the other way has stepped
            self._last = way
        if way not in self._made:
            if deferred:
                self._made[way] = RecomputeRollback(optimizer)
            else:
                ahead = self._asked == "snapshot"
                self._made[way] = Snapshot(optimizer, ahead=ahead)
                if self._is_reporter and not ahead:
                    warn_snapshot_cost(optimizer)
        return self._made[way]

    def forget(self) -> None:
        """Others may write to parameters and state now."""
        for rollback in self._made.values():
            rollback.forget()
