"""The ``zbpp bench`` command: our modes and torch's, on the same model and devices."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from zbpp.bench.names import contenders_of
from zbpp.bench.request import BenchRequest, planned
from zbpp.core import RequestError, read_costs
from zbpp.training.options import (
    MODES,
    Count,
    Microbatches,
    ModelName,
    ModelSize,
    Names,
    OutputFolder,
    Stages,
)
from zbpp.training.user_model import UserModel, load_model

__all__ = ["Bench"]


@dataclass(frozen=True, kw_only=True)
class Bench(ModelSize):
    """Time our modes and torch's own schedules, in turns, on the real devices.

    The same model, batch, split and optimizer for all, in one process group; loss and
    gradient norm of the first step must agree. Starts its own processes, or runs as one
    of torchrun's.
    """

    modes: Annotated[Names, MODES] = field(
        default=("1F1B", "ZBH1", "ZBH2", "ZBV", "auto"), kw_only=False
    )
    out: OutputFolder
    """Folder for results.json, index.html and trace.json."""
    peers: Annotated[Names, Parameter(metavar="torch|torch:NAME,..|none")] = ("none",)
    """Torch's usual schedules, or those named."""
    stages: Stages | None = None
    """Pipeline stages; else as torchrun has started."""
    microbatches: Microbatches = 32
    """Micro-batches of a step."""
    microbatch_size: Count = 2
    """Samples of a micro-batch."""
    model: ModelName | None = None
    """Returns (model, batch[, loss_fn]); or hf:PATH; else that of zbpp train."""
    warmup: Count = 5
    """Steps of each turn that do not count."""
    steps: Count = 20
    """Steps of each contender that do."""
    emulate: Path | None = None
    """Costs file in ms: layers that sleep instead."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """16 bits are by autocast."""
    device: str = "auto"
    """auto (an accelerator, else the CPU), cpu, cuda, xpu .."""

    def run(self, words: Sequence[str]) -> None:
        """Compare, and return when it is done."""
        if self.emulate is not None and self.model is not None:
            raise RequestError("--model does not go with --emulate, whose layers sleep")
        from zbpp.runtime.support.devices import check_kind

        check_kind(self.device)
        request = BenchRequest(
            contenders=contenders_of(*self._names()),
            stages=self._n_stages(),
            microbatches=self.microbatches,
            load=self._load(),
            out=self.out,
            command=_command(words),
            warmup=self.warmup,
            steps=self.steps,
            costs=None if self.emulate is None else read_costs(self.emulate),
            dtype=self.dtype,
            device=self.device,
        )
        from zbpp.bench.run import start_bench

        start_bench(planned(request))

    def _names(self) -> tuple[list[str], list[str]]:
        modes, peers = (
            [name for name in names if name.lower() != "none"]
            for names in (self.modes, self.peers)
        )
        return modes, peers

    def _n_stages(self) -> int:
        started = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
        if started is None and self.stages is None:
            raise RequestError("--stages is missing; or start with torchrun")
        if started is not None and self.stages not in (None, int(started)):
            raise RequestError(
                f"--stages is {self.stages}, but torchrun has started {started} "
                "processes; leave --stages out"
            )
        n_stages = int(started or self.stages or 0)
        if n_stages < 2:
            raise RequestError(
                f"a bench of {n_stages} stages compares nothing; it needs 2 or more"
            )
        return n_stages

    def _load(self) -> Callable[[], UserModel]:
        if self.model is not None:
            return partial(
                load_model, self.model, seq=self.seq, samples=self.microbatch_size
            )
        from zbpp.training.llama import LlamaConfig

        config = LlamaConfig.of(self)
        return partial(config.loaded, self.microbatch_size)


def _command(words: Sequence[str]) -> str:
    command = shlex.join(["zbpp", *words])
    if "RANK" not in os.environ:
        return command
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return f"torchrun --nproc-per-node {started} -m {command}"
