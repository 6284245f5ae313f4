"""The ``zbpp bench`` command: our modes and torch's, on the same model and devices."""

import importlib.util
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zbpp.bench.names import contenders_of
from zbpp.bench.request import BenchRequest, planned
from zbpp.cli.several import command_text, schedules_in
from zbpp.core import RequestError
from zbpp.training.options import BlockSizes, Compute, Memory, Processes, flag
from zbpp.training.user_model import UserModel, load_model

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Bench"]


@dataclass(frozen=True, kw_only=True)
class Bench(Processes, Compute, BlockSizes):
    """Time our modes and torch's own schedules, in turns, on the real devices.

    The same model, batch, split and optimizer for all, in one process group; gradients
    are compared before anything is timed. Starts its own processes, or runs as one of
    torchrun's.
    """

    config: Path | None = flag("flags in a TOML file; typed ones overrule it", None)
    out: Path = flag("folder for results.json and index.html")
    model: str | None = flag(
        "returns (model, batch[, loss_fn]); or hf:PATH; else that of zbpp train",
        None,
        metavar="MODULE:FUNCTION",
    )
    stages: int | None = flag("pipeline stages; else as torchrun has started", None)
    microbatches: int = flag("micro-batches of a step", 32)
    modes: str = flag(
        "modes of ours, or schedule files",
        "1F1B,ZBH1,ZBH2,ZBV,auto",
        metavar="MODE,..",
        also=("pipeline_schedule_mode", "mode"),
        many=True,
    )
    peers: str = flag(
        "torch's usual schedules, or those named",
        "none",
        metavar="torch|torch:NAME,..|none",
        many=True,
    )
    warmup: int = flag("steps of each turn that do not count", 5)
    steps: int = flag("steps of each contender that do", 20)
    rounds: int = flag("turns of each contender that these are dealt to", 4)
    costs: Path | None = flag(
        "costs file in ms to plan and predict with; else auto measures first, others "
        "plan with equal times and predict by the costs of the same steps",
        None,
    )
    memory_limit: Memory = flag("of a stage, for auto", None)
    emulate: Path | None = flag("costs file in ms: layers that sleep instead", None)
    effort: str = flag("of the plans: fast, default, best or best:SECONDS", "default")
    reference: Literal["first", "plain"] = flag(
        "whose gradients are right: the first contender's, or a plain loop's", "first"
    )
    tolerance: float = flag(
        "largest difference of gradients, relative to the largest of their layer", 1e-5
    )
    optimizer: str = flag("of torch.optim", "adamw")
    clip_grad_norm: float | None = flag("largest norm of the model's gradient", None)
    dtype: Literal["fp32", "bf16"] = flag("16 bits by autocast", "fp32")
    cuda_graphs: bool = flag("of ours: passes as CUDA graphs", False)
    microbatch_size: int = flag("samples of a micro-batch", 2)
    seed: int = flag("of the weights", 0)
    json: bool = flag("print one JSON object instead of the table", False, pair=False)

    def run(self) -> None:
        """Compare, and return when it is done.

        Raises:
            RequestError: the request is wrong, or a contender cannot run.
            WorkerError: a process failed, or the gradients of a contender are wrong.
        """
        if importlib.util.find_spec("torch") is None:
            raise RequestError("a bench needs torch: pip install 'zbpp[train]'")
        self._check()
        from zbpp.runtime.support.devices import check_kind

        check_kind(self.device)
        request = planned(
            BenchRequest(
                contenders=contenders_of(*self._names()),
                stages=self._n_stages(),
                microbatches=self.microbatches,
                load=self._load(),
                out=self.out,
                command=self._command(),
                warmup=self.warmup,
                steps=self.steps,
                rounds=min(self.rounds, self.steps),
                costs=self.costs,
                emulate=self.emulate,
                memory_limit=self.memory_limit,
                effort=self.effort,
                reference=self.reference,
                tolerance=self.tolerance,
                optimizer=self.optimizer,
                clip_grad_norm=self.clip_grad_norm,
                dtype=self.dtype,
                compile=self.compiles,
                cuda_graphs=self.cuda_graphs,
                exact_sums=self.exact_sums,
                seed=self.seed,
                device=self.device,
                timeout_s=self.timeout_s,
                json=self.json,
            )
        )
        from zbpp.bench.start import start_bench

        start_bench(request)

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
        for name in ("microbatches", "steps", "rounds", "warmup", "seq"):
            if getattr(self, name) < 1:
                raise RequestError(f"--{name} is {getattr(self, name)}; at least 1")
        for name in ("timeout_s", "tolerance", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RequestError(f"--{name} is {value}; it must be above 0")
        if self.out.exists() and not self.out.is_dir():
            raise RequestError(f"--out {self.out} is a file; name a folder")
        if self.emulate is not None:
            for name in ("model", "costs", "clip_grad_norm"):
                if getattr(self, name) is not None:
                    raise RequestError(
                        f"--{name} does not go with --emulate, whose layers sleep"
                    )

    def _load(self) -> "Callable[[], UserModel]":
        if self.model is not None:
            return partial(
                load_model, self.model, seq=self.seq, samples=self.microbatch_size
            )
        from zbpp.training.llama import LlamaConfig

        config = LlamaConfig.of(self, seed=self.seed)
        return partial(config.loaded, self.microbatch_size)
