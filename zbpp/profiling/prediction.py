"""The simulated step beside the measured one: what a plan promised, and what came."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from zbpp.core import Costs, Schedule, Timeline, format_bytes
from zbpp.simulator import bubble_rate, peak_memory, simulate, steady_step_time

__all__ = ["Prediction", "measured_step", "predict"]

_MS = 1e3


@dataclass(frozen=True)
class Prediction:
    """Times in ms; memory in bytes, per stage, None where it is not known.

    Args:
        step_predicted: of a step among many, optimizer included.
        step_measured: median of the last ones, from start to start.
        bubble_predicted, bubble_measured: that of the bottleneck (`bubble_rate`).
            Stages that share a process run one after the other: nothing of theirs is
            measured.
        memory_predicted: the most that a stage holds.
        memory_measured: of a GPU's allocator; on CPUs the resident memory of the
            process, in which the interpreter and its libraries are.
        given: the costs were given; else they are those of the same steps.
    """

    step_predicted: float
    step_measured: float | None
    bubble_predicted: float
    bubble_measured: float | None
    memory_predicted: tuple[float, ...] | None
    memory_measured: tuple[float, ...] | None
    given: bool

    @property
    def line(self) -> str:
        """One line for a log."""
        whose = "given costs" if self.given else "the costs of the last steps"
        parts = [f"prediction (simulated with {whose}): step"]
        parts.append(f"{self.step_predicted:.4g} ms predicted")
        if self.step_measured is not None:
            away = self.step_measured / self.step_predicted - 1
            parts[-1] += f", {self.step_measured:.4g} measured ({away:+.1%})"
        parts[-1] += f"; bubble {self.bubble_predicted:.1%} predicted"
        if self.bubble_measured is not None:
            parts[-1] += f", {self.bubble_measured:.1%} measured"
        for what, held in (
            ("peak of the tensors of each stage, estimated", self.memory_predicted),
            (
                "peak of each process, on a CPU with interpreter and libraries",
                self.memory_measured,
            ),
        ):
            if held is not None:
                parts[-1] += f"; {what}: {', '.join(map(format_bytes, held))}"
        return " ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)


def predict(
    schedule: Schedule,
    timelines: Sequence[Timeline],
    costs: Costs,
    *,
    held: Sequence[float | None],
    costs_given: bool,
    side_by_side: bool,
) -> Prediction:
    """Simulate a schedule, and put beside it what its last steps have taken.

    Args:
        schedule: of the steps.
        timelines: of the last steps, in seconds, oldest first.
        costs: in ms and bytes; memory is predicted if they give any.
        held: memory of each stage.
        costs_given: by the caller.
        side_by_side: every stage is a process.
    """
    simulated = simulate(schedule, costs)
    measured = [n_bytes for n_bytes in held if n_bytes is not None]
    return Prediction(
        step_predicted=steady_step_time(schedule, costs),
        step_measured=measured_step(timelines) if side_by_side else None,
        bubble_predicted=bubble_rate(simulated),
        bubble_measured=median(bubble_rate(timeline) for timeline in timelines)
        if side_by_side
        else None,
        memory_predicted=tuple(peak_memory(simulated, costs))
        if (costs.m_b, costs.m_fixed) != (Costs.m_b, Costs.m_fixed)
        else None,
        memory_measured=tuple(measured) if len(measured) == len(held) else None,
        given=costs_given,
    )


def measured_step(timelines: Sequence[Timeline]) -> float | None:
    """Median time from the start of a stage's step to that of its next one, in ms."""
    periods = [
        after.rows[stage][0].start - before.rows[stage][0].start
        for before, after in pairwise(timelines)
        for stage in range(before.placement.n_stages)
    ]
    return _MS * median(periods) if periods else None
