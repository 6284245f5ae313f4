"""The options of a bench, and the schedules that follow from them; loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from zbpp.bench.names import OURS, TORCH, split_name
from zbpp.core import Costs, RequestError, Schedule, read_costs
from zbpp.planning import is_auto, plan
from zbpp.training.options import (
    Compute,
    Count,
    Memory,
    Microbatches,
    OutputFolder,
    Positive,
    Processes,
    Switch,
)
from zbpp.training.user_model import UserModel

__all__ = ["BenchOptions", "BenchRequest", "costs_of", "planned"]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Processes, Compute):
    """Comparison."""

    out: OutputFolder
    """Folder for results.json and index.html."""
    microbatches: Microbatches = 32
    """Micro-batches of a step."""
    warmup: Count = 5
    """Steps of each turn that do not count."""
    steps: Count = 20
    """Steps of each contender that do."""
    rounds: Count = 4
    """Turns of each contender that these are dealt to."""
    costs: Path | None = None
    """Costs file in ms to plan and predict with; else they are measured."""
    memory_limit: Memory | None = None
    """Of a stage, for auto."""
    emulate: Path | None = None
    """Costs file in ms: layers that sleep instead."""
    effort: str = "default"
    """Of the plans: fast, default, best or best:SECONDS."""
    clip_grad_norm: Positive | None = None
    """Largest norm of the model's gradient."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """16 bits are by autocast."""
    json: Switch = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest(BenchOptions):
    """The options, and what follows from them.

    ``load`` makes the model, alike in all processes; ``schedules`` has an entry for
    every contender of ours, None for one that is planned for what it measures.
    """

    contenders: tuple[str, ...]
    stages: int
    load: Callable[[], UserModel]
    command: str
    schedules: Mapping[str, Schedule | None] = field(default_factory=dict)

    @property
    def steps_a_turn(self) -> int:
        """Steps that count of one turn of a contender."""
        return -(-self.steps // self.rounds)


def costs_of(request: BenchRequest) -> Costs | None:
    """Costs to plan and predict with; None: there are none."""
    path = request.emulate or request.costs
    if path is None:
        return None
    costs = read_costs(path)
    return costs.with_limit(request.memory_limit)


def planned(request: BenchRequest) -> BenchRequest:
    """Plan what can be planned before any process starts.

    Raises:
        RequestError: a contender cannot run; it is named.
    """
    costs = costs_of(request)
    schedules: dict[str, Schedule | None] = {}
    for contender in request.contenders:
        whose, name = split_name(contender)
        if whose == TORCH and request.emulate is not None:
            raise RequestError(
                f"{contender} cannot run with --emulate: only stages of zbpp can sleep "
                "in place of computing; leave --peers out"
            )
        if whose != OURS:
            continue
        if is_auto(name) and costs is None:
            schedules[contender] = None
            continue
        try:
            schedules[contender] = plan(
                name,
                n_stages=request.stages,
                n_microbatches=request.microbatches,
                costs=costs or Costs(),
                effort=request.effort,
            )
        except RequestError as error:
            raise RequestError(f"{contender} cannot run: {error}") from error
    return replace(request, schedules=schedules)
