"""A mode of zbpp in a bench."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist

from zbpp.bench.contender import Setting, make_optimizer, output_is_loss
from zbpp.bench.names import split_name
from zbpp.bench.request import costs_of
from zbpp.core import Costs, PassKind, Schedule, Timeline, passes_in
from zbpp.diagnostics import measured_costs, timelines
from zbpp.emulation import emulated_batch, emulated_pipeline
from zbpp.models import layered_of
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan
from zbpp.runtime.policies import Execution, Numerics, StepPolicy
from zbpp.simulator import bubble_rate, simulate, steady_step_time

__all__ = ["Jobs", "Ours", "build_ours", "resolved"]

_STEPS_KEPT = 10  # timelines of so many steps are there


@dataclass(frozen=True)
class Jobs:
    """Jobs of the last steps, measured and by the simulator; times in ms.

    Args:
        schedule: as it ran.
        costs: given ones, else those of the same steps.
        measured: the last step; it begins at 0.
        bubble: median of the steps' measured bubble rates.
    """

    schedule: Schedule
    costs: Costs
    measured: Timeline
    bubble: float

    @property
    def simulated(self) -> Timeline:
        """The same jobs by the simulator."""
        return simulate(self.schedule, self.costs)

    @property
    def predicted_step(self) -> float:
        """Of a step among many."""
        return steady_step_time(self.schedule, self.costs)


class Ours:
    """A pipeline, and the batch that it trains on."""

    def __init__(self, pipeline: Pipeline, setting: Setting) -> None:
        self.pipeline = pipeline
        self._costs = costs_of(setting.request)
        self._batch: tuple[Any, Any]
        if setting.request.emulate is not None:
            self._batch = (emulated_batch(pipeline),) * 2
        else:
            self._batch = setting.batch.inputs, setting.batch.targets
        order = pipeline.schedule.orders[dist.get_rank()]
        self.n_jobs = sum(len(passes_in(job)) for job in order)

    def step(self) -> None:
        """Train on the batch once."""
        self.pipeline.step(*self._batch)

    def compared_step(self) -> tuple[float, float]:
        """Train once; loss and gradient norm."""
        result = self.pipeline.step(*self._batch)
        return result.loss, result.grad_norm

    def settle(self) -> None:
        """Wait for the decision on the last step."""
        self.pipeline.synchronize()

    def jobs(self, n_steps: int) -> Jobs:
        """Read the jobs of the last steps (every rank must call)."""
        n = min(n_steps, _STEPS_KEPT)
        steps = timelines(self.pipeline, n)
        costs = self._costs or measured_costs(self.pipeline, n, joint=True)
        bubble = median(map(bubble_rate, steps))
        return Jobs(self.pipeline.schedule, costs, _in_ms(steps[-1]), bubble)

    def close(self) -> None:
        """Synchronize and end."""
        self.pipeline.close()


def build_ours(setting: Setting, schedule: Schedule) -> Ours:
    """Make the pipeline of a schedule (every rank must call)."""
    request = setting.request
    costs = costs_of(request)
    if request.emulate is not None and costs is not None:
        pipeline = emulated_pipeline(
            schedule,
            costs,
            timeout_s=request.timeout_s,
            post_validation=schedule.runs(PassKind.W),
        )
        return Ours(pipeline, setting)
    return Ours(_pipeline(setting, schedule), setting)


def resolved(setting: Setting, contender: str) -> Schedule:
    """The schedule of a contender; one without is planned for what its layers take.

    Layers are measured once, so that all turns run the same (every rank must call).
    """
    schedule = setting.request.schedules[contender]
    if schedule is not None:
        return schedule
    _, mode = split_name(contender)
    with _pipeline(setting, mode) as pipeline:
        split = tuple(map(len, pipeline.split))
        return replace(pipeline.schedule, split=split)


def _pipeline(setting: Setting, schedule: Schedule | str) -> Pipeline:
    request, loaded = setting.request, setting.model()
    model = layered_of(loaded.model, loaded.n_layers)
    settings: dict[str, Any] = {
        "n_stages": request.stages,
        "n_microbatches": request.microbatches,
        "device": setting.device,
        "loss_fn": loaded.loss_fn or output_is_loss,
        "optimizer": make_optimizer,
        "numerics": Numerics(autocast=setting.autocast, exact_sums=request.exact_sums),
        "execution": Execution(
            compile="blocks" if request.compile else False,
            watch=False,
            timeout_s=request.timeout_s,
        ),
    }
    speculates = False
    plan: Schedule | Plan | str = schedule
    if isinstance(schedule, str):
        plan = plan_model(
            model,
            schedule,
            example=(setting.batch.inputs, setting.batch.targets),
            memory_limit=request.memory_limit,
            **settings,
        )
    else:
        speculates = schedule.runs(PassKind.W) and schedule.n_stages > 1
    return Pipeline(
        model,
        plan,
        clip_grad_norm=request.clip_grad_norm,
        # True: from the first step on
        step=StepPolicy(post_validation=True if speculates else None),
        **settings,
    )


def _in_ms(timeline: Timeline) -> Timeline:
    """A timeline in ms that begins at 0."""
    zero = min(row[0].start for row in timeline.rows if row)
    return replace(
        timeline,
        rows=tuple(
            tuple(
                replace(
                    slot, start=1e3 * (slot.start - zero), end=1e3 * (slot.end - zero)
                )
                for slot in row
            )
            for row in timeline.rows
        ),
    )
