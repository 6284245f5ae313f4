"""The flags that planning commands share, and the schedules and costs they name."""

from dataclasses import dataclass, replace

from zbpp.cli.several import schedules_in
from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    Schedule,
    Timeline,
    read_costs,
)
from zbpp.planning import MODE_WORDS, Plan, PlanRequest, canonical, is_file, make_plan
from zbpp.planning.answer import is_plan_file
from zbpp.planning.modes import CHUNKED_MODES, one_of
from zbpp.planning.replicas import gathers_in_passes, replicated, with_replicas
from zbpp.schedules import post_validated, without_checks
from zbpp.simulator import join, simulate, simulate_iterations
from zbpp.training.options import (
    MODE_FLAG,
    Planning,
    Replicas,
    Splitting,
    check_at_least,
    flag,
)

__all__ = ["PlanFlags", "ScheduleFlags"]


@dataclass(frozen=True, kw_only=True)
class PlanFlags(Replicas, Splitting, Planning):
    """Plans."""

    effort: str = flag("of the search: fast, default, best or best:SECONDS", "default")
    chunks_per_stage: int | None = flag(
        f"of {one_of(CHUNKED_MODES, 'and')}; else as the costs list, or 2", None
    )

    def chunk_costs(self) -> Costs:
        """Read the costs, and let the flag overrule the file's memory limit."""
        costs = Costs() if self.costs is None else read_costs(self.costs)
        costs = costs.with_limit(self.memory_limit)
        gathers = gathers_in_passes(self.data_parallel, self.shard)
        return replace(costs, gathers=gathers) if gathers else costs

    def with_collectives(self, schedule: Schedule) -> Schedule:
        """Add the collectives of replicas, if there are several."""
        return replicated(schedule, data_parallel=self.data_parallel, shard=self.shard)

    def layer_costs(self) -> LayerCosts | None:
        """Read the layers file, if there is one, with what replicas hold in parts."""
        layers = self.costs_of_layers()
        if layers is None:
            if self.split is not None:
                raise RequestError("--split needs --layers, the costs of each layer")
            return None
        return with_replicas(layers, self.data_parallel, self.shard)

    def request(self, mode: str) -> PlanRequest:
        """Ask for a mode, or a file, in the words of the flags."""
        check_at_least(self, 1, "stages", "microbatches", "chunks_per_stage")
        for name in ("stages", "microbatches"):
            if getattr(self, name) is None and not is_file(mode):
                raise RequestError(f"--{name} is missing; {canonical(mode)} needs it")
        request = PlanRequest(
            schedule=mode,
            n_stages=self.stages,
            n_microbatches=self.microbatches,
            chunks_per_stage=self.chunks_per_stage,
            costs=self.layer_costs(),
            split=self.asked_split,
            recompute=self.asked_recompute,
            effort=self.effort,
        )
        if request.costs is not None:
            return request
        gathers = gathers_in_passes(self.data_parallel, self.shard)
        if self.costs is None and (not gathers or is_plan_file(mode)):
            return replace(request, memory_limit=self.memory_limit)
        return replace(request, costs=self.chunk_costs())

    def plan(self, mode: str) -> Plan:
        """Plan a mode, or read a file."""
        return make_plan(self.request(mode))

    def with_checks(self, schedule: Schedule) -> Schedule:
        """Place V's or take them out, if the flag says so; add collectives."""
        schedule = self.with_collectives(schedule)
        match self.enable_optimizer_post_validation:
            case None:
                return schedule
            case True:
                return post_validated(schedule)
            case False:
                return without_checks(schedule)


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags(PlanFlags):
    """Schedules."""

    pipeline_schedule_mode: str | None = flag(MODE_WORDS, None, **MODE_FLAG, many=True)
    iterations: int = flag("to draw; of several, behind a barrier and without", 1)

    def load(self) -> list[tuple[Schedule, Costs]]:
        """Plan or read the schedules."""
        return [(plan.schedule, plan.costs) for plan in self.load_plans()]

    def load_plans(self) -> list[Plan]:
        """Plan or read the schedules, with V's and collectives as the flags say."""
        if self.pipeline_schedule_mode is None:
            raise RequestError(
                "no schedule is named; give a schedule file, or a mode with --stages "
                "and --microbatches"
            )
        plans = [self.plan(name) for name in schedules_in(self.pipeline_schedule_mode)]
        return [replace(x, schedule=self.with_checks(x.schedule)) for x in plans]

    def costs_named(self, plan: Plan) -> str:
        """Name the costs that a schedule is shown with."""
        if self.costs is not None or self.layers is not None:
            return str(self.costs or self.layers)
        if plan.has_costs and is_plan_file(str(self.pipeline_schedule_mode)):
            return f"those in {self.pipeline_schedule_mode}"
        return "none are given: F, B and W take 1, messages nothing"

    def timelines(self, schedule: Schedule, costs: Costs) -> list[Timeline]:
        """Simulate what is to be drawn.

        Several iterations come behind a barrier and post-validated, one below the
        other, unless the flag has chosen.
        """
        check_at_least(self, 1, "iterations")
        n = self.iterations
        if n == 1:
            return [simulate(schedule, costs)]
        kinds = {
            f"{schedule.name}, {n} iterations behind a barrier": without_checks,
            f"{schedule.name}, {n} iterations, post-validated": post_validated,
        }
        chosen = self.enable_optimizer_post_validation
        return [
            join(simulate_iterations(change(schedule), costs, n), name=name)
            for name, change in kinds.items()
            if chosen is None or chosen == (change is post_validated)
        ]
