"""When steps are taken early, and when it is not worth while.

    early --(3 of the last 10 steps were wrong)--> wait for the norm
    early <--(10 steps in a row needed no correction)-- wait for the norm

Every stage sees the same decisions at the same step, so all change together.
"""

from collections import deque
from dataclasses import dataclass

from zbpp.core import RequestError

__all__ = ["Patience", "SpeculationGate"]


@dataclass(frozen=True)
class Patience:
    """Thresholds of the change.

    Args:
        failures: so many wrong steps end early stepping; more than ``window``: never.
        window: among so many early steps.
        clean: so many steps in a row without a correction begin it again.

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
    """Whether the next step is taken early."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._wrong: deque[bool] = deque(maxlen=patience.window)
        self._clean = 0
        self.early = True

    def note(self, wrong: bool) -> None:
        """A step has been decided; ``wrong``: an early step was, or would have been."""
        if self.early:
            self._wrong.append(wrong)
            if sum(self._wrong) >= self._patience.failures:
                self.early, self._clean = False, 0
        else:
            self._clean = 0 if wrong else self._clean + 1
            if self._clean >= self._patience.clean:
                self.early = True
                self._wrong.clear()
