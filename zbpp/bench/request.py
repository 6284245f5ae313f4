"""The options of a bench, and the schedules that follow from them; loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zbpp.bench.names import OURS, peer_placement, split_name
from zbpp.core import Costs, RequestError, Schedule, read_costs
from zbpp.core.costs.units import with_limit
from zbpp.planning import is_auto, plan

if TYPE_CHECKING:
    from zbpp.training.user_model import UserModel

__all__ = ["BenchRequest", "costs_of", "planned"]


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """All that the processes of a bench are told; `zbpp.cli.bench` explains it.

    ``load`` gives the model, alike in all processes; ``schedules`` has an entry for
    every contender of ours, None for one that is planned for what it measures.
    """

    contenders: tuple[str, ...]
    stages: int
    microbatches: int
    load: "Callable[[], UserModel]"
    out: Path
    command: str
    warmup: int = 5
    steps: int = 20
    rounds: int = 4
    costs: Path | None = None
    emulate: Path | None = None
    memory_limit: float | None = None
    effort: str = "default"
    reference: Literal["first", "plain"] = "first"
    tolerance: float = 1e-5
    optimizer: str = "adamw"
    clip_grad_norm: float | None = None
    dtype: str = "fp32"
    compile: bool = False
    cuda_graphs: bool = False
    exact_sums: bool = True
    seed: int = 0
    device: str = "auto"
    timeout_s: float = 600.0
    json: bool = False
    schedules: Mapping[str, Schedule | None] = field(default_factory=dict)

    @property
    def steps_a_turn(self) -> int:
        """Steps that count of one turn of a contender."""
        return -(-self.steps // self.rounds)


def costs_of(request: BenchRequest) -> Costs | None:
    """Costs to plan and predict with; None: there are none.

    Raises:
        RequestError: the file is not valid.
    """
    path = request.emulate or request.costs
    if path is None:
        return None
    costs = read_costs(path)
    return with_limit(costs, request.memory_limit, name="--memory_limit")


def planned(request: BenchRequest) -> BenchRequest:
    """Plan what can be planned before any process starts.

    Raises:
        RequestError: a contender cannot be had; it is named.
    """
    known = costs_of(request)
    costs = known or Costs()
    found: dict[str, Schedule | None] = {}
    for contender in request.contenders:
        whose, name = split_name(contender)
        try:
            if whose != OURS:
                _check_peer(request, name, costs)
            elif is_auto(name) and known is None:
                found[contender] = None
            else:
                found[contender] = plan(
                    name,
                    n_stages=request.stages,
                    n_microbatches=request.microbatches,
                    costs=costs,
                    effort=request.effort,
                )
        except RequestError as error:
            raise RequestError(f"{contender} cannot run: {error}") from error
    return replace(request, schedules=found)


def _check_peer(request: BenchRequest, name: str, costs: Costs) -> None:
    times = costs.on(peer_placement(name, request.stages))
    if request.emulate is not None and any(times.hops):
        raise RequestError(
            f"{request.emulate} has comm, but torch's messages cannot be slowed down; "
            "leave comm out, or torch's schedules"
        )
