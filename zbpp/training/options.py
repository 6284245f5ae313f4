"""Flags that commands share, in groups, and the options of those that run a model.

A command is a dataclass, a flag one of its fields, and the text below a field its line
of help: cyclopts reads all three as they are. This file loads no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token, convert
from cyclopts.types import Directory
from cyclopts.validators import Number

from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    parse_memory,
    read_costs,
    read_layers,
)
from zbpp.planning import MODE_WORDS, is_auto

HF = "hf:"
"""Begin of the name of a model of transformers."""


def _memory(_: Any, tokens: Sequence[Token]) -> float:
    return parse_memory(tokens[0].value)


def _list(hint: Any, tokens: Sequence[Token]) -> Any:
    words = [(token, word) for token in tokens for word in token.value.split(",")]
    return convert(hint, [token.evolve(value=word) for token, word in words if word])


def check_output(_: Any, path: Path | None) -> None:
    """Refuse paths that could not be written in the end."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError("It is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("It cannot be written: permission denied")


LIST = Parameter(converter=_list, consume_multiple=True, show_default=False)
"""Several values, with commas or spaces between them."""
_ONE_OR_MORE = Number(gte=1)

Count = Annotated[int, Parameter(validator=_ONE_OR_MORE)]
Stages = Annotated[int, Parameter(alias="-p", validator=_ONE_OR_MORE)]
Microbatches = Annotated[int, Parameter(alias="-m", validator=_ONE_OR_MORE)]
Memory = Annotated[float, Parameter(converter=_memory, metavar="MEMORY")]
"""A number, or one with a unit, such as ``40GiB``."""
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
Names = Annotated[tuple[str, ...], LIST]
Output = Annotated[Path, Parameter(validator=check_output)]
"""A file to write."""
Mode = Annotated[str, Parameter(alias="--mode", metavar="MODE", help=MODE_WORDS)]
MODES = Parameter(
    metavar="MODE,..", help="Modes or schedule files; default: the usual."
)
ModelName = Annotated[str, Parameter(metavar="MODULE:FUNCTION")]
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Sizes and costs of a schedule."""

    stages: Stages | None = None
    """Pipeline stages; a file has its number."""
    microbatches: Microbatches | None = None
    """Micro-batches of a step; a file has its number."""
    costs: Path | None = None
    """Costs file; default: F, B and W take 1."""
    layers: Path | None = None
    """Layers file, instead of --costs."""
    memory_limit: Memory | None = None
    """Memory of a stage: 40GiB, or in the unit of the costs."""
    enable_optimizer_post_validation: bool | None = None
    """Step before the norm is known; default: with a split backward."""

    def read_costs(self) -> Costs | LayerCosts | None:
        """Read the file of costs, of chunks or of layers, if there is one."""
        if None not in (self.costs, self.layers):
            raise RequestError(
                "--costs and --layers are both given; the costs of chunks follow from "
                "those of layers: leave --costs out"
            )
        if self.layers is not None:
            return read_layers(self.layers)
        return None if self.costs is None else read_costs(self.costs)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of the model of `zbpp train`."""

    seq: Count = 128
    """Tokens of a sample, also for hf:PATH."""
    size: Literal["tiny", "small", "medium"] = "small"
    """Blocks x width: 4 x 32, 8 x 96, 8 x 512."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelSize):
    """A model, and how it computes."""

    model: ModelName | None = None
    """A function that returns (model, batch[, loss_fn]), or hf:PATH."""
    microbatch_size: Count = 2
    """Samples of a micro-batch."""
    seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    """Seed of the weights and of the choice of text."""
    dtype: Dtype = "fp32"
    """Precision; 16-bit types use autocast."""
    device: str = "auto"
    """auto (an accelerator, else the CPU), cpu, cuda, xpu .."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions, Planning):
    """Options of a run."""

    pipeline_schedule_mode: Mode = field(default="ZBH1", kw_only=False)
    offload_optimizer: Switch = False
    """Keep the optimizer's state in host memory, and run the optimizer there."""

    @property
    def measures_first(self) -> bool:
        """True if costs of layers are measured before the first step: for auto."""
        has_costs = self.costs is not None or self.layers is not None
        return is_auto(self.pipeline_schedule_mode) and not has_costs


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `zbpp train`."""

    model: Annotated[str | None, Parameter(metavar="hf:PATH")] = None
    """Configuration or folder of transformers; default: a small Llama."""
    steps: Count = 200
    """Optimizer steps."""
    lr: Annotated[float, Parameter(validator=Number(gte=0))] = 3e-3
    """Learning rate of AdamW after the warm-up."""
    clip_grad_norm: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0
    """Largest norm of the model's gradient."""
    data: Path | None = None
    """Text file or folder; default: Python's library."""
    metrics: Output | None = None
    """File of JSON lines: each step, then the results."""
    save_dir: Directory | None = None
    """Folder of checkpoints; a run resumes from the newest."""
    trace: Output | None = None
    """Timeline of the last step, for Perfetto."""
