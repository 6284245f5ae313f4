"""The flags that most commands share, and the schedules and costs that they name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zbpp.core import (
    Costs,
    LayerCosts,
    MemoryModel,
    RequestError,
    Schedule,
    Timeline,
    read_costs,
    read_layers,
    recomputed,
)
from zbpp.core.costs.units import with_limit
from zbpp.modes import canonical, is_file, plan
from zbpp.planning.data_parallel import Shard, replicated, with_gathers
from zbpp.planning.layer_plans import parse_split, plan_layers
from zbpp.planning.recompute_plans import parse_recompute, plan_recomputed
from zbpp.planning.replica_costs import with_replicas
from zbpp.schedules import LayerPlan, post_validated, without_checks
from zbpp.simulator import join, simulate, simulate_iterations
from zbpp.training.options import MemoryText, YesNoUnsaid

__all__ = [
    "CommonFlags",
    "ScheduleFlags",
    "SizedFlags",
    "plan_by_flags",
    "plan_layers_by_flags",
    "shown_as",
]


_Text = str | None
_Count = int | None


def shown_as(metavar: str) -> object:
    """Name a value in help texts."""
    return tyro.conf.arg(metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """Flags that most commands share."""

    costs: Annotated[Path | None, shown_as("PATH")] = None
    """Costs file (JSON); without it F, B and W take 1 each and messages nothing."""
    memory_limit: MemoryText = None
    """Largest memory of a stage: 40GiB where costs are in bytes, or in their unit."""
    effort: Annotated[str, shown_as("EFFORT")] = "default"
    """Effort of the search: fast, default, best (a minute) or best:SECONDS."""
    layers: Annotated[Path | None, shown_as("PATH")] = None
    """Layers file (JSON), in place of costs: they are split for the plan."""
    split: Annotated[str | None, shown_as("SPLIT")] = None
    """Of the layers: balanced (also if left out), even, or those of each chunk: 3,4."""
    enable_optimizer_post_validation: YesNoUnsaid = None
    """Step at once and validate in the next iteration (V); no: behind a barrier."""
    data_parallel: Annotated[int, shown_as("INT")] = 1
    """Replicas of every stage; all_gather and reduce_scatter of the costs are times of
    their collectives."""
    shard: Shard = "none"
    """State that replicas hold in parts; each word includes those before."""

    def models(self) -> tuple[Costs, MemoryModel]:
        """Read the costs, and let the flag overrule the file's memory limit."""
        costs, memory = Costs(), MemoryModel()
        if self.costs is not None:
            costs, memory = read_costs(self.costs)
        memory = with_limit(memory, self.memory_limit, name="--memory_limit")
        n, shard = self.data_parallel, self.shard
        return with_gathers(costs, data_parallel=n, shard=shard), memory

    def with_collectives(self, schedule: Schedule) -> Schedule:
        """Add the collectives of replicas, if there are several."""
        return replicated(schedule, data_parallel=self.data_parallel, shard=self.shard)

    def layer_costs(self) -> LayerCosts | None:
        """Read the layers file, if there is one; the limit as above.

        Raises:
            RequestError: the file is not valid, or a flag does not go with another.
        """
        if self.layers is None:
            if self.split is not None:
                raise RequestError("--split needs --layers, the costs of each layer")
            return None
        if self.costs is not None:
            raise RequestError(
                "--costs and --layers are both given; the costs of chunks follow from "
                "those of layers: leave --costs out"
            )
        layers = with_limit(
            read_layers(self.layers), self.memory_limit, name="--memory_limit"
        )
        return with_replicas(layers, self.data_parallel, self.shard)


@dataclass(frozen=True, kw_only=True)
class SizedFlags(CommonFlags):
    """The sizes of a schedule that a command plans or reads."""

    stages: Annotated[_Count, shown_as("INT")] = None
    """Pipeline stages; a schedule file knows its own."""
    microbatches: Annotated[_Count, shown_as("INT")] = None
    """Micro-batches in a step; a schedule file knows its own."""
    chunks_per_stage: Annotated[_Count, shown_as("INT")] = None
    """For VPP, ZBVPP and auto; without it, as many as the costs list, or 2."""
    recompute: Annotated[_Text, shown_as("WHICH")] = None
    """Parts whose graph B computes again: auto (needs m_r in the costs, and a memory
    limit), all, none, or numbers: of layers with --layers, else of chunks: 0,2,5."""

    def plan(self, mode: str) -> tuple[Schedule, Costs, MemoryModel]:
        """Plan a mode, or read a file; also return what it is planned for."""
        planned = self.plan_layers(mode)
        if planned is not None:
            return planned.schedule, planned.costs, planned.memory
        costs, memory = self.models()
        schedule = plan_by_flags(
            *(mode, self.stages, self.microbatches, costs, memory, self.effort),
            chunks_per_stage=self.chunks_per_stage,
            recompute=self.recompute,
        )
        costs, memory = recomputed(costs, memory, schedule)
        return schedule, costs, memory

    def plan_layers(self, mode: str) -> LayerPlan | None:
        """Plan with a layers file; None if there is none."""
        layers = self.layer_costs()
        if layers is None:
            return None
        return plan_layers_by_flags(
            *(mode, self.stages, self.microbatches, layers, self.split, self.effort),
            chunks_per_stage=self.chunks_per_stage,
            recompute=self.recompute,
        )

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
class ScheduleFlags(SizedFlags):
    """A schedule: from a file, or planned from a mode."""

    schedule: Annotated[_Text, tyro.conf.Positional, shown_as("PLAN.json")] = None
    """A schedule file (or a mode)."""
    pipeline_schedule_mode: Annotated[_Text, shown_as("MODE")] = None
    """FThenB, 1F1B, VPP, ZBH1, ZBH2, ZB, ZBV, ZBVPP, VHalf, VMin, auto, or a file."""
    iterations: Annotated[int, shown_as("INT")] = 1
    """Iterations to draw; of several, with a barrier between them and without."""

    def load(self) -> tuple[Schedule, Costs, MemoryModel]:
        """Plan or read the schedule."""
        modes = {self.schedule, self.pipeline_schedule_mode} - {None}
        if len(modes) != 1:
            raise RequestError(
                "two schedules are named; give a schedule file or "
                "--pipeline_schedule_mode, not both"
                if modes
                else "no schedule is named; give a schedule file, or "
                "--pipeline_schedule_mode with --stages and --microbatches"
            )
        schedule, costs, memory = self.plan(str(modes.pop()))
        return self.with_checks(schedule), costs, memory

    def timelines(self, schedule: Schedule, costs: Costs) -> list[Timeline]:
        """Simulate what is to be drawn.

        Several iterations come behind a barrier and post-validated, one below the
        other, unless the flag has chosen.
        """
        n = self.iterations
        if n < 1:
            raise RequestError(f"--iterations is {n}; it must be at least 1")
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


def plan_by_flags(
    mode: str,
    stages: int | None,
    microbatches: int | None,
    costs: Costs,
    memory: MemoryModel,
    effort: str,
    *,
    chunks_per_stage: int | None = None,
    recompute: str | None = None,
) -> Schedule:
    """Plan, in the words of the flags."""
    _check_sizes(mode, stages, microbatches, chunks_per_stage)
    if recompute is not None:
        return plan_recomputed(
            *(mode, parse_recompute(recompute)),
            n_stages=stages,
            n_microbatches=microbatches,
            costs=costs,
            memory=memory,
            effort=effort,
            chunks_per_stage=chunks_per_stage,
        )
    return plan(
        mode,
        n_stages=stages,
        n_microbatches=microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        chunks_per_stage=chunks_per_stage,
    )


def plan_layers_by_flags(
    mode: str,
    stages: int | None,
    microbatches: int | None,
    layers: LayerCosts,
    split: str | None,
    effort: str,
    *,
    chunks_per_stage: int | None = None,
    recompute: str | None = None,
) -> LayerPlan:
    """Plan with costs per layer, in the words of the flags."""
    _check_sizes(mode, stages, microbatches, chunks_per_stage)
    return plan_layers(
        mode,
        layers,
        n_stages=stages,
        n_microbatches=microbatches,
        split=None if split is None else parse_split(split),
        recompute=None if recompute is None else parse_recompute(recompute),
        effort=effort,
        chunks_per_stage=chunks_per_stage,
    )


def _check_sizes(
    mode: str,
    stages: int | None,
    microbatches: int | None,
    chunks_per_stage: int | None,
) -> None:
    sizes = {"--stages": stages, "--microbatches": microbatches}
    for flag, value in {**sizes, "--chunks_per_stage": chunks_per_stage}.items():
        if value is not None and value < 1:
            raise RequestError(f"{flag} is {value}; it must be at least 1")
        if flag in sizes and value is None and not is_file(mode):
            raise RequestError(f"{flag} is missing; {canonical(mode)} needs it")
