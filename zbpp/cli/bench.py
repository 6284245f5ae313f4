"""The ``zbpp bench`` command: our modes and torch's, on the same model and devices."""

import importlib.util
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from zbpp.bench.names import contenders_of
from zbpp.bench.request import BenchRequest, planned
from zbpp.cli.flags import shown_as
from zbpp.cli.pictures.several import command_text, schedules_in
from zbpp.cli.user_model import UserModel, load_model
from zbpp.core import RequestError
from zbpp.training.options import MemoryText

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Bench"]

_Path = Annotated[Path | None, shown_as("PATH")]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time our modes and torch's own schedules, in turns, on the real devices.

    The same model, batch, split and optimizer for all, in one process group; gradients
    are compared before anything is timed. Starts its own processes, or runs as one of
    torchrun's.
    """

    out: Path
    """Folder for results.json and index.html."""
    model: Annotated[str | None, shown_as("MODULE:FUNCTION")] = None
    """A function that returns (model, batch) or (model, batch, loss_fn), the batch of
    one micro-batch; or hf:PATH, a config.json of transformers, with --seq tokens and
    --microbatch_size samples; left out: the model of zbpp train."""
    stages: Annotated[int | None, shown_as("INT")] = None
    """Pipeline stages, a process each; else as many as torchrun has started."""
    microbatches: int = 32
    """Micro-batches in a step."""
    modes: Annotated[str, shown_as("MODE,MODE")] = "1F1B,ZBH1,ZBH2,ZBV,auto"
    """Modes of ours, or schedule files."""
    peers: Annotated[str, shown_as("torch|torch:NAME,..|none")] = "none"
    """Schedules of torch: its usual ones, or those named."""
    warmup: int = 5
    """Steps of each turn that do not count."""
    steps: int = 20
    """Steps of each contender that do."""
    rounds: int = 4
    """Turns of each contender that these steps are dealt to."""
    costs: _Path = None
    """Costs file in ms to plan and predict with; left out: auto measures first, others
    plan with equal times, and predictions take the costs of the same steps."""
    memory_limit: MemoryText = None
    """Largest memory of a stage, for auto."""
    emulate: _Path = None
    """Costs file in ms: layers that sleep in place of a model."""
    effort: str = "default"
    """Effort of the plans: fast, default, best or best:SECONDS."""
    reference: Literal["first", "plain"] = "first"
    """Whose gradients are right: those of the first contender, or those of a plain loop
    over the whole model on rank 0."""
    tolerance: float = 1e-5
    """Largest difference of gradients, relative to the largest one of their layer; a
    contender that differs more is not timed."""
    optimizer: str = "adamw"
    """An optimizer of torch.optim."""
    clip_grad_norm: Annotated[float | None, shown_as("FLOAT")] = None
    """Largest norm of the whole model's gradient, for all contenders."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Computation: fp32, or bf16 by autocast."""
    compile: bool = False
    """Of ours: compile each block by torch.compile; B and W stay apart."""
    cuda_graphs: bool = False
    """Of ours: passes as CUDA graphs, recorded in the third step of the warm-up."""
    exact_sums: bool = True
    """Of ours: gradients to the last bit alike in all modes."""
    seq: int = 128
    """Tokens of a sample, of hf:PATH and of the model of zbpp train."""
    microbatch_size: int = 2
    """Its samples in a micro-batch."""
    dim: int = 96
    """Width of the model of zbpp train."""
    n_blocks: int = 8
    """Its transformer blocks."""
    n_heads: int = 4
    """Its attention heads."""
    hidden: int = 256
    """Inner width of its feed-forward layers."""
    seed: int = 0
    """Of the initial weights."""
    device: str = "auto"
    """auto: the accelerator that torch finds, else the CPU; or cpu, cuda, xpu, npu and
    so on. Processes share what there are too few of."""
    timeout_s: float = 600.0
    """Seconds that a stage waits for another one before it gives up, also at the
    start."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of the table."""

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
                compile=self.compile,
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
        sizes = (self.dim, self.n_blocks, self.n_heads, self.hidden, self.seq)
        return partial(_small_llama, sizes, self.seed, self.microbatch_size)


def _small_llama(
    sizes: tuple[int, int, int, int, int], seed: int, samples: int
) -> UserModel:
    """The model of zbpp train, and one micro-batch."""
    from zbpp.bench.micro import random_tokens
    from zbpp.training.llama import LlamaConfig, build_layers, cross_entropy

    config = LlamaConfig(*sizes, seed=seed)
    inputs, targets = random_tokens(samples, config.seq, seed)
    build = partial(build_layers, config)
    return UserModel(build, inputs, targets, cross_entropy, config.n_layers)
