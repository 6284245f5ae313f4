"""The simulated step next to the measured step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from zbpp.core import Costs, Schedule, Timeline
from zbpp.simulator import bubble_rate, simulate, steady_step_time

_MS = 1e3


@dataclass(frozen=True)
class Prediction:
    """Times in ms, and bubble rates of the bottleneck (`bubble_rate`).

    Stages that share a process run one after the other, so they are not measured.

    Args:
        step_predicted: of a step among many, optimizer included.
        step_measured: median of the last steps, from start to start.
        bubble_predicted: of the simulated step.
        bubble_measured: median of the last steps.
        has_given_costs: costs of the caller; else those of the same steps.
    """

    step_predicted: float
    step_measured: float | None
    bubble_predicted: float
    bubble_measured: float | None
    has_given_costs: bool

    @property
    def line(self) -> str:
        """One line for a log."""
        whose = "given costs" if self.has_given_costs else "the costs of the last steps"
        line = f"prediction (simulated with {whose}): step {self.step_predicted:.4g} ms"
        if self.step_measured is not None:
            away = self.step_measured / self.step_predicted - 1
            line += f" predicted, {self.step_measured:.4g} measured ({away:+.1%})"
        line += f"; bubble {self.bubble_predicted:.1%} predicted"
        if self.bubble_measured is not None:
            line += f", {self.bubble_measured:.1%} measured"
        return line


def predict(
    schedule: Schedule,
    timelines: Sequence[Timeline],
    costs: Costs,
    *,
    costs_given: bool,
    side_by_side: bool,
) -> Prediction:
    """Simulate a schedule, and compare it with its last steps.

    Args:
        schedule: of the steps.
        timelines: of the last steps, in seconds, oldest first.
        costs: in ms.
        costs_given: by the caller.
        side_by_side: every stage is a process.
    """
    periods = [
        _MS * (after.rows[stage][0].start - before.rows[stage][0].start)
        for before, after in pairwise(timelines)
        for stage in range(schedule.n_stages)
    ]
    return Prediction(
        step_predicted=steady_step_time(schedule, costs),
        step_measured=median(periods) if side_by_side and periods else None,
        bubble_predicted=bubble_rate(simulate(schedule, costs)),
        bubble_measured=median(map(bubble_rate, timelines)) if side_by_side else None,
        has_given_costs=costs_given,
    )
