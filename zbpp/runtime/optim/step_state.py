"""The consequences of the decisions on steps so far; the same on every stage.

A decision moves three things:

    valid steps   10 in a row: the next step is speculative; it waits for the norm again
                  after a step that was clipped or skipped
    loss scale    shrinks after a skipped step, grows after many good ones
    skips         too many in a row end the run; the error names the layer

Most trainings begin with large gradients, which are clipped step after step: all of
these steps would be rolled back.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from zbpp.runtime.optim.decision import Decision, StepResult
from zbpp.runtime.policies import LossScaler, StepPolicy
from zbpp.runtime.support.errors import NonFiniteError

_VALID_STEPS = 10


class History:
    """The decisions so far, in what they lead to."""

    def __init__(self, policy: StepPolicy) -> None:
        self._policy = policy
        self._n_valid = 0
        scale = policy.loss_scale
        if isinstance(scale, int | float):
            scale = LossScaler(float(scale), growth_interval=0)
        self.scaler = deepcopy(scale)
        self._skips = 0

    def state_dict(self) -> dict[str, Any]:
        """All that the next decisions depend on."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"n_valid": self._n_valid, "skips": self._skips, "scaler": scaler}

    def check_state(self, state: Mapping[str, Any]) -> list[str]:
        """Words about what does not fit in a saved state."""
        saved, here = state["scaler"] is not None, self.scaler is not None
        if saved == here:
            return []
        words = ("with", "without") if saved else ("without", "with")
        return [f"it was saved {words[0]} a loss scale, and this run is {words[1]} one"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._n_valid = int(state["n_valid"])
        self._skips = int(state["skips"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    @property
    def speculates(self) -> bool:
        """The next step is taken before its norm is known."""
        chosen = self._policy.post_validation
        return self._n_valid >= _VALID_STEPS if chosen is None else chosen

    def note(self, decision: Decision, result: StepResult) -> None:
        """A step has been decided, and done.

        Raises:
            NonFiniteError: it was skipped, as were too many before it.
        """
        self._n_valid = 0 if decision.requires_rollback else self._n_valid + 1
        scaling = self.scaler is not None and self.scaler.may_shrink
        if self.scaler is not None:
            self.scaler.update(not decision.skipped)
        if not decision.skipped:
            self._skips = 0
        elif not scaling:
            self._skips += 1
            if self._skips == self._policy.max_consecutive_skips:
                raise self._diagnosis(result)

    def _diagnosis(self, result: StepResult) -> NonFiniteError:
        bad = torch.nonzero(~torch.isfinite(result.squared_norms()))
        # the backward begins with the last layer
        where = f"layers.{int(bad.max())}" if len(bad) else "no layer"
        return NonFiniteError(
            f"{self._skips} step(s) in a row were skipped, as gradients were Inf or "
            f"NaN; in step {result.step} (from 0) the first of them came up in "
            f"{where}: look at that layer and its inputs, lower the learning rate, or "
            "raise max_consecutive_skips"
        )
