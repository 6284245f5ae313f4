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
import math
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self

from zbpp.core import RequestError
from zbpp.runtime.optim.decision import Decision, StepSums
from zbpp.runtime.optim.norms import NonFiniteFinder
from zbpp.runtime.policies import StepPolicy
from zbpp.runtime.support.errors import NonFiniteError

__all__ = ["History", "LossScaler", "Patience", "SpeculationGate", "StepRules"]

_log = logging.getLogger("zbpp")


@dataclass(frozen=True)
class Patience:
    """Thresholds of the change.

    Args:
        failures: so many invalid steps end speculation; more than ``window``: none do,
            and the first step of a run is speculative.
        window: among so many speculative steps.
        clean: so many steps in a row without a correction begin it, or begin it again.

    Raises:
        RequestError: one of them is below 1.
    """

    failures: int = 3
    window: int = 10
    clean: int = 10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")


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


class LossScaler:
    """The factor on the loss that keeps fp16 gradients in range, kept on the host.

    Its rule is that of ``torch.amp.GradScaler``.

    Args:
        scale: of the first step.
        growth_factor: of the scale.
        backoff_factor: of the scale, when it shrinks.
        growth_interval: good steps in a row before it grows; 0 keeps it constant.

    Raises:
        RequestError: a value is out of its range.

    >>> scaler = LossScaler(8.0, growth_interval=2)
    >>> for finite in (False, True, True):
    ...     scaler.update(finite)
    >>> scaler.scale
    8.0
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (0 < scale < math.inf and growth_factor >= 1 >= backoff_factor > 0):
            raise RequestError(
                f"a loss scale of {scale:g} that grows by {growth_factor:g} and "
                f"shrinks by {backoff_factor:g} makes no sense; choose a positive "
                "scale, a growth_factor of at least 1, a backoff_factor of at most 1"
            )
        if growth_interval < 0:
            raise RequestError(
                f"growth_interval is {growth_interval}; choose 0 or more"
            )
        self.scale = scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0

    def __repr__(self) -> str:
        return f"LossScaler({vars(self)})"  # ranks compare theirs by it

    def update(self, finite: bool) -> None:
        """A step has been decided: ``finite`` says whether it was taken."""
        if self._growth_interval == 0:
            return
        if not finite:
            self.scale *= self._backoff_factor
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            grown = self.scale * self._growth_factor
            self.scale = grown if math.isfinite(grown) else self.scale
            self._good_steps = 0

    @property
    def may_shrink(self) -> bool:
        """A skipped step may be the search for a scale, and no fault."""
        return self._growth_interval > 0 and self.scale > 1.0

    def state_dict(self) -> dict[str, float]:
        """The values that change from step to step."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])


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
