"""Which way an optimizer's early steps are taken back."""

import torch

from zbpp.runtime.history import StepRules
from zbpp.runtime.notices import say_what_a_snapshot_costs
from zbpp.runtime.snapshot import Snapshot
from zbpp.runtime.speculate import Deferred, Rollback, can_defer

__all__ = ["Rollbacks"]


class Rollbacks:
    """The ways that have been needed so far.

    Args:
        rules: what was asked for.
        speaks: whether it says that a snapshot is made though it was not asked for.
    """

    def __init__(self, rules: StepRules, *, speaks: bool) -> None:
        self._rules = rules
        self._speaks = speaks
        self._made: dict[str, Rollback] = {}
        self._last = ""

    def of(self, optimizer: torch.optim.Optimizer) -> Rollback:
        """What can take a step back; the optimizer may have got hooks by now."""
        asked = self._rules.rollback
        way = asked if can_defer(optimizer) else "snapshot"
        if way != self._last:
            self.forget()  # the other way has stepped
            self._last = way
        if way not in self._made:
            if way == "deferred":
                self._made[way] = Deferred(optimizer)
            else:
                self._made[way] = Snapshot(optimizer, ahead=asked == "snapshot")
                if self._speaks and asked == "deferred":
                    say_what_a_snapshot_costs(optimizer)
        return self._made[way]

    def forget(self) -> None:
        """Others may write to parameters and state now."""
        for rollback in self._made.values():
            rollback.forget()
