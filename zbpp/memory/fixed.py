"""Bytes that a stage holds all the time, by the rules of its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from zbpp.core import RequestError, Schedule
from zbpp.memory.model import ModelMemory
from zbpp.memory.parts import part_of, part_shape, part_share
from zbpp.planning.replicas import Shard, gathers_in_passes
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.support.fsdp_buffers import aligned
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded

__all__ = ["Fixed", "Steps", "fixed_of", "layer_parts"]

_SMALL_BUFFER = 2**14  # bytes; `KeptBuffers` copies all that are smaller


@dataclass(frozen=True)
class Steps:
    """Rules by which steps are taken; `zbpp.Pipeline` explains the fields."""

    optimizer: MakeOptimizer | None
    post_validation: bool | None = None
    split: Sequence[int] | Callable[[int], Sequence[int]] | None = None
    """Layers of each chunk, or what gives them for a number of chunks."""
    data_parallel: int = 1
    """Replicas of every stage."""
    shard: Shard = "none"
    """State that they hold in parts (`zbpp.planning.replicas`)."""
    alternating_buffers: bool = False
    """Layers are gathered and reduced in buffers that are there all the time."""

    @property
    def n_parts(self) -> int:
        """Replicas that hold a part each; 1: every one holds all."""
        return 1 if self.shard == "none" else self.data_parallel


@dataclass(frozen=True)
class Fixed:
    """Bytes that a stage holds all the time, and what its steps need.

    Args:
        parameters: of its chunks, shared ones once.
        buffers: and what layers keep from their first forward on.
        optimizer: its state.
        rollback: copies of post-validation, and of buffers that steps change.
        batch: inputs and targets of all micro-batches that it reads.
        norm: most that the norm of a gradient needs.
        step: most that an optimizer step needs.
        commit: most that the confirmation of a speculative one needs.
        speculates: steps are validated in the next one.
        keeps_sends: a send is held until the sums of its step have come, as by gloo;
            else to the next send.
        in_order: gradients are added in micro-batch order.
        gathered: of each chunk, what an UNSHARD adds until its RESHARD.
        in_pass: of each chunk, what F, B and BW gather for themselves.
        summed: of each chunk, what is left of its gradients when REDUCE_WAIT has ended;
            None: they are added up in place.
        in_turn: of each chunk, what W leaves until REDUCE_WAIT where every W sums layer
            by layer (`ChunkPasses.summed_in_turn`).
    """

    parameters: int = 0
    buffers: int = 0
    optimizer: int = 0
    rollback: int = 0
    batch: int = 0
    norm: int = 0
    step: int = 0
    commit: int = 0
    speculates: bool = False
    keeps_sends: bool = True
    in_order: bool = True
    gathered: Mapping[int, int] = field(default_factory=dict)
    in_pass: Mapping[int, int] = field(default_factory=dict)
    summed: Mapping[int, int] | None = None
    in_turn: Mapping[int, int] | None = None

    @property
    def total(self) -> int:
        """Bytes that are there all the time."""
        known = self.parameters + self.buffers + self.optimizer + self.rollback
        return known + self.batch


def fixed_of(
    memory: ModelMemory,
    steps: Steps,
    schedule: Schedule,
    chunks: Mapping[int, Sequence[int]],
    kept: int,
) -> Fixed:
    """Bytes that a stage holds besides what its passes leave.

    Args:
        memory: of the model.
        steps: rules of the steps.
        schedule: with its V's, and its collectives.
        chunks: layers of each chunk of the stage.
        kept: bytes that layers keep from their first forward on.

    Raises:
        RequestError: replicas shall divide what tensor parallelism has divided.
    """
    layers = [layer for own in chunks.values() for layer in own]
    own_parameters, n = memory.parameters(layers), steps.n_parts
    if n > 1 and any(map(is_sharded, own_parameters)):
        raise RequestError(
            "replicas cannot divide parameters that tensor parallelism has divided in "
            "an estimate; leave --shard out, or estimate the plain layers"
        )
    speculates = schedule.is_post_validated
    step = memory.optimizer(layers, steps.optimizer, n_parts=n)
    buffers = memory.buffers(layers)
    changing = [b for b in buffers if b.nbytes <= _SMALL_BUFFER]
    rollback = memory.bytes_of(changing)
    if speculates:
        rollback += step.rollback
    ends: list[Tensor] = []
    if 0 in layers:
        ends += tensors_in(memory.fake.inputs)
    if memory.n_layers - 1 in layers:
        ends += tensors_in(memory.fake.targets)
    on_cpu = memory.options.device.type == "cpu"
    sent, received = memory.tied(layers)
    parts = [part_of(memory.fake.mode, p, n) for p in own_parameters]
    return Fixed(
        parameters=memory.bytes_of(parts),
        buffers=memory.bytes_of(buffers)
        + kept
        + sent
        + _alternating(memory, steps, layers),
        optimizer=step.state,
        rollback=rollback,
        batch=memory.bytes_of(ends) * schedule.n_microbatches,
        norm=max(
            received,
            _norm(memory, layers) if on_cpu and steps.optimizer is not None else 0,
        ),
        step=step.speculative_peak if speculates else step.peak,
        commit=step.commit_peak,
        speculates=speculates,
        keeps_sends=on_cpu,
        in_order=memory.options.exact_sums,
        summed=_summed(memory, n, chunks),
        in_turn=_in_turn(memory, n, chunks) if steps.alternating_buffers else None,
        **_gathered(memory, steps, chunks),
    )


def _gathered(
    memory: ModelMemory, steps: Steps, chunks: Mapping[int, Sequence[int]]
) -> dict[str, dict[int, int]]:
    """Bytes of whole parameters: of a chunk by UNSHARD, or of a layer in its passes."""
    if steps.n_parts == 1 or steps.alternating_buffers:
        return {}
    sizes = {
        chunk: [memory.bytes_of(memory.parameters([layer])) for layer in own]
        for chunk, own in chunks.items()
    }
    if gathers_in_passes(steps.data_parallel, steps.shard):
        return {"in_pass": {chunk: max(own) for chunk, own in sizes.items()}}
    return {"gathered": {chunk: sum(own) for chunk, own in sizes.items()}}


def _alternating(memory: ModelMemory, steps: Steps, layers: Sequence[int]) -> int:
    """Bytes of two buffers for the largest layer, and of two for its gradients."""
    if not steps.alternating_buffers:
        return 0
    n = steps.n_parts
    sizes = [
        [
            (aligned(n * prod(part_shape(p.shape, n)) * p.itemsize), p.requires_grad)
            for p in memory.parameters([layer])
        ]
        for layer in layers
    ]
    parameters = max(sum(size for size, _ in own) for own in sizes)
    gradients = max(sum(size for size, learns in own if learns) for own in sizes)
    return 2 * (parameters + gradients)


def _summed(
    memory: ModelMemory, n: int, chunks: Mapping[int, Sequence[int]]
) -> dict[int, int] | None:
    """Bytes of a replica's part of the gradients of each chunk."""
    if n == 1:
        return None
    return {chunk: sum(layer_parts(memory, n, own)) for chunk, own in chunks.items()}


def layer_parts(memory: ModelMemory, n: int, layers: Sequence[int]) -> list[int]:
    """Bytes of a replica's part of the gradients of each layer."""
    return [
        sum(
            round(part_share(parameter, n) * size)
            for parameter, size in memory.gradients([layer]).items()
        )
        for layer in layers
    ]


def _in_turn(
    memory: ModelMemory, n: int, chunks: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Bytes of a replica's parts of the last two sums of each chunk's W."""
    return {c: sum(layer_parts(memory, n, own)[:2]) for c, own in chunks.items()}


def _norm(memory: ModelMemory, layers: Sequence[int]) -> int:
    """CPU kernels copy a gradient as float64 to take its norm."""
    learning = (p for p in memory.gradients(layers) if p.dtype is not torch.float64)
    sizes = (memory.bytes_of([p]) // p.itemsize * 8 for p in learning)
    return max(sizes, default=0)
