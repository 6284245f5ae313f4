"""The ``zbpp estimate`` command: will it fit?"""

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from zbpp.cli.flags import Numbers, Replicas
from zbpp.cli.outputs import Terminal
from zbpp.core import (
    Costs,
    RequestError,
    format_bytes,
    read_costs,
    write_costs,
)
from zbpp.planning import USUAL_MODES, canonical, is_file
from zbpp.planning.replicas import check_replicas
from zbpp.training.options import (
    MODES,
    Count,
    Dtype,
    Memory,
    Microbatches,
    ModelName,
    ModelSize,
    Names,
    Output,
    Stages,
    Switch,
)
from zbpp.training.user_model import UserModel, load_model

if TYPE_CHECKING:
    from zbpp.memory.estimate import Estimate, Request
    from zbpp.memory.layers import Layers

_OBJECTS = 200_000
"""Libraries and plans are many small objects without circles: to look for these took a
seventh of a command, most of it while torch is imported."""


@dataclass(frozen=True, kw_only=True)
class EstimateCommand(ModelSize, Replicas):
    """Estimate the memory of every stage under every mode, without running anything."""

    modes: Annotated[Names, MODES] = field(default=USUAL_MODES, kw_only=False)
    model: ModelName | None = None
    """A function that returns (model, batch[, loss_fn]), or hf:PATH."""
    stages: Stages
    """Pipeline stages."""
    microbatches: Microbatches
    """Micro-batches of a step."""
    memory_limit: Memory | None = None
    """Memory of a device, such as 40GiB: name the modes and micro-batch that fit."""
    microbatch_size: Count | None = None
    """Samples of a micro-batch; default: those of the batch."""
    split: Numbers = ()
    """Layers of each chunk; default: even."""
    optimizer: str = "adamw"
    """Optimizer of torch.optim, or none."""
    offload_optimizer: Switch = False
    """Run the optimizer in host memory, and print how much it needs."""
    residuals: Switch = False
    """Count the residuals of replicas with zbpp.TopK."""
    dtype: Dtype = "fp32"
    """Precision; 16-bit types use autocast."""
    enable_optimizer_post_validation: bool | None = None
    """Count the memory of a rollback; default: for modes that split the backward."""
    device: str = "cpu"
    """Device whose kernels are assumed: cpu, or an available accelerator."""
    costs: Path | None = None
    """Costs file with the times to plan for."""
    costs_out: Output | None = None
    """Costs file with bytes, of the first mode."""
    layers_out: Output | None = None
    """Layers file with the bytes of every layer."""
    json: Switch = False
    """Print one JSON object instead of a table."""

    def run(self, words: Sequence[str]) -> None:
        """Estimate, write the files, and print."""
        gc.set_threshold(_OBJECTS)

        from zbpp.memory.estimate import Request, estimate_modes, largest_microbatch
        from zbpp.memory.layers import trace_layers
        from zbpp.training.setup import AUTOCAST

        check_replicas(self.data_parallel, self.shard)
        limit = self.memory_limit
        user = self._model()
        layers = trace_layers(
            user.layered,
            (user.inputs, user.targets),
            user.loss_fn,
            optimizer=self._optimizer(),
            microbatch_size=self.microbatch_size,
            device=self.device,
            autocast=AUTOCAST[self.dtype],
            offload_optimizer=self.offload_optimizer,
        )
        costs = Costs() if self.costs is None else read_costs(self.costs)
        request = Request(
            n_stages=self.stages,
            n_microbatches=self.microbatches,
            split=self.split or None,
            post_validation=self.enable_optimizer_post_validation,
            costs=costs,
            data_parallel=self.data_parallel,
            shard=self.shard,
            residuals=self.residuals,
        )
        modes = [name if is_file(name) else canonical(name) for name in self.modes]
        estimate = estimate_modes(layers, request, modes)
        self._write(layers, request, next(iter(estimate.modes)))
        if self.json:
            print(json.dumps(estimate.as_json()))
            return
        largest = {}
        if limit is not None:
            largest = largest_microbatch(layers, request, limit, [*estimate.modes])
        _print(estimate, limit, largest)

    def _model(self) -> UserModel:
        """The model and its micro-batch, of tensors without memory."""
        import torch

        from zbpp.memory.fakes import building, check_device
        from zbpp.runtime.support.devices import check_kind

        check_kind(self.device, auto=False)
        check_device(torch.device(self.device))
        with building():
            return load_model(
                self.model,
                size=self.size,
                seq=self.seq,
                samples=self.microbatch_size or 2,
            )

    def _optimizer(self) -> Any:
        if self.optimizer == "none":
            return None
        from torch import optim

        kinds: dict[str, Any] = {
            name.lower(): kind
            for name, kind in vars(optim).items()
            if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
        }
        if (kind := kinds.get(self.optimizer.lower())) is None:
            raise RequestError(
                f"--optimizer {self.optimizer}: torch.optim has no optimizer of this "
                f"name; choose one of {', '.join(sorted(kinds))}, or none"
            )
        return lambda parameters: kind(parameters, lr=1e-3)

    def _write(self, layers: "Layers", request: "Request", mode: str) -> None:
        from zbpp.memory.estimate import costs_of_chunks

        if self.costs_out is not None:
            in_bytes = costs_of_chunks(layers, request, mode, self.memory_limit)
            write_costs(in_bytes, self.costs_out)
        if self.layers_out is not None:
            validates = self.enable_optimizer_post_validation is not False
            write_costs(layers.costs(post_validation=validates), self.layers_out)


_PARTS = ("parameters", "gradients", "optimizer", "rollback", "activations_peak")


def _print(estimate: "Estimate", limit: float | None, largest: dict[str, int]) -> None:
    """A row for each mode and stage, in GiB (or MiB, if all is small)."""
    whole = max(estimate.peak(mode) for mode in estimate.modes)
    unit, size = ("GiB", 2**30) if whole >= 2**28 else ("MiB", 2**20)
    heads = [part.removesuffix("_peak") for part in _PARTS]
    table = Table("mode", "stage", *heads, "messages", "other", f"peak, {unit}")
    for mode, stages in estimate.modes.items():
        for index, stage in enumerate(stages):
            parts = [getattr(stage, part) for part in _PARTS]
            remainder = stage.buffers + stage.other
            cells = (f"{n / size:.2f}" for n in (*parts, stage.messages, remainder))
            fits = "" if limit is None or stage.peak <= limit else " over"
            name = mode if index == 0 else ""
            table.add_row(name, str(index), *cells, f"{stage.peak / size:.2f}{fits}")
        table.add_section()
    Terminal(highlight=False, width=120).print(table)
    for mode, reason in estimate.refused.items():
        print(f"{mode}: {reason}")
    print(
        f"micro-batches of {estimate.samples} samples; kernels of {estimate.device}, "
        "without a compiler. The parts have their peaks at different times: their sum "
        "may be more."
    )
    host = max(stage.host for stages in estimate.modes.values() for stage in stages)
    if host:
        print(f"host memory of a stage: up to {format_bytes(host)}")
    if limit is not None:
        _print_fits(estimate, limit, largest)


def _print_fits(estimate: "Estimate", limit: float, largest: dict[str, int]) -> None:
    fitting = [mode for mode in estimate.modes if estimate.peak(mode) <= limit]
    named = ", ".join(fitting) or "no mode"
    fit = "fits" if len(fitting) < 2 else "fit"
    print(f"{named} {fit} {format_bytes(limit)} a stage")
    sizes = [f"{mode} {n}" if n else f"{mode} none" for mode, n in largest.items()]
    print(f"largest micro-batch that fits, in samples: {', '.join(sizes)}")
