"""The consequences of the decisions on steps so far; the same on every stage.

A decision moves three things:

    gate          closed: wait for the norm --(10 valid steps in a row)--> open
                  open: step at once --(3 of the last 10 were invalid)--> closed
    loss scale    shrinks after a skipped step, grows after many good ones
    skips         too many in a row end the run, with the place of the first bad
                  gradient

A run begins with the gate closed: gradients are large in the first steps of most
trainings, so their norm is clipped step after step, and all of these would be rolled
back.
"""

import logging
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self

from zbpp.runtime.optim.decision import Decision, StepSums
from zbpp.runtime.optim.norms import NonFiniteFinder
from zbpp.runtime.policies import LossScaler, Patience, StepPolicy
from zbpp.runtime.support.errors import NonFiniteError

__all__ = ["History", "SpeculationGate", "StepRules"]

_log = logging.getLogger("zbpp")


class SpeculationGate:
    """Open while steps are speculative.

    Args:
        patience: when it opens and closes.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._invalid: deque[bool] = deque(maxlen=patience.window)
        self._clean = 0
        self.is_open = patience.failures > patience.window

    def state_dict(self) -> dict[str, Any]:
        """The values that change from step to step."""
        return {
            "is_open": self.is_open,
            "clean": self._clean,
            "invalid": list(self._invalid),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.is_open = bool(state["is_open"])
        self._clean = int(state["clean"])
        self._invalid = deque(map(bool, state["invalid"]), self._patience.window)

    def note(self, invalid: bool) -> None:
        """Count a step; ``invalid``: a speculative one was, or would have been."""
        if self.is_open:
            self._invalid.append(invalid)
            if sum(self._invalid) >= self._patience.failures:
                self.is_open, self._clean = False, 0
        else:
            self._clean = 0 if invalid else self._clean + 1
            if self._clean >= self._patience.clean:
                self.is_open = True
                self._invalid.clear()


@dataclass(frozen=True)
class StepRules:
    """A `zbpp.StepPolicy` with every choice made, and the limit of the norm."""

    clip_grad_norm: float | None = None
    post_validation: bool = False
    patience: Patience = field(default_factory=Patience)
    loss_scale: LossScaler | None = None
    max_consecutive_skips: int | None = 5

    @classmethod
    def of(
        cls, policy: StepPolicy, *, clip_grad_norm: float | None, post_validation: bool
    ) -> Self:
        """Return the rules of a policy."""
        scale = policy.loss_scale
        if isinstance(scale, int | float):
            scale = LossScaler(float(scale), growth_interval=0)
        return cls(
            clip_grad_norm=clip_grad_norm,
            post_validation=post_validation,
            patience=policy.patience or Patience(),
            loss_scale=scale,
            max_consecutive_skips=policy.max_consecutive_skips,
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
        first = NonFiniteFinder.first(sums.notes())
        where = "nowhere in the parameters"
        if first is not None:
            layer, place, microbatch = first
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
