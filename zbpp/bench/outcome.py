"""Steps, memory and gradients of one contender, over all its turns."""

import statistics
from dataclasses import dataclass

from zbpp.bench.contender import Measured
from zbpp.bench.ours import Promised
from zbpp.bench.turns import Turn

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """The findings about one contender.

    Args:
        name: of the contender.
        difference: of its gradients, 0.0 for the same bits; None: nothing was compared.
        turns: without any it was not timed.
        measured: its jobs, where they can be told.
        promised: the same jobs by the simulator, for modes of ours.
    """

    name: str
    difference: float | None
    turns: tuple[Turn, ...]
    measured: Measured | None = None
    promised: Promised | None = None

    def is_wrong(self, tolerance: float) -> bool:
        """True if its gradients are further off than that."""
        return self.difference is not None and not self.difference <= tolerance

    @property
    def steps_s(self) -> list[float]:
        """Seconds of all steps that count."""
        return [step for turn in self.turns for step in turn.steps_s]

    @property
    def step_s(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile of the steps."""
        steps = self.steps_s
        if len(steps) < 2:
            return steps[0], steps[0]
        low, _, high = statistics.quantiles(steps, method="inclusive")
        return low, high

    @property
    def peak_bytes(self) -> list[int | None]:
        """Largest memory of each process in any turn."""
        by_process = zip(*(turn.peak_bytes for turn in self.turns), strict=True)
        return [
            None if None in peaks else max(peak for peak in peaks if peak is not None)
            for peaks in by_process
        ]

    @property
    def host_us(self) -> float:
        """Median over turns of the CPU time of a job, on the process that has most."""
        return 1e6 * statistics.median(max(turn.host_s) for turn in self.turns)

    def gradients(self, tolerance: float) -> str:
        """One word or two on the gradients."""
        if self.difference is None:
            return ""
        if self.difference == 0:
            return "same bits"
        off = f"off by {self.difference:.1e}"
        return f"refused: {off}" if self.is_wrong(tolerance) else off
