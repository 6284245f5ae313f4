"""A mode of ours in a bench."""

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zbpp.bench.contender import (
    Field,
    Measured,
    autocast_of,
    make_optimizer,
    measured_of,
    own_loss,
)
from zbpp.bench.names import split_name
from zbpp.bench.request import costs_of
from zbpp.core import Costs, PassKind, Schedule, Timeline, passes_in
from zbpp.diagnostics import measured_costs, timelines
from zbpp.emulation.run import emulated_batch, emulated_pipeline
from zbpp.models import layered_of
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan
from zbpp.runtime.policies import Execution, Numerics, StepPolicy
from zbpp.simulator import simulate, steady_step_time

__all__ = ["Ours", "Promised", "build_ours", "resolved"]

_KEPT = 10  # timelines


@dataclass(frozen=True)
class Promised:
    """Jobs as the simulator has them; times in ms."""

    schedule: Schedule
    costs: Costs
    has_given_costs: bool
    """Else the costs are those of the same steps."""

    @property
    def simulated(self) -> Timeline:
        """The same jobs, simulated."""
        return simulate(self.schedule, self.costs)

    @property
    def predicted_step(self) -> float:
        """Of a step among many."""
        return steady_step_time(self.schedule, self.costs)


class Ours:
    """A pipeline, and the batch that it is fed."""

    def __init__(self, pipeline: Pipeline, field: Field) -> None:
        self.pipeline = pipeline
        self._given = costs_of(field.request)
        self._batch: tuple[Any, Any]
        if field.request.emulate is not None:
            self._batch = (emulated_batch(pipeline),) * 2
        else:
            self._batch = field.batch.inputs, field.batch.targets
        order = pipeline.schedule.orders[dist.get_rank()]
        self.n_jobs = sum(len(passes_in(job)) for job in order)

    def step(self) -> None:
        """Train on the batch once."""
        self.pipeline.step(*self._batch)

    def settle(self) -> None:
        """Wait for the decision on the last step."""
        self.pipeline.synchronize()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this process's parameters."""
        return {
            name: p.grad
            for prefix, layer in self.pipeline.named_layers()
            for name, p in layer.named_parameters(prefix=prefix)
            if p.grad is not None
        }

    def measured(self, n_steps: int) -> Measured:
        """Read the times of the last steps' jobs (every rank must call)."""
        return measured_of(timelines(self.pipeline, min(n_steps, _KEPT)))

    def promised(self, n_steps: int) -> Promised:
        """Simulate, with costs of the last steps or given ones (every rank must)."""
        costs = self._given
        if costs is None:
            costs = measured_costs(self.pipeline, min(n_steps, _KEPT), joint=True)
        has_given_costs = self._given is not None
        return Promised(self.pipeline.schedule, costs, has_given_costs)

    def close(self) -> None:
        """Synchronize and end."""
        self.pipeline.close()


def build_ours(field: Field, schedule: Schedule, *, steps: bool) -> Ours:
    """Make the pipeline of a schedule (every rank must call).

    Args:
        field: alike for all contenders.
        schedule: to run.
        steps: False leaves the optimizer out, and the gradients where they are.
    """
    request = field.request
    costs = costs_of(request)
    if request.emulate is not None and costs is not None:
        pipeline = emulated_pipeline(
            schedule,
            costs,
            timeout_s=request.timeout_s,
            post_validation=schedule.runs(PassKind.W),
        )
        return Ours(pipeline, field)
    return Ours(_pipeline(field, schedule, steps=steps), field)


def resolved(field: Field, contender: str) -> Schedule:
    """The schedule of a contender; one without is planned for what its layers take.

    The measuring is done once, so that all turns run the same (every rank must call).
    """
    schedule = field.request.schedules[contender]
    if schedule is not None:
        return schedule
    _, mode = split_name(contender)
    with _pipeline(field, mode, steps=True) as pipeline:
        split = tuple(map(len, pipeline.split))
        return replace(pipeline.schedule, split=split)


def _pipeline(field: Field, schedule: Schedule | str, *, steps: bool) -> Pipeline:
    request, loaded = field.request, field.model()
    model = layered_of(loaded.model, loaded.n_layers)
    made_as: dict[str, Any] = {
        "n_stages": request.stages,
        "n_microbatches": request.microbatches,
        "device": field.device,
        "loss_fn": loaded.loss_fn or own_loss,
        "optimizer": make_optimizer(request) if steps else None,
        "numerics": Numerics(
            autocast=autocast_of(request), exact_sums=request.exact_sums
        ),
        "execution": Execution(
            compile="blocks" if request.compiles else False,
            cuda_graphs=request.cuda_graphs,
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
            example=(field.batch.inputs, field.batch.targets),
            memory_limit=request.memory_limit,
            **made_as,
        )
    else:
        speculates = steps and schedule.runs(PassKind.W) and schedule.n_stages > 1
    return Pipeline(
        model,
        plan,
        clip_grad_norm=request.clip_grad_norm if steps else None,
        # True: from the first step on
        step=StepPolicy(post_validation=True if speculates else None),
        **made_as,
    )
