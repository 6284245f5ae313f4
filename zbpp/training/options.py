"""The options of `zbpp train`; this file loads no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zbpp.core import RequestError, parse_memory
from zbpp.core.sharding import Shard
from zbpp.planning import MODE_WORDS

__all__ = ["HF", "MemoryText", "RunOptions", "Train", "YesNoUnsaid"]

HF = "hf:"
"""Begin of the name of a model of transformers."""

YesNoUnsaid = Annotated[bool | None, tyro.conf.DisallowNone]
"""``--flag``, ``--no_flag``, or neither."""
MemoryText = Annotated[
    float | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="MEMORY",
        instance_from_str=lambda texts: parse_memory(texts[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float),
        str_from_instance=lambda value: [f"{value:g}"] if value else ["none"],
    ),
]
"""An amount of memory: a number, or one with a unit, such as ``40GiB``; or none."""
_Path = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]
_Count = Annotated[int | None, tyro.conf.arg(metavar="INT")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Model, schedule and processes of a run: what a training and a profile share.

    Raises:
        RequestError: a value is out of its range.
    """

    pipeline_schedule_mode: Annotated[str, tyro.conf.arg(help=MODE_WORDS)] = "ZBH1"
    stages: _Count = None
    """Pipeline stages, a process each; else as torchrun or the file says, else 2."""
    data_parallel: int = 1
    """Replicas of every stage, a process each; each reads its own share of a batch of
    as many times the micro-batches."""
    shard: Shard = "none"
    """Tensors that replicas hold in parts: optimizer state (and parameters between
    steps), gradients too, parameters as well; none: each holds all."""
    tensor_parallel: int = 1
    """Processes that share the blocks of each stage."""
    microbatches: _Count = None
    """Micro-batches of a replica in a step; else as the file says, else 8."""
    microbatch_size: int = 2
    """Windows of text in a micro-batch."""
    seq: int = 128
    """Bytes in a window."""
    seed: int = 0
    """Of the initial weights and of the choice of windows."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Computation: fp32, or bf16 or fp16 by autocast (the weights stay fp32); fp16 with
    a loss scale that adapts."""
    enable_optimizer_post_validation: YesNoUnsaid = None
    """Step before the global gradient norm is known, and roll the step back in the next
    one if it was invalid; left out: where the backward is split."""
    post_validation_rollback: Literal["auto", "deferred", "compiled", "snapshot"] = (
        "auto"
    )
    """Has no effect: the class of the optimizer decides how a step is rolled back."""
    model: Annotated[str | None, tyro.conf.arg(metavar="hf:PATH")] = None
    """A causal language model of transformers: hf:config.json, with random weights, or
    hf:FOLDER, a checkpoint of safetensors; left out: a Llama of the sizes below."""
    dim: int = 96
    """Width of the model."""
    n_blocks: int = 8
    """Transformer blocks; embedding and head are two layers more."""
    n_heads: int = 4
    """Attention heads."""
    hidden: int = 256
    """Inner width of the feed-forward layers."""
    costs: _Path = None
    """Costs file for the plan and for the simulated bubble rate."""
    layers: _Path = None
    """Layers file in place of costs: the layers are split for the plan."""
    split: Annotated[str | None, tyro.conf.arg(metavar="SPLIT")] = None
    """balanced (needs --layers), even, or the layers of each chunk: 3,4,3; left out:
    as the schedule file says, else balanced with --layers, else as many blocks each."""
    recompute: Annotated[str | None, tyro.conf.arg(metavar="WHICH")] = None
    """Layers whose graph B computes again: auto (needs m_r in the costs, and a memory
    limit), all, none, or their numbers: 1,2,3; left out: as the schedule file says."""
    memory_limit: MemoryText = None
    """Largest memory of a stage: 16GiB where costs are in bytes, or in their unit."""
    effort: Literal["fast", "default"] = "default"
    """Search effort; every process plans for itself, so for more let zbpp plan
    write a file."""
    emulate: _Path = None
    """Costs file in ms: layers that sleep instead, to compare with the simulation. A
    layers file (it names n_layers) is one too: each layer sleeps its own time."""
    compile: bool = False
    """Compile each block by torch.compile; B and W stay apart."""
    cuda_graphs: bool = False
    """Record passes as CUDA graphs in the third step, and replay them: less host time.
    On CPUs there are none."""
    exact_sums: bool = True
    """Gradients to the last bit alike in all modes; --no_exact_sums is a few per cent
    faster."""
    device: str = "auto"
    """auto: the accelerator that torch finds, else the CPU; or cpu, cuda, xpu, npu and
    so on. Processes share what there are too few of."""
    transport: Literal["processes", "local"] = "processes"
    """local: all stages in this process, one after the other."""
    timeout_s: float = 600.0
    """Seconds that a stage waits for another one before it gives up, also at the
    start."""

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "microbatch_size", "seq"):
            self._check_at_least(name, 1)
        for name in ("data_parallel", "tensor_parallel"):
            self._check_at_least(name, 1)
        self._check_at_least("seed", 0)
        if self.shard != "none" and self.data_parallel == 1:
            raise RequestError(
                f"--shard {self.shard} needs replicas to share it; give "
                "--data_parallel, 2 or more"
            )
        if self.n_peers > 1 and self.transport == "local":
            raise RequestError(
                f"--transport local is one process, and a stage has {self.n_peers}; "
                "leave it out, or --data_parallel and --tensor_parallel"
            )
        for name in ("compile", "cuda_graphs"):
            if getattr(self, name) and self.emulate is not None:
                raise RequestError(
                    f"--{name}: emulated layers sleep; leave one of them out"
                )
        self._check_above_zero("timeout_s")

    @property
    def n_peers(self) -> int:
        """Processes of a stage."""
        return self.data_parallel * self.tensor_parallel

    def _check_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not value >= least:
            raise RequestError(f"--{name} is {value}; it must be at least {least}")

    def _check_above_zero(self, name: str) -> None:
        if not getattr(self, name) > 0:
            raise RequestError(f"--{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Sizes, schedule and optimizer of a training; `zbpp.training.start` runs it.

    Raises:
        RequestError: a value is out of its range.
    """

    alternating_buffers: bool = False
    """Gather layers into two buffers in turn, each beside the pass of another, and sum
    gradients from two others in every W; with --shard parameters."""
    steps: int | None = None
    """Optimizer steps; 200 if left out, or 10 emulated ones."""
    lr: float = 3e-3
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly."""
    weight_decay: float = 0.1
    """Of AdamW."""
    clip_grad_norm: float = 1.0
    """Largest norm of the whole model's gradient."""
    post_validation_failures: int = 3
    """Wait for the norm after so many invalid steps ..."""
    post_validation_window: int = 10
    """... of the last so many ..."""
    post_validation_clean: int = 10
    """... until so many steps in a row needed no correction; a run begins so."""
    max_consecutive_skips: int = 5
    """Stop after so many steps in a row with an Inf or NaN gradient, and name it."""
    validation_microbatches: int = 32
    """Micro-batches of held-out text for the final loss."""
    data: _Path = None
    """A text file or a folder; without it the Python standard library's source."""
    metrics: _Path = None
    """Write one JSON line per step, and a last one with the final results."""
    log_every: int = 10
    """Steps between log lines."""
    save_dir: _Path = None
    """Folder for checkpoints: one at the end, and when SIGTERM or Ctrl-C stops the run
    between two steps."""
    save_every: _Count = None
    """Steps between checkpoints; they are written while the run goes on."""
    keep: int = 3
    """Checkpoints that stay in the folder, the newest."""
    resume: str = "auto"
    """auto: go on from the newest undamaged checkpoint in --save_dir, if there is one;
    none; or the path of a checkpoint. Stages and mode may be others."""
    max_restarts: int = 0
    """Start again so often from the last checkpoint when a process has died."""
    costs_out: _Path = None
    """Write the measured times of the passes as a costs file (ms) to plan with."""
    trace: _Path = None
    """Write what each stage did in the last step, for Perfetto, and for zbpp compare
    --measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "validation_microbatches", "log_every"):
            self._check_at_least(name, 1)
        for name in ("failures", "window", "clean"):
            self._check_at_least(f"post_validation_{name}", 1)
        for name in ("max_consecutive_skips", "save_every", "keep"):
            self._check_at_least(name, 1)
        for name in ("warmup_steps", "lr", "weight_decay", "max_restarts"):
            self._check_at_least(name, 0)
        if self.alternating_buffers and self.shard != "parameters":
            raise RequestError(
                "--alternating_buffers hold layers for the time of a pass, and --shard "
                f"is {self.shard}, which keeps them whole for longer; give --shard "
                "parameters"
            )
        for name in ("save_every", "max_restarts"):
            if getattr(self, name) and self.save_dir is None:
                raise RequestError(f"--{name} needs --save_dir, a folder to save to")
        self._check_above_zero("clip_grad_norm")
