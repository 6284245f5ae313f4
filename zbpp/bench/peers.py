"""One of torch's pipeline schedules in a bench, on the same layers and batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.bench.contender import (
    Field,
    Measured,
    autocast_of,
    gather,
    make_optimizer,
    measured_of,
    own_loss,
)
from zbpp.bench.names import peer_placement, split_name
from zbpp.bench.peer_stage import PeerChunk, learn_structures
from zbpp.bench.peer_times import PeerTimes
from zbpp.bench.request import costs_of
from zbpp.bench.sleeping import sleeping_chunks, sleeping_loss
from zbpp.core import Placement, RequestError
from zbpp.emulation.run import sleeping_optimizer
from zbpp.runtime.loss import loss_alone
from zbpp.runtime.partition import partition_layers
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.ties.plan import find_ties
from zbpp.runtime.values import as_tensors

__all__ = ["Peer", "build_peer", "has_schedule"]

_MOST = 10  # steps whose jobs are measured
_JOBS = ("F", "I", "W", "B")  # torch's B is the full backward, its I our B


@dataclass
class Peer:
    """Stages of torch's, its schedule, and an optimizer.

    Args:
        name: of the schedule.
        schedule: with its stages.
        stages: of this process.
        times: of their jobs, and of the loss.
        chunks: of this process, in forward order.
        placement: of all chunks.
        field: alike for all contenders.
        inputs: of each micro-batch, by tensor.
        optimizer: None leaves the gradients where they are.
    """

    name: str
    schedule: Any
    stages: Sequence[Any]
    times: PeerTimes
    chunks: dict[int, PeerChunk]
    placement: Placement
    field: Field
    inputs: list[tuple[Tensor, ...]]
    optimizer: torch.optim.Optimizer | None

    def __post_init__(self) -> None:
        self._m = m = self.field.request.microbatches
        self._args: tuple[Tensor, ...] = ()
        if 0 in self.chunks:
            device, columns = self.field.device, zip(*self.inputs, strict=True)
            self._args = tuple(torch.cat(column).to(device) for column in columns)
        is_last = self.placement.n_chunks - 1 in self.chunks
        self._target = torch.arange(m) if is_last else None
        orders = getattr(self.schedule, "pipeline_order", None) or {}
        order = orders.get(dist.get_rank())
        self.n_jobs = _count_jobs(order) if order else 2 * m * len(self.chunks)

    def step(self) -> None:
        """Train on the batch once."""
        self.times.begin()
        self.schedule.step(*self._args, target=self._target, return_outputs=False)
        if self.optimizer is None:
            return
        if (most := self.field.request.clip_grad_norm) is not None:
            self._clip_all(most)
        self.times.step(self.optimizer.step)
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Nothing is left to decide."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this process's parameters."""
        return {
            k: g for chunk in self.chunks.values() for k, g in chunk.gradients().items()
        }

    def measured(self, n_steps: int) -> Measured | None:
        """Run so many steps, 10 at most, and one before them, between clocks."""
        n = min(n_steps, _MOST)
        gather(None)
        with self.times.on(self.stages) as noted:
            for _ in range(1 + n if noted else 0):
                self.step()
        if not noted:
            return None
        timelines = self.times.timelines(
            n, name=self.name, placement=self.placement, n_microbatches=self._m
        )
        return measured_of(timelines)

    def close(self) -> None:
        """Nothing to give back."""

    def _clip_all(self, most: float) -> None:
        """Clip by the norm over all stages, as our pipelines do."""
        parameters = [p for chunk in self.chunks.values() for p in chunk.parameters()]
        norm = nn.utils.get_total_norm(
            [p.grad for p in parameters if p.grad is not None]
        )
        squared = norm.square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, most, squared.sqrt())


def has_schedule(contender: str) -> bool:
    """True if this torch has the schedule of a contender."""
    try:
        _class_of(split_name(contender)[1])
    except ValueError:
        return False
    return True


def build_peer(field: Field, contender: str, *, steps: bool) -> Peer:
    """Make one of torch's pipelines (every rank must call).

    Args:
        field: alike for all contenders.
        contender: its name.
        steps: False leaves the optimizer out, and the gradients where they are.

    Raises:
        RequestError: torch refuses the sizes, or the model; the contender is named.
    """
    request = field.request
    name = split_name(contender)[1]
    placement = peer_placement(name, request.stages)
    if runs_ahead(field.device) and dist.get_backend() == "gloo":
        raise RequestError(
            f"{contender} cannot run: torch's schedules need a GPU for each process; "
            "leave it out, or use --device cpu"
        )
    inputs: Any = field.batch.inputs
    optimizer = make_optimizer(request)
    costs = costs_of(request)
    if request.emulate is not None and costs is not None:
        chunks = sleeping_chunks(costs.on(placement), dist.get_rank())
        loss: Callable[[Any, Any], Tensor] = sleeping_loss
        targets: list[Any] = [None] * request.microbatches
        inputs = [torch.zeros(1, 1, dtype=torch.float64)] * request.microbatches
        optimizer = sleeping_optimizer
    else:
        loaded = field.model()
        chunks = _chunks(contender, loaded, placement, field)
        loss = loss_alone(loaded.loss_fn or own_loss)
        targets = field.batch.targets
        learn_structures(chunks, placement, inputs[0], field.device)
    last = chunks.get(placement.n_chunks - 1)
    times = PeerTimes(field.device, dist.get_rank())

    def timed(outputs: Any, index: Tensor) -> Tensor:
        """The loss of a micro-batch; torch is given its number for the targets."""
        assert last is not None
        target = map_tensors(
            targets[int(index[0])], lambda tensor: tensor.to(field.device)
        )
        with last.context():
            return times.loss(lambda: loss(last.value_of(outputs), target))

    stages = _stages(chunks, placement, field)
    schedule = _schedule(contender, stages, placement, field, timed)
    parameters = [p for chunk in chunks.values() for p in chunk.parameters()]
    return Peer(
        name,
        schedule,
        stages,
        times,
        chunks,
        placement,
        field,
        [as_tensors(microbatch) for microbatch in inputs],
        optimizer(parameters) if steps else None,
    )


def _chunks(
    contender: str, loaded: Any, placement: Placement, field: Field
) -> dict[int, PeerChunk]:
    """The chunks of this process."""
    try:
        ranges = partition_layers(loaded.n_layers, placement.n_chunks)
    except RequestError as error:
        raise RequestError(f"{contender} cannot run: {error}") from error
    of_layer = {layer: chunk for chunk, layers in enumerate(ranges) for layer in layers}
    builds = callable(loaded.model) and not hasattr(loaded.model, "__len__")
    if not builds:
        for tie in find_ties(list(loaded.model)):
            if len({of_layer[layer] for layer, _ in tie}) > 1:
                layers = " and ".join(f"layers.{layer}.{name}" for layer, name in tie)
                raise RequestError(
                    f"{contender} cannot run: {layers} are one parameter, and torch's "
                    "stages share none"
                )
    return {
        index: PeerChunk(
            loaded.model(ranges[index])
            if builds
            else [loaded.model[layer] for layer in ranges[index]],
            ranges[index].start,
            field.device,
            autocast_of(field.request),
        )
        for index in placement.chunks_of[dist.get_rank()]
    }


def _stages(
    chunks: dict[int, PeerChunk], placement: Placement, field: Field
) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage

    return [
        PipelineStage(
            chunk,
            index,
            placement.n_chunks,
            field.device,
            input_args=chunk.sizes.get("input_args"),
            output_args=chunk.sizes.get("output_args"),
        )
        for index, chunk in chunks.items()
    ]


def _schedule(
    contender: str,
    stages: list[Any],
    placement: Placement,
    field: Field,
    loss: Callable[[Any, Tensor], Tensor],
) -> Any:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    m = field.request.microbatches
    try:
        kind = _class_of(split_name(contender)[1])
        single = issubclass(kind, PipelineScheduleSingle)
        return kind(stages[0] if single else stages, m, loss_fn=loss)
    except ValueError as error:
        raise RequestError(
            f"{contender} cannot run with {placement.n_stages} stages and {m} "
            f"micro-batches: torch says: {error}; change them, or leave it out of "
            "--peers"
        ) from error


def _class_of(name: str) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)


def _count_jobs(order: list[Any]) -> int:
    """Jobs that compute, of those that run in pairs each."""
    parts = (part for a in order if a for part in (a.sub_actions or (a,)))
    return sum(part.computation_type.value in _JOBS for part in parts)
