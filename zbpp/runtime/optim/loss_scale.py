"""The factor on the loss that keeps fp16 gradients in range, as torch.amp's scaler.

A step whose gradients are not finite is skipped and shrinks the scale; so many good
steps in a row let it grow.
"""

import math

from zbpp.core import RequestError

__all__ = ["LossScaler"]


class LossScaler:
    """The rule and the state of ``torch.amp.GradScaler``, kept on the host.

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
