"""One of torch's pipeline schedules in a bench, on the same layers and batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from zbpp.bench.request import TORCH
from zbpp.bench.setting import LEARNING_RATE, Setting, gather
from zbpp.core import Placement, RequestError, even_split, ranges_of
from zbpp.runtime.loss import loss_alone
from zbpp.runtime.support.devices import runs_ahead
from zbpp.training.setup import make_optimizer, output_is_loss

_JOBS = ("F", "I", "W", "B")  # torch's B is the full backward, its I our B


class _Chunk(nn.Module):
    """Layers in a row, as torch's stages call them: tensors in, tensors out."""

    def __init__(self, layers: Sequence[nn.Module], setting: Setting) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).to(setting.device)
        self._setting = setting

    def forward(self, *tensors: Tensor) -> Any:
        value: Any = tensors[0] if len(tensors) == 1 else tensors
        with _autocast(self._setting):
            for layer in self.layers:
                value = layer(value)
        return value


class TorchSchedule:
    """A schedule of torch with its stages, the batch, and an optimizer.

    Raises:
        RequestError: torch refuses the sizes, or the model; the contender is named.
    """

    def __init__(self, setting: Setting, contender: str) -> None:
        device, batch = setting.device, setting.batch
        n_stages, n_microbatches = setting.plan.n_stages, setting.options.microbatches
        self._device = device
        name = contender.removeprefix(TORCH)
        placement = _placement_of(name, n_stages)
        if runs_ahead(device) and dist.get_backend() == "gloo":
            raise RequestError(
                f"{contender} cannot run: torch's schedules need a GPU for each "
                "process; leave it out, or use --device cpu"
            )
        loaded = setting.model()
        ranges = ranges_of(even_split(loaded.n_layers, placement.n_chunks))
        chunks = {
            index: _Chunk(loaded.layered.build(ranges[index]), setting)
            for index in placement.chunks_of[dist.get_rank()]
        }
        stages = [
            PipelineStage(chunk, index, placement.n_chunks, device)
            for index, chunk in chunks.items()
        ]
        loss_fn = loss_alone(loaded.loss_fn or output_is_loss)

        def loss(outputs: Any, target: Tensor) -> Tensor:
            with _autocast(setting):
                value: Tensor = loss_fn(outputs, target)
            return value

        kind: Any = get_schedule_class(name)
        single = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(
            stages[0] if single else stages, n_microbatches, loss_fn=loss
        )
        self._args: tuple[Tensor, ...] = ()
        if 0 in chunks:
            columns = zip(*map(_as_tuple, batch.inputs), strict=True)
            self._args = tuple(torch.cat(column).to(device) for column in columns)
        self._target: Tensor | None = None
        if placement.n_chunks - 1 in chunks:
            self._target = torch.cat(batch.targets).to(device)
        self._parameters = [p for chunk in chunks.values() for p in chunk.parameters()]
        self._optimizer = make_optimizer(LEARNING_RATE, self._parameters)
        orders = getattr(self._schedule, "pipeline_order", None) or {}
        self.n_jobs = 2 * n_microbatches * len(chunks)
        if order := orders.get(dist.get_rank()):
            self.n_jobs = _count_jobs(order)

    def step(self) -> None:
        """Train on the batch once."""
        self._backward()
        self._update()

    def compared_step(self) -> tuple[float, float]:
        """Train once; loss and gradient norm."""
        losses: list[Tensor] = []
        self._backward(losses)
        squared = torch.zeros((), dtype=torch.float64, device=self._device)
        for p in self._parameters:
            if p.grad is not None:
                squared += p.grad.double().square().sum()
        dist.all_reduce(squared)
        mine = float(torch.stack(losses).detach().mean()) if losses else None
        (loss,) = (x for x in gather(mine) if x is not None)
        self._update()
        return loss, float(squared.sqrt())

    def close(self) -> None:
        """Nothing to free."""

    def _backward(self, losses: list[Tensor] | None = None) -> None:
        self._schedule.step(
            *self._args, target=self._target, losses=losses, return_outputs=False
        )

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def _placement_of(name: str, n_stages: int) -> Placement:
    """Place the chunks of one of torch's schedules: two a stage, or one."""
    if name in ("1F1B", "GPipe"):
        return Placement.single(n_stages)
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return Placement.wave(n_stages)
    return Placement.interleaved(n_stages, 2)


def _autocast(setting: Setting) -> Any:
    dtype = setting.autocast
    return torch.autocast(setting.device.type, dtype, enabled=dtype is not None)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _count_jobs(order: list[Any]) -> int:
    """Jobs that compute, of those that run in pairs each."""
    parts = (part for a in order if a for part in (a.sub_actions or (a,)))
    return sum(part.computation_type.value in _JOBS for part in parts)
