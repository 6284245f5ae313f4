"""A mode of zbpp in a bench."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist

from zbpp.bench.request import OURS
from zbpp.bench.setting import LEARNING_RATE, Setting
from zbpp.core import Costs, PassKind, Schedule, Timeline, passes_in
from zbpp.diagnostics import measured_costs, timelines
from zbpp.emulation import emulated_batch, emulated_pipeline
from zbpp.pipeline import Pipeline, plan_model
from zbpp.runtime.policies import StepPolicy
from zbpp.simulator import bubble_rate, simulate, steady_step_time
from zbpp.training.setup import settings_of
from zbpp.training.user_model import UserModel

_STEPS_KEPT = 10  # timelines of so many steps are there


@dataclass(frozen=True)
class Jobs:
    """The jobs of a mode's steps, in ms: by its costs, and as they were measured.

    ``step`` is predicted, one among many; ``bubble`` is a median of what was measured.
    """

    name: str
    costs: Costs
    simulated: Timeline
    measured: Timeline
    step: float
    bubble: float


class Ours:
    """A pipeline, and the batch that it trains on (every rank must make one)."""

    def __init__(self, setting: Setting, schedule: Schedule) -> None:
        self._costs = setting.plan.costs
        speculates = schedule.runs(PassKind.W) and schedule.n_stages > 1
        self._batch: tuple[Any, Any] = setting.batch.inputs, setting.batch.targets
        if self._costs is not None:
            self.pipeline = emulated_pipeline(
                schedule, self._costs, post_validation=speculates
            )
            self._batch = (emulated_batch(self.pipeline),) * 2
        else:
            loaded = setting.model()
            self.pipeline = Pipeline(
                loaded.layered,
                schedule,
                # True: from the first step on
                step=StepPolicy(post_validation=True if speculates else None),
                **_settings(setting, loaded),
            )
        order = self.pipeline.schedule.orders[dist.get_rank()]
        self.n_jobs = sum(len(passes_in(job)) for job in order)

    def step(self) -> None:
        """Train on the batch once."""
        self.pipeline.step(*self._batch)

    def compared_step(self) -> tuple[float, float]:
        """Train once; loss and gradient norm."""
        result = self.pipeline.step(*self._batch)
        return result.loss, result.grad_norm

    def jobs(self, name: str, n_steps: int) -> Jobs:
        """Read the jobs of the last steps, in ms (every rank must call)."""
        n, schedule = min(n_steps, _STEPS_KEPT), self.pipeline.schedule
        steps = timelines(self.pipeline, n)
        costs = self._costs or measured_costs(self.pipeline, n, joint=True)
        return Jobs(
            name,
            costs,
            simulate(schedule, costs),
            _in_ms(steps[-1]),
            step=steady_step_time(schedule, costs),
            bubble=median(map(bubble_rate, steps)),
        )

    def close(self) -> None:
        """Settle the last step, and end."""
        self.pipeline.close()


def resolved(setting: Setting, contender: str) -> Schedule:
    """The schedule of a contender; one without is planned for what its layers take.

    Layers are measured once, so that all turns run the same (every rank must call).
    """
    schedule = setting.plan.schedules[contender]
    if schedule is not None:
        return schedule
    loaded = setting.model()
    return plan_model(
        loaded.layered,
        contender.removeprefix(OURS),
        example=(setting.batch.inputs, setting.batch.targets),
        **_settings(setting, loaded),
    ).schedule


def _settings(setting: Setting, model: UserModel) -> dict[str, Any]:
    return settings_of(setting.options, model, LEARNING_RATE) | {
        "n_stages": setting.plan.n_stages,
        "n_microbatches": setting.options.microbatches,
    }


def _in_ms(timeline: Timeline) -> Timeline:
    """A timeline in ms that begins at 0."""
    zero = min(row[0].start for row in timeline.rows if row)
    slots = (
        tuple(
            replace(x, start=1e3 * (x.start - zero), end=1e3 * (x.end - zero))
            for x in row
        )
        for row in timeline.slots
    )
    return replace(timeline, slots=tuple(slots))
