"""The options of `zbpp bench`, and their consequences; loads no torch."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import Directory

from zbpp.core import Costs, RequestError, Schedule, read_costs
from zbpp.planning import canonical, is_auto, is_file, plan
from zbpp.training.options import (
    MODES,
    Count,
    Microbatches,
    ModelOptions,
    Names,
    Stages,
)

OURS, TORCH = "zbpp:", "torch:"
"""Begin of the name of a contender; a mode or torch's name of a schedule follows."""

_USUAL = (
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_ALL = (*_USUAL, "GPipe", "LoopedBFS")
_ROUNDS, _STAGES = 4, 2


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Options of `zbpp bench`."""

    modes: Annotated[Names, MODES] = field(
        default=("1F1B", "ZBH1", "ZBH2", "ZBV", "auto"), kw_only=False
    )
    out: Annotated[Directory, Parameter(alias="-o")]
    """Folder for results.json, index.html and trace.json."""
    peers: Annotated[Names, Parameter(metavar="torch|torch:NAME,..|none")] = ("none",)
    """Schedules of torch: the usual ones, or by name."""
    stages: Stages | None = None
    """Pipeline stages; default: 2."""
    microbatches: Microbatches = 32
    """Micro-batches of a step."""
    warmup: Count = 5
    """Steps before each round, which do not count."""
    steps: Count = 20
    """Steps of each contender that count."""
    emulate: Path | None = None
    """Costs file in ms: layers sleep instead of computing."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision; 16-bit types use autocast."""

    @property
    def rounds(self) -> int:
        """Turns of each contender."""
        return min(_ROUNDS, self.steps)

    @property
    def steps_a_turn(self) -> int:
        """Steps that count of one turn of a contender."""
        return -(-self.steps // self.rounds)


@dataclass(frozen=True)
class BenchPlan:
    """The contenders, and their schedules as far as they need no measurement.

    Args:
        n_stages: number of stages, and of processes.
        command: that asks for the bench.
        costs: in ms; layers sleep for them in place of computing.
        schedules: by contender; None: torch's, or planned for what its layers take.
    """

    n_stages: int
    command: str
    costs: Costs | None
    schedules: Mapping[str, Schedule | None]


def planned(words: Sequence[str], options: BenchOptions) -> BenchPlan:
    """Plan as much as possible before any process starts.

    Raises:
        RequestError: a contender cannot run; it is named.
    """
    from zbpp.runtime.support.devices import check_kind

    check_kind(options.device)
    if options.emulate is not None and options.model is not None:
        raise RequestError("--model does not go with --emulate, whose layers sleep")
    n_stages = options.stages or _STAGES
    if n_stages < 2:
        raise RequestError("a bench of 1 stage compares nothing; it needs 2 or more")
    costs = None if options.emulate is None else read_costs(options.emulate)
    schedules: dict[str, Schedule | None] = {}
    for contender in _contenders(options.modes, options.peers):
        schedules[contender] = None
        mode = contender.removeprefix(OURS)
        if contender.startswith(TORCH):
            if costs is not None:
                raise RequestError(
                    f"{contender} cannot run with --emulate: only stages of zbpp can "
                    "sleep in place of computing; leave --peers out"
                )
        elif costs is not None or not is_auto(mode):
            try:
                schedules[contender] = plan(
                    mode,
                    n_stages=n_stages,
                    n_microbatches=options.microbatches,
                    costs=costs,
                )
            except RequestError as error:
                raise RequestError(f"{contender} cannot run: {error}") from error
    return BenchPlan(n_stages, shlex.join(["zbpp", *words]), costs, schedules)


def _contenders(modes: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Name all contenders once, ours first.

    >>> _contenders(["1f1b"], ["torch:gpipe", "none"])
    ['zbpp:1F1B', 'torch:GPipe']
    """
    spellings = {f"{TORCH}{name}".lower(): [f"{TORCH}{name}"] for name in _ALL}
    spellings |= {"torch": [f"{TORCH}{name}" for name in _USUAL], "none": []}
    names = [
        f"{OURS}{mode if is_file(mode) else canonical(mode)}"
        for mode in modes
        if mode.lower() != "none"
    ]
    for peer in peers:
        if peer.lower() not in spellings:
            raise RequestError(
                f"--peers {peer}: write torch, for {', '.join(_USUAL)}, or torch:NAME "
                f"with one of {', '.join(_ALL)}"
            )
        names += spellings[peer.lower()]
    if not names:
        raise RequestError("nothing is to be compared; name modes, or peers")
    return list(dict.fromkeys(names))
