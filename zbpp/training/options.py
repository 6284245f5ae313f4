"""The options of `zbpp train`, and groups of flags that other commands share.

A command is a dataclass, a flag one of its fields: `flag` gives it a default and a line
of help, and the class that declares it is its group in the help text. This file loads
no torch; `zbpp.cli.parser` hands the fields to cyclopts.
"""

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from zbpp.core import LayerCosts, RequestError, read_layers
from zbpp.core.sharding import Shard
from zbpp.planning import MODE_WORDS
from zbpp.planning.request import parse_recompute, parse_split
from zbpp.schedules import Recomputing, Split

__all__ = [
    "HF",
    "MODEL_FLAG",
    "MODES_FLAG",
    "MODE_FLAG",
    "Compute",
    "Memory",
    "ModelSize",
    "Planning",
    "Processes",
    "Replicas",
    "RunOptions",
    "Splitting",
    "TrainOptions",
    "check_above_zero",
    "check_at_least",
    "flag",
]

HF = "hf:"
"""Begin of the name of a model of transformers."""
Memory = Annotated[float | None, "memory"]
"""An amount of memory: a number, or one with a unit, such as ``40GiB``."""
MODE_FLAG: dict[str, Any] = {"metavar": "MODE", "also": ("mode",)}
MODES_FLAG: dict[str, Any] = {"metavar": "MODE,..", "many": True}
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
) -> Any:
    """Declare a flag as the field of a command.

    Args:
        text: of help.
        default: left out: the flag must be given.
        metavar: of its value in help texts; else by its type.
        also: other spellings, without hyphens.
        many: takes several values, with commas or spaces between them.
        pair: of a flag without a value: there is a ``--no_`` to it.
    """
    about = {"text": text, "metavar": metavar, "also": also, "many": many,
             "pair": pair}  # fmt: skip
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
    memory_limit: Memory = flag(
        "of a stage: 40GiB where costs are in bytes, or in their unit", None
    )
    enable_optimizer_post_validation: bool | None = flag(
        "step before the norm is known and validate later; left out: where B and W "
        "are apart",
        None,
    )

    def costs_of_layers(self) -> LayerCosts | None:
        """Read the layers file, if there is one, under ``--memory_limit``."""
        if self.layers is None:
            return None
        if self.costs is not None:
            raise RequestError(
                "--costs and --layers are both given; the costs of chunks follow from "
                "those of layers: leave --costs out"
            )
        return read_layers(self.layers).with_limit(self.memory_limit)


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Layers."""

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

    @property
    def asked_split(self) -> Split:
        """Return the split that ``--split`` asks for."""
        return None if self.split is None else parse_split(self.split)

    @property
    def asked_recompute(self) -> Recomputing | None:
        """Return the layers that ``--recompute`` asks for."""
        return None if self.recompute is None else parse_recompute(self.recompute)


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas."""

    data_parallel: int = flag("replicas of every stage", 1)
    shard: Shard = flag(
        "what they hold in parts; each word includes those before", "none"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Model of zbpp train."""

    seq: int = flag("tokens of a sample, also of hf:PATH", 128)
    size: Literal["tiny", "small", "medium"] = flag(
        "blocks x width: 4 x 32, 8 x 96, 8 x 512; embedding and head are 2 layers more",
        "small",
    )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Computation."""

    compile: bool = flag(
        "torch.compile for each block; B and W stay apart", False, pair=False
    )
    exact_sums: bool = flag("gradients to the last bit alike in all modes", True)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes."""

    device: str = flag("auto (an accelerator, else the CPU), cpu, cuda, xpu ..", "auto")
    timeout_s: float = flag("seconds that a stage waits for another one", 600.0)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelSize, Planning):
    """Run."""

    pipeline_schedule_mode: str = flag(MODE_WORDS, "ZBH1", **MODE_FLAG)
    model: str | None = flag(
        "of transformers: hf:config.json, hf:FOLDER with weights; else a small Llama",
        None,
        metavar="hf:PATH",
    )
    microbatch_size: int = flag("samples of a micro-batch", 2)
    seed: int = flag("of the weights and of the choice of text", 0)
    dtype: Literal["fp32", "bf16", "fp16"] = flag("16 bits by autocast", "fp32")
    device: str = flag("auto (an accelerator, else the CPU), cpu, cuda, xpu ..", "auto")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "stages", "microbatches", "microbatch_size", "seq")
        check_at_least(self, 0, "seed")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Training."""

    steps: int = flag("optimizer steps", 200)
    lr: float = flag("learning rate of AdamW after the warm-up", 3e-3)
    clip_grad_norm: float = flag("largest norm of the model's gradient", 1.0)
    data: Path | None = flag("text file or folder; else Python's own source", None)
    metrics: Path | None = flag("JSON line a step, and one with the results", None)
    save_dir: Path | None = flag(
        "checkpoints: every 100 steps, at the end, and at SIGTERM; a run goes on from "
        "the newest",
        None,
    )
    trace: Path | None = flag("timeline of the last step, for Perfetto", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "steps")
        check_at_least(self, 0, "lr")
        check_above_zero(self, "clip_grad_norm")
