"""The consequences of the decisions on steps so far; the same on every stage.

A step's decision moves the loss scale, the gate of speculation, and the count of
skipped steps: too many in a row end the run, with the place of the first bad gradient.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from zbpp.core import RequestError
from zbpp.runtime.optim.decision import Decision, StepSums
from zbpp.runtime.optim.loss_scale import LossScaler
from zbpp.runtime.optim.norms import NonFiniteFinder
from zbpp.runtime.optim.patience import Patience, SpeculationGate
from zbpp.runtime.support.errors import NonFiniteError

__all__ = ["History", "StepRules", "step_rules"]

_log = logging.getLogger("zbpp")


@dataclass(frozen=True)
class StepRules:
    """The rules by which steps are taken; `zbpp.Pipeline` explains the fields."""

    clip_grad_norm: float | None = None
    post_validation: bool = False
    patience: Patience = field(default_factory=Patience)
    loss_scale: LossScaler | None = None
    max_consecutive_skips: int | None = 5


def step_rules(
    *,
    clip_grad_norm: float | None,
    post_validation: bool,
    patience: Patience | None,
    loss_scale: LossScaler | float | None,
    max_consecutive_skips: int | None,
) -> StepRules:
    """Check what was asked for.

    Raises:
        RequestError: a value is out of its range.
    """
    if max_consecutive_skips is not None and max_consecutive_skips < 1:
        raise RequestError(
            f"max_consecutive_skips is {max_consecutive_skips}; choose 1 or more, or "
            "None for any number"
        )
    if isinstance(loss_scale, int | float):
        loss_scale = LossScaler(float(loss_scale), growth_interval=0)
    return StepRules(
        clip_grad_norm=clip_grad_norm,
        post_validation=post_validation,
        patience=patience or Patience(),
        loss_scale=loss_scale,
        max_consecutive_skips=max_consecutive_skips,
    )


class History:
    """The decisions so far, in what they lead to.

    Args:
        rules: of the pipeline.
        is_reporter: this stage logs what concerns all stages.
    """

    def __init__(self, rules: StepRules, *, is_reporter: bool = False) -> None:
        self._rules = rules
        self._warns = is_reporter
        self._gate = SpeculationGate(rules.patience)
        self.scaler = deepcopy(rules.loss_scale)
        self._skips = 0
        self.names: dict[int, tuple[int, list[str]]] = {}
        """Stage and parameter names of every layer of the whole model."""

    def state_dict(self) -> dict[str, Any]:
        """All that the next decisions depend on."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"gate": self._gate.state_dict(), "skips": self._skips, "scaler": scaler}

    def check_state(self, state: Mapping[str, Any]) -> list[str]:
        """Words about what does not fit in a saved state."""
        saved, here = state["scaler"] is not None, self.scaler is not None
        if saved == here:
            return []
        words = ("with", "without") if saved else ("without", "with")
        return [f"it was saved {words[0]} a loss scale, and this run is {words[1]} one"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._gate.load_state_dict(state["gate"])
        self._skips = int(state["skips"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    @property
    def speculates(self) -> bool:
        """The next step is taken before its norm is known."""
        return self._rules.post_validation and self._gate.is_open

    @property
    def searches(self) -> bool:
        """The next backward looks for gradients that are not finite."""
        limit = self._rules.max_consecutive_skips
        return limit is not None and self._skips >= limit - 1

    def note(self, decision: Decision, sums: StepSums) -> None:
        """A step has been decided, and done.

        Raises:
            NonFiniteError: it was skipped, as were too many before it.
        """
        speculated, searched = self.speculates, self.searches
        self._gate.note(decision.requires_rollback)
        if self._warns and speculated and not self.speculates:
            self._warns = False
            _warn_barrier_fallback(self._rules.patience)
        scaling = self.scaler is not None and self.scaler.may_shrink
        if self.scaler is not None:
            self.scaler.update(not decision.skipped)
        if not decision.skipped:
            self._skips = 0
        elif not scaling:
            self._skips += 1
            if searched:
                raise self._diagnosis(sums)

    def _diagnosis(self, sums: StepSums) -> NonFiniteError:
        found = NonFiniteFinder.first(sums.notes())
        where = "nowhere in the parameters"
        if found is not None:
            layer, place, microbatch = found
            stage, names = self.names[layer]
            where = f"on stage {stage} in {names[place]}, micro-batch {microbatch}"
        return NonFiniteError(
            f"{self._skips} step(s) in a row were skipped, as gradients were Inf or "
            f"NaN; in step {sums.step} (from 0) the first of them came up {where}: "
            "look at that layer and its inputs, lower the learning rate, or raise "
            "max_consecutive_skips"
        )


def _warn_barrier_fallback(patience: Patience) -> None:
    _log.warning(
        "post-validation: %d of the last %d steps had to be rolled back, so the "
        "optimizer now waits for the norm, until %d steps in a row need no correction",
        patience.failures,
        patience.window,
        patience.clean,
    )
