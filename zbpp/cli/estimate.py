"""The ``zbpp estimate`` command: will it fit?"""

import gc
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from zbpp.cli.flags import shown_as
from zbpp.cli.outputs import Terminal, check_outputs
from zbpp.cli.user_model import UserModel, load_model
from zbpp.core import (
    Costs,
    RequestError,
    format_bytes,
    parse_memory,
    read_costs,
    write_costs,
    write_layers,
)
from zbpp.planning import USUAL_MODES, canonical, is_file
from zbpp.planning.replicas import Shard, check_replicas
from zbpp.training.options import YesNoUnsaid

if TYPE_CHECKING:
    from zbpp.memory.estimate import Estimate, Steps
    from zbpp.memory.model import ModelMemory
    from zbpp.training.llama import LlamaConfig

__all__ = ["EstimateCommand"]

_OBJECTS = 200_000
"""Plans are many small objects without circles: to look for these took a fifth."""

_DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class EstimateCommand:
    """Estimate the memory of every stage under every mode, without running anything."""

    model: Annotated[str | None, shown_as("MODULE:FUNCTION")] = None
    """A function that returns (model, batch, loss_fn), the batch of one micro-batch; or
    hf:PATH, a config.json of transformers or the folder of one; left out: the model of
    `zbpp train`, with the sizes below."""
    stages: int
    """Pipeline stages."""
    microbatches: int
    """Micro-batches in a step."""
    modes: Annotated[tuple[str, ...], shown_as("MODE")] = ()
    """Modes or schedule files; left out: the usual ones."""
    memory_limit: Annotated[str | None, shown_as("SIZE")] = None
    """Memory of a device, such as 40GiB: what fits, and the largest micro-batch."""
    microbatch_size: int | None = None
    """Samples of a micro-batch, if not those of the batch."""
    split: Annotated[tuple[int, ...], shown_as("INT")] = ()
    """Layers of each chunk; left out: evenly."""
    optimizer: str = "adamw"
    """An optimizer of torch.optim, such as adamw or sgd, or none."""
    autocast: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Computation: fp32, or 16 bits by autocast."""
    post_validation: YesNoUnsaid = None
    """Count what a rollback needs; left out: where the backward is split."""
    rollback: Literal["auto", "deferred", "compiled", "snapshot"] = "auto"
    """Has no effect: the class of the optimizer decides how a step is rolled back."""
    exact_sums: bool = True
    """Add gradients in micro-batch order."""
    data_parallel: int = 1
    """Replicas of every stage."""
    shard: Shard = "none"
    """State that replicas hold in parts; each word includes those before."""
    alternating_buffers: bool = False
    """Gather layers, and sum their gradients in every W, in buffers of each stage;
    with --shard parameters."""
    compile: bool = False
    """Estimate layers compiled one by one, as zbpp train --compile runs them."""
    device: str = "cpu"
    """Whose kernels are taken: cpu, cuda or another accelerator, which a machine must
    then have; it is left alone."""
    costs: Annotated[Path | None, shown_as("PATH")] = None
    """Costs file with times to plan for; without it F, B and W take 1 each."""
    costs_out: Annotated[Path | None, shown_as("PATH")] = None
    """Write a costs file with the bytes of the chunks of the first mode."""
    layers_out: Annotated[Path | None, shown_as("PATH")] = None
    """Write a layers file with the bytes of every layer."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of a table."""
    dim: int = 96
    """Width of the model of `zbpp train`."""
    n_blocks: int = 8
    """Its transformer blocks."""
    n_heads: int = 4
    """Its attention heads."""
    hidden: int = 256
    """Inner width of its feed-forward layers."""
    seq: int = 128
    """Bytes in a window; tokens of a sample of hf:PATH."""

    def run(self) -> None:
        """Estimate, write the files, and print."""
        import torch

        from zbpp.memory.estimate import Steps, estimate_modes
        from zbpp.memory.layers import model_memory

        gc.set_threshold(_OBJECTS)
        self._check()
        limit = None if self.memory_limit is None else parse_memory(self.memory_limit)
        dtype = _DTYPES[self.autocast]
        with self._fakes():
            user = self._user_model()
        memory = model_memory(
            user.model,
            (user.inputs, user.targets),
            user.loss_fn,
            n_layers=user.n_layers,
            microbatch_size=self.microbatch_size,
            device=self.device,
            autocast=None if dtype is None else getattr(torch, dtype),
            exact_sums=self.exact_sums,
            compile=self.compile,
        )
        steps = Steps(
            self._optimizer(),
            self.post_validation,
            self._split(),
            data_parallel=self.data_parallel,
            shard=self.shard,
            alternating_buffers=self.alternating_buffers,
        )
        costs = Costs() if self.costs is None else read_costs(self.costs)
        modes = [m if is_file(m) else canonical(m) for m in self.modes or USUAL_MODES]

        sizes: Any = {"n_stages": self.stages, "n_microbatches": self.microbatches}

        def estimated(of: "ModelMemory", modes: Sequence[str]) -> "Estimate":
            return estimate_modes(of, steps, modes, costs=costs, **sizes)

        found = estimated(memory, modes)
        self._write(memory, steps, next(iter(found.modes)), costs, limit)
        if self.json:
            print(json.dumps(found.as_json()))
            return
        from zbpp.memory.api import largest_microbatch

        largest = {}
        if limit is not None:
            largest = largest_microbatch(memory, limit, estimated, list(found.modes))
        _print(found, limit, largest)

    def _check(self) -> None:
        check_outputs(costs_out=self.costs_out, layers_out=self.layers_out)
        sizes = {"--stages": self.stages, "--microbatches": self.microbatches}
        for flag, value in {**sizes, "--microbatch_size": self.microbatch_size}.items():
            if value is not None and value < 1:
                raise RequestError(f"{flag} is {value}; it must be at least 1")
        check_replicas(
            self.data_parallel,
            self.shard,
            alternating_buffers=self.alternating_buffers,
        )

    def _fakes(self) -> AbstractContextManager[Any]:
        """A mode in which the user's function makes tensors without memory."""
        import torch

        from zbpp.memory.fake import building, check_device, fake_mode
        from zbpp.runtime.support.devices import check_kind

        check_kind(self.device, auto=False)
        check_device(torch.device(self.device))
        return building(fake_mode())

    def _config(self) -> "LlamaConfig":
        from zbpp.training.llama import LlamaConfig

        return LlamaConfig(
            dim=self.dim,
            n_blocks=self.n_blocks,
            n_heads=self.n_heads,
            hidden=self.hidden,
            seq=self.seq,
        )

    def _split(self) -> Any:
        if self.split or self.model is not None:
            return self.split or None
        from zbpp.training.splits import split_layers

        return partial(split_layers, self._config())

    def _user_model(self) -> UserModel:
        if self.model is not None:
            samples = self.microbatch_size or 2
            return load_model(self.model, seq=self.seq, samples=samples, is_fake=True)
        import torch

        from zbpp.training.llama import build_layers, cross_entropy

        config = self._config()
        tokens = torch.zeros(self.microbatch_size or 2, self.seq, dtype=torch.int64)
        layers = build_layers(config, range(config.n_layers))
        return UserModel(layers, tokens, tokens, cross_entropy, config.n_layers)

    def _optimizer(self) -> Any:
        import torch

        if self.optimizer == "none":
            return None
        known = {
            name.lower(): kind
            for name, kind in vars(torch.optim).items()
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        }
        if self.optimizer.lower() not in known:
            raise RequestError(
                f"--optimizer {self.optimizer}: torch.optim has none of this name; "
                f"choose one of {', '.join(sorted(known))}, or none"
            )
        kind: Any = known[self.optimizer.lower()]
        return lambda parameters: kind(parameters, lr=1e-3)

    def _write(
        self,
        memory: "ModelMemory",
        steps: "Steps",
        mode: str,
        costs: Costs,
        limit: float | None,
    ) -> None:
        from zbpp.memory.estimate import plan_mode, stage_costs
        from zbpp.memory.layers import costs_of_layers

        if self.costs_out is not None:
            schedule = plan_mode(mode, self.stages, self.microbatches, costs)
            bytes_of = stage_costs(memory, steps, schedule, limit)
            in_bytes = costs.with_memory(bytes_of)
            _save(self.costs_out, lambda path: write_costs(in_bytes, path))
        if self.layers_out is not None:
            layers = costs_of_layers(
                memory,
                steps.optimizer,
                post_validation=self.post_validation is not False,
            )
            _save(self.layers_out, lambda path: write_layers(layers, path))


def _save(path: Path, write: Any) -> None:
    try:
        write(path)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None


_PARTS = ("parameters", "gradients", "optimizer", "rollback", "activations_peak")


def _print(found: "Estimate", limit: float | None, largest: dict[str, int]) -> None:
    """A row for each mode and stage, in GiB (or MiB, if all is small)."""
    whole = max(found.peak(mode) for mode in found.modes)
    unit, size = ("GiB", 2**30) if whole >= 2**28 else ("MiB", 2**20)
    heads = [part.removesuffix("_peak") for part in _PARTS]
    table = Table("mode", "stage", *heads, "messages", "other", f"peak, {unit}")
    for mode, stages in found.modes.items():
        for index, stage in enumerate(stages):
            parts = [getattr(stage, part) for part in _PARTS]
            other = stage.buffers + stage.batch + stage.gathered_peak
            cells = (f"{n / size:.2f}" for n in (*parts, stage.messages_peak, other))
            fits = "" if limit is None or stage.peak <= limit else " over"
            name = mode if index == 0 else ""
            table.add_row(name, str(index), *cells, f"{stage.peak / size:.2f}{fits}")
        table.add_section()
    Terminal(highlight=False, width=120).print(table)
    for mode, reason in found.refused.items():
        print(f"{mode}: {reason}")
    how = "compiled blocks" if found.compiled else "no compiler"
    print(
        f"micro-batches of {found.samples} samples; {how}; kernels of {found.device}. "
        "The parts have their peaks at their own times: their sum may be more."
    )
    if found.as_they_are:
        print(
            f"as they are, for want of one compiled graph: layers {found.as_they_are}"
        )
    if limit is not None:
        _print_fits(found, limit, largest)


def _print_fits(found: "Estimate", limit: float, largest: dict[str, int]) -> None:
    fitting = [mode for mode in found.modes if found.peak(mode) <= limit]
    named = ", ".join(fitting) or "no mode"
    fit = "fits" if len(fitting) < 2 else "fit"
    print(f"{named} {fit} {format_bytes(limit)} a stage")
    sizes = [f"{mode} {n}" if n else f"{mode} none" for mode, n in largest.items()]
    print(f"largest micro-batch that fits, in samples: {', '.join(sizes)}")
