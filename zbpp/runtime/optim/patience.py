"""The choice of speculative steps, and of others where they are not worth while.

    closed: wait for the norm --(10 valid steps in a row)--> open
    open: step at once --(3 of the last 10 steps were invalid)--> closed

A run begins closed: gradients are large in the first steps of most trainings, so their
norm is clipped step after step, and all of these would be rolled back. Every stage sees
the same decisions at the same step, so all gates move together.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zbpp.core import RequestError

__all__ = ["Patience", "SpeculationGate"]


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
