"""The flags that most commands share, and the schedules and costs that they name."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    Schedule,
    Timeline,
    read_costs,
    read_layers,
)
from zbpp.core.costs.units import with_limit
from zbpp.planning import MODE_WORDS, Plan, PlanRequest, canonical, is_file, make_plan
from zbpp.planning.answer import is_plan_file
from zbpp.planning.modes import CHUNKED_MODES, one_of
from zbpp.planning.replicas import Shard, replicated, with_gathers, with_replicas
from zbpp.planning.request import parse_recompute, parse_split
from zbpp.schedules import post_validated, without_checks
from zbpp.simulator import join, simulate, simulate_iterations
from zbpp.training.options import MemoryText, YesNoUnsaid

__all__ = [
    "ChunksOf",
    "CommonFlags",
    "ScheduleFlags",
    "SizedFlags",
    "mode_named",
    "shown_as",
]


_Text = str | None
_Count = int | None


def shown_as(metavar: str) -> object:
    """Name a value in help texts."""
    return tyro.conf.arg(metavar=metavar)


def mode_named() -> object:
    """Name a mode in help texts, which list all of them."""
    return tyro.conf.arg(metavar="MODE", help=MODE_WORDS)


ChunksOf = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="INT",
        help=f"For {one_of(CHUNKED_MODES, 'and')}; without it, as many as the costs "
        "list, or 2.",
    ),
]
"""Chunks of a stage, of modes that have any number."""


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

    def chunk_costs(self) -> Costs:
        """Read the costs, and let the flag overrule the file's memory limit."""
        costs = Costs() if self.costs is None else read_costs(self.costs)
        costs = with_limit(costs, self.memory_limit, name="--memory_limit")
        n, shard = self.data_parallel, self.shard
        return with_gathers(costs, data_parallel=n, shard=shard)

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

    def request(
        self,
        mode: str,
        *,
        stages: int | None,
        microbatches: int | None,
        chunks_per_stage: int | None,
        recompute: str | None = None,
    ) -> PlanRequest:
        """Ask for a mode, or a file, in the words of the flags.

        Raises:
            RequestError: a size is missing or wrong, or a file of costs is.
        """
        sizes = {"--stages": stages, "--microbatches": microbatches}
        for flag, size in {**sizes, "--chunks_per_stage": chunks_per_stage}.items():
            if size is not None and size < 1:
                raise RequestError(f"{flag} is {size}; it must be at least 1")
            if flag in sizes and size is None and not is_file(mode):
                raise RequestError(f"{flag} is missing; {canonical(mode)} needs it")
        request = PlanRequest(
            schedule=mode,
            n_stages=stages,
            n_microbatches=microbatches,
            chunks_per_stage=chunks_per_stage,
            costs=self.layer_costs(),
            split=None if self.split is None else parse_split(self.split),
            recompute=None if recompute is None else parse_recompute(recompute),
            effort=self.effort,
        )
        if request.costs is not None:
            return request
        if self.costs is None and is_plan_file(mode):  # it has costs of its own
            return replace(request, memory=self.memory_limit)
        return replace(request, costs=self.chunk_costs())


@dataclass(frozen=True, kw_only=True)
class SizedFlags(CommonFlags):
    """The sizes of a schedule that a command plans or reads."""

    stages: Annotated[_Count, shown_as("INT")] = None
    """Pipeline stages; a schedule file knows its own."""
    microbatches: Annotated[_Count, shown_as("INT")] = None
    """Micro-batches in a step; a schedule file knows its own."""
    chunks_per_stage: ChunksOf = None
    recompute: Annotated[_Text, shown_as("WHICH")] = None
    """Parts whose graph B computes again: auto (needs m_r in the costs, and a memory
    limit), all, none, or numbers: of layers with --layers, else of chunks: 0,2,5."""

    def plan(self, mode: str) -> Plan:
        """Plan a mode, or read a file."""
        request = self.request(
            mode,
            stages=self.stages,
            microbatches=self.microbatches,
            chunks_per_stage=self.chunks_per_stage,
            recompute=self.recompute,
        )
        return make_plan(request)

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
    pipeline_schedule_mode: Annotated[_Text, mode_named()] = None
    iterations: Annotated[int, shown_as("INT")] = 1
    """Iterations to draw; of several, with a barrier between them and without."""

    def load(self) -> tuple[Schedule, Costs]:
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
        plan = self.plan(str(modes.pop()))
        return self.with_checks(plan.schedule), plan.costs

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
