"""The flags that planning commands share, and the schedules and costs they name."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from cyclopts import Parameter

from zbpp.core import Costs, LayerCosts, RequestError, Schedule, Timeline
from zbpp.core.replicas import Shard
from zbpp.planning import MODE_WORDS, Plan, PlanRequest, canonical, is_file, make_plan
from zbpp.planning.make import choose_validation
from zbpp.planning.modes import CHUNKED_MODES, one_of
from zbpp.planning.replicas import (
    gathering,
    gathers_in_passes,
    replicated,
    with_replicas,
)
from zbpp.simulator import join, simulate, simulate_iterations
from zbpp.training.options import LIST, Count, Names, Planning

Numbers = Annotated[tuple[int, ...], LIST]

EFFORT = Parameter(help="Effort of the search: fast, default, best or best:SECONDS.")
_CHUNKS = f"Chunks of a stage, for {one_of(CHUNKED_MODES, 'and')}; default: 2."


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas of the stages."""

    data_parallel: Count = 1
    """Replicas of every stage."""
    shard: Shard = "none"
    """State that replicas shard; each word includes those before."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags(Replicas, Planning):
    """Flags of a plan."""

    split: Names = ()
    """Layers of each chunk: balanced, even, or numbers: 3,4."""
    recompute: Names = ()
    """Layers (else chunks) that B computes again: auto, all, none, or numbers: 0,3."""
    effort: Annotated[str, EFFORT] = "default"
    chunks_per_stage: Annotated[Count | None, Parameter(help=_CHUNKS)] = None

    def request(self, mode: str) -> PlanRequest:
        """Ask for a mode, or a file, in the words of the flags."""
        for name in ("stages", "microbatches"):
            if getattr(self, name) is None and not is_file(mode):
                raise RequestError(f"--{name} is missing; {canonical(mode)} needs it")
        costs = self.read_costs()
        if isinstance(costs, LayerCosts):
            costs = with_replicas(costs, self.data_parallel, self.shard)
        elif self.split:
            raise RequestError("--split needs --layers, the costs of each layer")
        elif costs and gathers_in_passes(self.data_parallel, self.shard):
            costs = gathering(costs)
        split: Any = ",".join(self.split) or None
        recompute: Any = ",".join(self.recompute) or None
        return PlanRequest(
            schedule=mode,
            n_stages=self.stages,
            n_microbatches=self.microbatches,
            chunks_per_stage=self.chunks_per_stage,
            costs=costs,
            memory_limit=self.memory_limit,
            split=split,
            recompute=recompute,
            effort=self.effort,
        )

    def plan(self, mode: str) -> Plan:
        """Plan a mode, or read a file; add the collectives of replicas."""
        plan = make_plan(self.request(mode))
        schedule = replicated(
            plan.schedule, data_parallel=self.data_parallel, shard=self.shard
        )
        return replace(plan, schedule=schedule)

    def with_checks(self, schedule: Schedule) -> Schedule:
        """Place V's or take them out, if the flag is given."""
        chosen = self.enable_optimizer_post_validation
        return schedule if chosen is None else choose_validation(schedule, chosen)


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags(PlanFlags):
    """Flags of a drawing."""

    pipeline_schedule_mode: Annotated[
        Names, Parameter(alias="--mode", metavar="MODE", help=MODE_WORDS)
    ] = field(default=(), kw_only=False)
    iterations: Count = 1
    """Iterations to draw; several are drawn with a barrier and post-validated."""

    def load(self) -> list[Plan]:
        """Plan or read the schedules, with V's and collectives by the flags."""
        if not self.pipeline_schedule_mode:
            raise RequestError(
                "no schedule is named; give a schedule file, or a mode with --stages "
                "and --microbatches"
            )
        plans = [self.plan(name) for name in self.pipeline_schedule_mode]
        return [replace(x, schedule=self.with_checks(x.schedule)) for x in plans]

    def costs_name(self, plan: Plan) -> str:
        """Name the costs that a schedule is shown with."""
        if self.costs is not None or self.layers is not None:
            return str(self.costs or self.layers)
        (name,) = self.pipeline_schedule_mode
        if plan.has_costs:
            return f"those in {name}"
        return "none are given: F, B and W take 1, messages nothing"

    def timelines(self, schedule: Schedule, costs: Costs) -> list[Timeline]:
        """Simulate the timeline of the picture.

        Several iterations come behind a barrier and post-validated, one below the
        other, unless the flag has chosen.
        """
        n = self.iterations
        if n == 1:
            return [simulate(schedule, costs)]
        kinds = {" behind a barrier": False, ", post-validated": True}
        timelines = []
        for kind, checks in kinds.items():
            if self.enable_optimizer_post_validation in (None, checks):
                steps = choose_validation(schedule, checks)
                name = f"{schedule.name}, {n} iterations{kind}"
                timelines.append(join(simulate_iterations(steps, costs, n), name=name))
        return timelines
