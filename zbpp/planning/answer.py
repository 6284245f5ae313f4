"""The answer: a schedule, the costs that it is for, and why other plans lost.

Of two plans the first figure that differs decides: the time of a step, then the step
behind a barrier, which waits for the last stage, then the largest memory of a stage.

    p = 8, m = 16, F = B = W = 1    span   behind a barrier   memory, M_B
    one chunk a stage               48     55                 15
    V                               48     51.5               8              better

A plan file is one JSON object: format and version, the figures, the plans that were
rejected, costs and memory in the keys of a costs file, and last the schedule as a
schedule file has it. Wherever a schedule file is read, a plan file is too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zbpp.core import (
    Check,
    ChunkCosts,
    Collective,
    Costs,
    JobGraph,
    Order,
    PassKind,
    RequestError,
    Schedule,
    lower_bound,
    passes_in,
    peaks,
    schedule_text,
)
from zbpp.core.files import costs_data, decode, fail, schedule_of, table_of
from zbpp.planning.modes import JOINT_WORDS
from zbpp.schedules.planner.balance import is_below
from zbpp.schedules.planner.problem import check_limits

FORMAT = "zbpp-plan"
_COMPARED = ("time", "barrier_step", "peak")
_FIGURES = ("step", "span", "barrier_step", "peak", "lower_bound")


@dataclass(frozen=True)
class Rejected:
    """A plan that lost, or was impossible.

    Args:
        mode: the mode of the plan.
        reason: why it lost, for example its step compared with the best step.
        is_planned: it was planned; False: it is impossible, or its bound excludes it.
    """

    mode: str
    reason: str
    is_planned: bool = False

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.is_planned else ':'} {self.reason}"


@dataclass(frozen=True)
class Plan:
    """A schedule with the costs that it is for; its figures are attributes.

    Args:
        schedule: with the split and the recomputed layers in it, where they are known.
        costs: of the chunks, including recompute.
        mode: the mode of the schedule; for auto the mode that has won.
        has_costs: the request had costs; else F, B and W take 1.
        ideal_step: with costs of layers the work of a step, shared evenly by stages.
        even_step: with costs of layers the step of even chunks by the same mode; None:
            they do not fit.
        rejected: by auto, in the order in which they were looked at.
        line: by auto, the choice and why the others lost.
    """

    schedule: Schedule
    costs: Costs
    mode: str
    has_costs: bool = True
    ideal_step: float | None = None
    even_step: float | None = None
    rejected: tuple[Rejected, ...] = ()
    line: str = ""

    @property
    def n_stages(self) -> int:
        """Number of pipeline stages."""
        return self.schedule.n_stages

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each chunk; None: they are not known."""
        return self.schedule.split

    @property
    def is_layered(self) -> bool:
        """True for costs of layers: steps then include the optimizer."""
        return self.ideal_step is not None

    @property
    def known_costs(self) -> Costs | None:
        """The costs of the request, if it had any."""
        return self.costs if self.has_costs else None

    @cached_property
    def chunk_costs(self) -> ChunkCosts:
        """The costs on the placement."""
        return self.costs.on(self.schedule.placement)

    @property
    def _orders(self) -> tuple[Order, ...]:
        return self.schedule.rows_for(self.chunk_costs)

    @cached_property
    def _graph(self) -> JobGraph:
        return JobGraph(self._orders, self.chunk_costs)

    @cached_property
    def _spans(self) -> list[float]:
        return self._graph.run().spans

    @property
    def span(self) -> float:
        """Longest span of a stage."""
        return max(self._spans)

    @cached_property
    def steps(self) -> list[float]:
        """Span and optimizer of each stage."""
        pairs = zip(self._spans, self.chunk_costs.optimizer, strict=True)
        return [span + optimizer for span, optimizer in pairs]

    @cached_property
    def step(self) -> float:
        """Longest span of a stage with its optimizer, in the unit of the costs."""
        return max(self.steps)

    @cached_property
    def barrier_step(self) -> float:
        """Time of a step among many, optimizer included, if all stages step together.

        A step is known to be valid when all gradients are there and the norms are
        summed. Then each stage steps, and starts the next iteration: one iteration
        tells the time of all.
        """
        bare, times = self.schedule.without(Check).without(Collective), self.chunk_costs
        is_bare = bare is self.schedule
        graph = self._graph if is_bare else JobGraph(bare.rows_for(times), times)
        run = graph.run(free=times.optimizer, reduction=times.reduction)
        return run.all_gradients

    @cached_property
    def peak(self) -> float:
        """Largest memory of a stage."""
        return max(peaks(self._orders, self.chunk_costs))

    @property
    def time(self) -> float:
        """The figure that is compared first: with costs of layers the step, or span."""
        return self.step if self.is_layered else self.span

    def is_better_than(self, rival: "Plan") -> bool:
        """Compare figure by figure; a tie in all of them is not better."""
        mine = (getattr(self, name) for name in _COMPARED)
        return is_below(mine, (getattr(rival, name) for name in _COMPARED))

    @cached_property
    def lower_bound(self) -> float:
        """No schedule of this placement, for these costs, spans less."""
        schedule = self.schedule
        return lower_bound(schedule.placement, schedule.n_microbatches, self.costs)

    @property
    def gain(self) -> float | None:
        """Share by which the step is shorter than that of even chunks."""
        return None if not self.even_step else 1 - self.step / self.even_step

    @property
    def recompute(self) -> frozenset[int]:
        """Layers of the whole model that B computes again, where the split is known."""
        return self.schedule.recomputed_layers(self.split or ())

    def save(self, path: str | Path) -> None:
        """Write a plan file."""
        Path(path).write_text(plan_text(self), encoding="utf-8")


@dataclass(frozen=True)
class _File:
    """The keys of a plan file, with the types of their values."""

    format: Literal["zbpp-plan"]
    version: Literal[1]
    mode: str
    figures: dict[str, Any]
    has_costs: bool
    costs: dict[str, Any]
    rejected: tuple[Rejected, ...]
    line: str
    schedule: dict[str, Any]


def check_fits(schedule: Schedule, costs: ChunkCosts) -> None:
    """Refuse a schedule over the memory limit, or one that splits an unsplittable B."""
    for stage, order in enumerate(schedule.orders):
        for job in () if costs.splits[stage] else order:
            kinds = {part.kind for part in passes_in(job)}
            if not kinds.isdisjoint((PassKind.B, PassKind.W)):
                raise RequestError(
                    f"{schedule.name} runs {job}, but stage {stage} cannot split its "
                    f"backward (splits[{stage}] of the costs is false, or w has no "
                    f"parts); plan again with these costs, or choose {JOINT_WORDS}"
                )
    if min(costs.limit) < math.inf:
        needs = peaks(schedule.rows_for(costs), costs)
        check_limits(schedule.name, needs, costs, schedule.n_microbatches)


def plan_text(plan: Plan) -> str:
    """Write a plan as JSON; the schedule has one line a stage."""
    figures = {name: getattr(plan, name) for name in _FIGURES}
    if plan.is_layered:
        figures |= {"ideal_step": plan.ideal_step, "even_step": plan.even_step}
    head = {
        "format": FORMAT,
        "version": 1,
        "mode": plan.mode,
        "figures": figures,
        "has_costs": plan.has_costs,
        "costs": costs_data(plan.costs),
        "rejected": [vars(lost) for lost in plan.rejected],
        "line": plan.line,
    }
    return f'{json.dumps(head)[:-1]}, "schedule":\n{schedule_text(plan.schedule)}}}\n'


def plan_of(data: Mapping[str, Any], *, source: str) -> Plan:
    """Read a plan from the object of a plan file; figures follow from its schedule."""
    file: _File = decode(_File, data, source)
    costs = table_of(Costs, file.costs, f"{source}: costs")
    schedule = schedule_of(file.schedule, source=source)
    ideal, even = (
        decode(float | None, file.figures.get(key), source, key)
        for key in ("ideal_step", "even_step")
    )
    try:
        check_fits(schedule, costs.on(schedule.placement))
        return Plan(
            schedule,
            costs,
            file.mode,
            has_costs=file.has_costs,
            ideal_step=ideal,
            even_step=even,
            rejected=file.rejected,
            line=file.line,
        )
    except RequestError as error:
        fail(source, str(error))
