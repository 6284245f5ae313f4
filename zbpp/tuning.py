"""Schedules chosen for measured times: `auto` in a run.

`measure_layers` gives costs of a model's layers before its first step: measured
times, and memory.

    model --> pipeline, one chunk a stage, even split --profile--> times, messages
          --> fake tensors --layer_memory--> bytes

The pipeline trains some steps and is closed again. Layers that exist then have their
parameters and buffers back, on the devices where they were, and random generators are
as before: layers may go where the plan wants them.

A `Watcher` plans again from measured times: after the first steps, and now and then.

    step      0 1 2 3 4 5 6 7 8 ...            ... 54
    window          |-------|                     |-------|
                            | plan, switch                | plan, switch

A window is the last steps; the executors keep their times, so watching costs nothing
but `zbpp.diagnostics.measured_costs` at its end, with messages and optimizer
too. Rank 0 plans while the others wait, and the schedule travels as text. It has the
same placement and split: the bits of a run do not change.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Costs,
    LayerCosts,
    PassKind,
    RequestError,
    Schedule,
    parse_schedule,
    schedule_text,
)
from zbpp.diagnostics import measured_costs, profile
from zbpp.planning import Plan, PlanRequest, make_plan
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets
from zbpp.runtime.support.random_state import random_state, set_random_state
from zbpp.runtime.values import as_value

__all__ = ["Watch", "Watcher", "replan"]

SAFE_MODE = "ZBH1"
"""Splits the backward, and uses no more memory than 1F1B."""


def measure_layers(
    build: Callable[..., Any],
    model: Any,
    example: tuple[Batch, Batch],
    *,
    device: torch.device,
    overlaps: bool,
    estimate: Callable[[tuple[Any, Any]], LayerCosts],
) -> LayerCosts:
    """Profile the layers, and estimate their memory (every rank must call).

    Args:
        build: makes a `zbpp.Pipeline` of the model with a ``schedule``.
        model: as `zbpp.Pipeline` takes it; given layers end where they were.
        example: inputs and targets of one step, on every rank.
        device: of the pipeline.
        overlaps: what layers communicate may be hidden; False, and where layers are
            gathered, costs have no parts.
        estimate: gives the memory of the layers for a micro-batch.

    Returns:
        Costs in ms and bytes, the same on every rank.
    """
    if not (isinstance(example, tuple) and len(example) == 2):
        raise RequestError(
            f"example is a {type(example).__name__}; give (inputs, targets) of one "
            "step, on every rank"
        )
    homes = _homes(model)
    before = random_state(device)
    pipeline = build(schedule=SAFE_MODE)
    m = pipeline.n_microbatches
    inputs, targets = split_inputs(example[0], m)[0], split_targets(example[1], m)[0]
    kinds = {job.kind for job in pipeline.schedule.orders[0]}
    with _values_restored([layer for _, layer in pipeline.stages.layers()]):
        measured = profile(pipeline, *example)
    pipeline.close()
    costs = measured.layers.with_memory_of(estimate((as_value(inputs), targets)))
    if not overlaps or CollectiveKind.UNSHARD in kinds:
        costs = replace(costs, parts=None)
    for layer, home in homes:
        layer.to(home)
    set_random_state(before, device)  # a builder may have drawn the weights
    return costs


@contextmanager
def _values_restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters and buffers are as they were in the end; the host has copies."""
    values = [
        (layer, name, x.detach().to("cpu", copy=True))
        for layer in layers
        for name, x in chain(layer.named_parameters(), layer.named_buffers())
    ]
    yield
    with torch.no_grad():
        for layer, name, value in values:
            module, _, own_name = name.rpartition(".")
            tensor: Tensor = getattr(layer.get_submodule(module), own_name)
            if not tensor.is_inference():
                tensor.copy_(value)


def _homes(model: Any) -> list[tuple[nn.Module, torch.device]]:
    """Layers that exist already, and where their parameters are."""
    if not isinstance(model, nn.Sequential | nn.ModuleList | Sequence):
        return []
    layers: list[nn.Module] = list(model)
    return [
        (layer, p.device)
        for layer in layers
        if (p := next(layer.parameters(), None)) is not None
    ]


_log = logging.getLogger("zbpp")


@dataclass(frozen=True)
class Watch:
    """The steps after which a plan is made again, and when it is taken.

    Args:
        first: steps before the first plan, a warm-up included; of them the last
            ``window`` count.
        every: steps between later plans; None: there are none.
        window: steps that are measured; at most 10.
        least_gain: share of the step that another schedule must gain.
        effort: of the plans.
    """

    first: int = 6
    every: int | None = 50
    window: int = 4
    least_gain: float = 0.02
    effort: str = "fast"

    def __post_init__(self) -> None:
        if not 1 <= self.window <= min(10, self.first):
            raise RequestError(
                f"window is {self.window}; it must be from 1 to 10, and at most first "
                f"({self.first})"
            )
        if self.every is not None and self.every < self.window:
            raise RequestError(
                f"every is {self.every}; it must be at least the window {self.window}"
            )

    def looks_after(self, n_steps: int) -> bool:
        """True if a window ends with this step, counted from 1 since the start."""
        if n_steps < self.first:
            return False
        later = n_steps - self.first
        return later == 0 or (self.every is not None and later % self.every == 0)


@dataclass(frozen=True)
class Replanned:
    """A schedule for measured costs, and the spans of it and of the present one."""

    schedule: Schedule
    now: float
    then: float

    @property
    def gain(self) -> float:
        """Share of the present span."""
        return 1 - self.then / self.now if self.now > 0 else 0.0


def replan(schedule: Schedule, costs: Costs, *, effort: str) -> Replanned:
    """Plan the order of a schedule again, for other costs.

    Both spans are those of bare passes and their messages: V's and collectives are
    placed in the order that is chosen.

    Raises:
        RequestError: nothing fits the memory limit.
    """
    best = make_plan(
        PlanRequest(
            schedule="auto",
            placement=schedule.placement,
            n_stages=schedule.n_stages,
            n_microbatches=schedule.n_microbatches,
            costs=costs,
            effort=effort,
        )
    )
    bare = schedule.without(Collective).without(Check)
    now = replace(best, schedule=bare).span
    new_schedule = replace(
        bare, name=best.mode, orders=best.schedule.orders, parts=best.schedule.parts
    )
    return Replanned(new_schedule, now, best.span)


def make_watcher(wanted: Watch | bool | None, plan: Plan) -> "Watcher | None":
    """The watcher of a pipeline that runs a plan; by default only of `auto`."""
    if wanted is None:
        wanted = bool(plan.rejected)
    if wanted is False or plan.schedule.n_stages == 1:
        return None
    watch = Watch() if wanted is True else wanted
    return Watcher(watch, plan.costs)


class Watcher:
    """Watches one pipeline; `after_step` is called by all its processes.

    Args:
        watch: when to plan again, and the least gain.
        costs: of the present plan, with the memory that plans keep.
        measure: the costs of a pipeline's last steps, so many.
    """

    def __init__(
        self,
        watch: Watch,
        costs: Costs,
        *,
        measure: Callable[[Any, int], Costs] = measured_costs,
    ) -> None:
        self._watch = watch
        self._measure = measure
        self._costs = costs
        self._n_steps = 0

    def after_step(self, pipeline: Any) -> None:
        """Plan for the last window if one ends here; switch if that pays."""
        self._n_steps += 1
        if not self._watch.looks_after(self._n_steps):
            return
        schedule = pipeline.schedule
        if schedule.runs(PassKind.BW):  # B and W cannot be distinguished
            return
        measured = self._measure(pipeline, self._watch.window)
        text: str | None = None
        if pipeline.rank == 0:
            text = self._shorter(schedule, measured.with_memory_of(self._costs))
        text = pipeline.gather(text)[0]
        if text is not None:
            pipeline.switch(parse_schedule(text))

    def _shorter(self, schedule: Schedule, costs: Costs) -> str | None:
        """The text of a schedule that gains enough."""
        try:
            answer = replan(schedule, costs, effort=self._watch.effort)
        except RequestError as error:
            _log.warning("auto: the schedule stays as it is: %s", error)
            return None
        if answer.gain < self._watch.least_gain:
            return None
        _log.info(
            "auto: after step %d the order of %s replaces that of %s; span "
            "%.4g ms, was %.4g (%.1f %% shorter)",
            self._n_steps, answer.schedule.name, schedule.name,
            answer.then, answer.now, 100 * answer.gain,
        )  # fmt: skip
        return schedule_text(answer.schedule)
