"""The ``zbpp bench`` command: our modes and torch's, on the same model and devices."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from zbpp.bench.names import contenders_of
from zbpp.bench.request import BenchOptions, BenchRequest, planned
from zbpp.cli.several import command_text, schedules_in
from zbpp.core import RequestError
from zbpp.training.options import (
    MODEL_FLAG,
    MODES_FLAG,
    ModelSize,
    check_above_zero,
    check_at_least,
    flag,
)
from zbpp.training.user_model import UserModel, load_model

__all__ = ["Bench"]


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions, ModelSize):
    """Time our modes and torch's own schedules, in turns, on the real devices.

    The same model, batch, split and optimizer for all, in one process group; loss and
    gradient norm of the first step must agree. Starts its own processes, or runs as one
    of torchrun's.
    """

    model: str | None = flag(**MODEL_FLAG)
    stages: int | None = flag("pipeline stages; else as torchrun has started", None)
    modes: str = flag(
        "modes of ours, or schedule files",
        "1F1B,ZBH1,ZBH2,ZBV,auto",
        **MODES_FLAG,
    )
    peers: str = flag(
        "torch's usual schedules, or those named",
        "none",
        metavar="torch|torch:NAME,..|none",
        many=True,
    )
    microbatch_size: int = flag("samples of a micro-batch", 2)

    def run(self) -> None:
        """Compare, and return when it is done."""
        self._check()
        from zbpp.runtime.support.devices import check_kind

        check_kind(self.device)
        options = {
            field.name: getattr(self, field.name) for field in fields(BenchOptions)
        }
        request = BenchRequest(
            **options | {"rounds": min(self.rounds, self.steps)},
            contenders=contenders_of(*self._names()),
            stages=self._n_stages(),
            load=self._load(),
            command=self._command(),
        )
        from zbpp.bench.run import start_bench

        start_bench(planned(request))

    def _names(self) -> tuple[list[str], list[str]]:
        none = ("", "none")
        modes = [] if self.modes.lower() in none else schedules_in(self.modes)
        peers = [] if self.peers.lower() in none else schedules_in(self.peers)
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

    def _command(self) -> str:
        if "RANK" not in os.environ:
            return command_text(self)
        started = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        return f"torchrun --nproc-per-node {started} -m {command_text(self)}"

    def _check(self) -> None:
        check_at_least(self, 1, "microbatches", "steps", "rounds", "warmup", "seq")
        check_above_zero(self, "timeout_s", "clip_grad_norm")
        if self.out.exists() and not self.out.is_dir():
            raise RequestError(f"--out {self.out} is a file; name a folder")
        if self.emulate is not None:
            for name in ("model", "costs", "clip_grad_norm"):
                if getattr(self, name) is not None:
                    raise RequestError(
                        f"--{name} does not go with --emulate, whose layers sleep"
                    )

    def _load(self) -> Callable[[], UserModel]:
        if self.model is not None:
            return partial(
                load_model, self.model, seq=self.seq, samples=self.microbatch_size
            )
        from zbpp.training.llama import LlamaConfig

        config = LlamaConfig.of(self)
        return partial(config.loaded, self.microbatch_size)
