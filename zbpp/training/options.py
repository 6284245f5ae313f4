"""The options of `zbpp train`, and groups of flags that other commands share.

A command is a dataclass, a flag one of its fields: `flag` gives it a default and a line
of help, and the class that declares it is its group in the help text. This file loads
no torch; `zbpp.cli.parser` hands the fields to cyclopts.
"""

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from zbpp.core import LayerCosts, RequestError, read_layers
from zbpp.core.costs.units import with_limit
from zbpp.core.sharding import Shard
from zbpp.planning import MODE_WORDS
from zbpp.planning.request import parse_recompute, parse_split
from zbpp.schedules import Recomputing, Split

__all__ = [
    "HF",
    "MODEL_FLAG",
    "MODES_FLAG",
    "MODE_FLAG",
    "BlockSizes",
    "Compute",
    "Memory",
    "Planning",
    "Processes",
    "Replicas",
    "RunOptions",
    "Train",
    "check_above_zero",
    "check_at_least",
    "flag",
]

HF = "hf:"
"""Begin of the name of a model of transformers."""
Memory = Annotated[float | None, "memory"]
"""An amount of memory: a number, or one with a unit, such as ``40GiB``."""
MODE_FLAG: dict[str, Any] = {"metavar": "MODE", "also": ("mode",)}
MODES_FLAG: dict[str, Any] = {
    "metavar": "MODE,..",
    "also": ("pipeline_schedule_mode", "mode"),
    "many": True,
}
MODEL_FLAG: dict[str, Any] = {
    "text": "returns (model, batch[, loss_fn]); or hf:PATH; else that of zbpp train",
    "default": None,
    "metavar": "MODULE:FUNCTION",
}


def flag(
    text: str,
    default: Any = MISSING,
    *,
    metavar: str | None = None,
    also: tuple[str, ...] = (),
    many: bool = False,
    pair: bool = True,
    hidden: bool = False,
) -> Any:
    """Declare a flag as the field of a command.

    Args:
        text: of help.
        default: left out: the flag must be given.
        metavar: of its value in help texts; else by its type.
        also: other spellings, without hyphens.
        many: takes several values, with commas or spaces between them.
        pair: of a flag without a value: there is a ``--no_`` to it.
        hidden: accepted, but not in the help text.
    """
    about = {"text": text, "metavar": metavar, "also": also, "many": many,
             "pair": pair, "hidden": hidden}  # fmt: skip
    return field(default=default, metadata=about)


def check_at_least(options: object, least: int, *names: str) -> None:
    """Refuse values of these flags that are less; None is none."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise RequestError(f"--{name} is {value}; it must be at least {least}")


def check_above_zero(options: object, *names: str) -> None:
    """Refuse values of these flags that are not above 0; None is none."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise RequestError(f"--{name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Schedule."""

    stages: int | None = flag("pipeline stages; a file knows its own", None)
    microbatches: int | None = flag("of a step; a file knows its own", None)
    costs: Path | None = flag("costs file; else F, B and W take 1", None)
    layers: Path | None = flag("layers file, in place of --costs", None)
    split: str | None = flag(
        "of the layers: balanced, even, or those of each chunk: 3,4",
        None,
        metavar="SPLIT",
        many=True,
    )
    recompute: str | None = flag(
        "what B computes again: auto, all, none, or numbers of layers (of chunks, "
        "where costs are theirs)",
        None,
        metavar="WHICH",
        many=True,
    )
    memory_limit: Memory = flag(
        "of a stage: 40GiB where costs are in bytes, or in their unit", None
    )
    enable_optimizer_post_validation: bool | None = flag(
        "step before the norm is known and validate later; left out: where B and W "
        "are apart",
        None,
    )

    @property
    def asked_split(self) -> Split:
        """Return the split that ``--split`` asks for."""
        return None if self.split is None else parse_split(self.split)

    @property
    def asked_recompute(self) -> Recomputing | None:
        """Return the layers that ``--recompute`` asks for."""
        return None if self.recompute is None else parse_recompute(self.recompute)

    def costs_of_layers(self) -> LayerCosts | None:
        """Read the layers file, if there is one, under ``--memory_limit``."""
        if self.layers is None:
            return None
        if self.costs is not None:
            raise RequestError(
                "--costs and --layers are both given; the costs of chunks follow from "
                "those of layers: leave --costs out"
            )
        layers = read_layers(self.layers)
        return with_limit(layers, self.memory_limit, name="--memory_limit")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas."""

    data_parallel: int = flag("replicas of every stage", 1)
    shard: Shard = flag(
        "what they hold in parts; each word includes those before", "none"
    )


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of the model of zbpp train."""

    seq: int = flag("tokens of a sample, also of hf:PATH", 128)
    dim: int = flag("width", 96)
    n_blocks: int = flag("transformer blocks; embedding and head are 2 layers more", 8)
    n_heads: int = flag("attention heads", 4)
    hidden: int = flag("inner width of the feed-forward layers", 256)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Computation."""

    compile: Literal["off", "blocks"] = flag(
        "torch.compile for each block; B and W stay apart", "off"
    )
    exact_sums: bool = flag("gradients to the last bit alike in all modes", True)

    @property
    def compiles(self) -> bool:
        """True if blocks are compiled."""
        return self.compile == "blocks"


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes."""

    device: str = flag("auto (an accelerator, else the CPU), cpu, cuda, xpu ..", "auto")
    timeout_s: float = flag("seconds that a stage waits for another one", 600.0)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Processes, Compute, BlockSizes, Replicas, Planning):
    """Run."""

    pipeline_schedule_mode: str = flag(MODE_WORDS, "ZBH1", **MODE_FLAG)
    effort: Literal["fast", "default"] = flag(
        "of the search; for more let zbpp plan write a file", "default"
    )
    model: str | None = flag(
        "of transformers: hf:config.json, hf:FOLDER with weights; else a small Llama",
        None,
        metavar="hf:PATH",
    )
    emulate: Path | None = flag(
        "costs or layers file in ms: layers that sleep instead", None
    )
    microbatch_size: int = flag("samples of a micro-batch", 2)
    seed: int = flag("of the weights and of the choice of text", 0)
    dtype: Literal["fp32", "bf16", "fp16"] = flag("16 bits by autocast", "fp32")
    tensor_parallel: int = flag("processes that share the blocks of a stage", 1)
    transport: Literal["processes", "local"] = flag(
        "local: all in this process", "processes"
    )
    post_validation_rollback: Literal["auto", "deferred", "compiled", "snapshot"] = (
        flag("has no effect", "auto", hidden=True)
    )

    def __post_init__(self) -> None:
        sizes = ("stages", "microbatches", "microbatch_size", "seq")
        check_at_least(self, 1, *sizes, "data_parallel", "tensor_parallel")
        check_at_least(self, 0, "seed")
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
        if self.compiles and self.emulate is not None:
            raise RequestError(
                "--compile: emulated layers sleep; leave one of them out"
            )
        check_above_zero(self, "timeout_s")

    @property
    def n_peers(self) -> int:
        """Processes of a stage."""
        return self.data_parallel * self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Training."""

    alternating_buffers: bool = flag(
        "layers gathered into two buffers in turn; with --shard parameters", False
    )
    steps: int | None = flag("optimizer steps; 200, or 10 emulated ones", None)
    lr: float = flag("learning rate of AdamW after the warm-up", 3e-3)
    warmup_steps: int = flag("steps over which it rises", 10)
    weight_decay: float = flag("of AdamW", 0.1)
    clip_grad_norm: float = flag("largest norm of the model's gradient", 1.0)
    max_consecutive_skips: int = flag("steps in a row with Inf or NaN, then stop", 5)
    validation_microbatches: int = flag("held-out text of the final loss", 32)
    data: Path | None = flag("text file or folder; else Python's own source", None)
    metrics: Path | None = flag("JSON line a step, and one with the results", None)
    log_every: int = flag("steps between log lines", 10)
    save_dir: Path | None = flag("checkpoints: at the end, and at SIGTERM", None)
    save_every: int | None = flag("steps between checkpoints", None)
    keep: int = flag("the newest checkpoints that stay", 3)
    resume: str = flag("auto (the newest of --save_dir), none, or a path", "auto")
    max_restarts: int = flag("new starts after a process has died", 0)
    costs_out: Path | None = flag("costs file (ms) of the measured times", None)
    trace: Path | None = flag("timeline of the last step, for Perfetto", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("steps", "validation_microbatches", "log_every", "save_every", "keep")
        check_at_least(self, 1, *counts, "max_consecutive_skips")
        check_at_least(self, 0, "warmup_steps", "lr", "weight_decay", "max_restarts")
        if self.alternating_buffers and self.shard != "parameters":
            raise RequestError(
                "--alternating_buffers hold layers for the time of a pass, and --shard "
                f"is {self.shard}, which keeps them whole for longer; give --shard "
                "parameters"
            )
        for name in ("save_every", "max_restarts"):
            if getattr(self, name) and self.save_dir is None:
                raise RequestError(f"--{name} needs --save_dir, a folder to save to")
        check_above_zero(self, "clip_grad_norm")
