"""The request of a bench, and the schedules that follow from it; loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zbpp.bench.names import OURS, TORCH, split_name
from zbpp.core import Costs, RequestError, Schedule
from zbpp.planning import is_auto, plan
from zbpp.training.user_model import UserModel

__all__ = ["BenchRequest", "planned"]

_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The contenders, and how they are timed.

    Args:
        contenders: their names.
        stages: number of stages, and of processes.
        microbatches: of a step.
        load: makes the model, alike in all processes.
        out: folder for the results.
        command: that asks for this.
        warmup: steps of each turn that do not count.
        steps: steps of each contender that do, at least.
        costs: in ms; layers sleep for them in place of computing.
        dtype: ``"bf16"``: by autocast.
        device: as `zbpp.runtime.support.devices.asked_device` takes it.
        schedules: by contender of ours; None: planned for what its layers take.
    """

    contenders: tuple[str, ...]
    stages: int
    microbatches: int
    load: Callable[[], UserModel]
    out: Path
    command: str
    warmup: int = 5
    steps: int = 20
    costs: Costs | None = None
    dtype: str = "fp32"
    device: str = "auto"
    schedules: Mapping[str, Schedule | None] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Turns of each contender."""
        return min(_ROUNDS, self.steps)

    @property
    def steps_a_turn(self) -> int:
        """Steps that count of one turn of a contender."""
        return -(-self.steps // self.rounds)


def planned(request: BenchRequest) -> BenchRequest:
    """Plan what can be planned before any process starts.

    Raises:
        RequestError: a contender cannot run; it is named.
    """
    schedules: dict[str, Schedule | None] = {}
    for contender in request.contenders:
        whose, name = split_name(contender)
        if whose == TORCH and request.costs is not None:
            raise RequestError(
                f"{contender} cannot run with --emulate: only stages of zbpp can sleep "
                "in place of computing; leave --peers out"
            )
        if whose != OURS:
            continue
        schedules[contender] = None
        if is_auto(name) and request.costs is None:
            continue
        try:
            schedules[contender] = plan(
                name,
                n_stages=request.stages,
                n_microbatches=request.microbatches,
                costs=request.costs or Costs(),
            )
        except RequestError as error:
            raise RequestError(f"{contender} cannot run: {error}") from error
    return replace(request, schedules=schedules)
