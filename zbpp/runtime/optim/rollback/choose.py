"""Choose the way in which an optimizer's speculative steps are rolled back."""

import torch

from zbpp.core import RequestError
from zbpp.runtime.optim.log_messages import log_not_compiled, warn_snapshot_cost
from zbpp.runtime.optim.param_groups import parameters_of
from zbpp.runtime.optim.rollback.adam_kernel import NoKernel
from zbpp.runtime.optim.rollback.parameter_only import ParameterStep
from zbpp.runtime.optim.rollback.recompute import RecomputeRollback, Rollback, can_defer
from zbpp.runtime.optim.rollback.snapshot import Snapshot
from zbpp.runtime.optim.step_state import StepRules
from zbpp.runtime.support.sharded import own_shard

__all__ = ["RollbackChooser"]

_PAYS = 2**25
"""Parameters of a stage; with fewer, compiling (seconds, 180 MiB) takes too long."""


class RollbackChooser:
    """The ways that have been needed so far.

    Args:
        optimizer: of one stage; None: it has no parameters.
        rules: what was asked for.
        is_reporter: whether it says what is not done as it was asked for.

    Raises:
        RequestError: a compiled step was asked for, and there is none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        rules: StepRules,
        *,
        is_reporter: bool,
    ) -> None:
        self._optimizer = optimizer
        self._asked = rules.rollback
        self._is_reporter = is_reporter
        self._made: dict[str, Rollback] = {}
        self._last = ""
        self._alone: ParameterStep | None = None
        if optimizer is not None and rules.post_validation:
            self._alone = self._compile(optimizer)

    def now(self) -> Rollback:
        """The rollback of the next step; the optimizer may have got hooks by now."""
        optimizer = self._optimizer
        assert optimizer is not None
        deferred = self._asked != "snapshot" and can_defer(optimizer)
        way = "deferred" if deferred else "snapshot"
        if way != self._last:
            self.forget()  # the other way has stepped
            self._last = way
        if way not in self._made:
            if deferred:
                self._made[way] = RecomputeRollback(optimizer, self._alone)
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

    def _compile(self, optimizer: torch.optim.Optimizer) -> ParameterStep | None:
        parameters = parameters_of(optimizer)
        learning = (p for p in parameters if p.requires_grad and p.device.type == "cpu")
        pays = sum(own_shard(p).numel() for p in learning) >= _PAYS
        if self._asked != "compiled" and (self._asked != "auto" or not pays):
            return None
        try:
            return ParameterStep(optimizer)
        except NoKernel as error:
            if self._asked == "compiled":
                raise RequestError(
                    f"rollback is 'compiled', but {error}; choose 'deferred'"
                ) from error
            if self._is_reporter:
                log_not_compiled(error)
            return None
