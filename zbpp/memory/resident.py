"""Bytes that a stage holds all the time, by the rules of its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from zbpp.core import RequestError, Schedule
from zbpp.memory.model import ModelMemory
from zbpp.memory.optimizer import part_of, part_shape
from zbpp.planning.replicas import Shard, gathers_in_passes
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded

__all__ = [
    "ResidentMemory",
    "Steps",
    "resident_memory",
]


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

    @property
    def n_parts(self) -> int:
        """Replicas that hold a part each; 1: every one holds all."""
        return 1 if self.shard == "none" else self.data_parallel


@dataclass(frozen=True)
class ResidentMemory:
    """Bytes that a stage holds all the time, and what its steps need.

    Args:
        parameters: of its chunks, shared ones once.
        buffers: and what layers keep from their first forward on.
        optimizer: its state.
        rollback: copies of post-validation.
        batch: inputs and targets of all micro-batches that it reads.
        tied: gradients of tied weights that come before the optimizer step.
        step: most that an optimizer step needs.
        commit: most that the confirmation of a speculative one needs.
        speculates: steps are validated in the next one.
        keeps_sends: a send is held until the sums of its step have come, as by gloo;
            else to the next send.
        gathered: of each chunk, what an UNSHARD adds until its RESHARD.
        in_pass: of each chunk, what F, B and BW gather for themselves.
        summed: of each chunk, what is left of its gradients when REDUCE_WAIT has ended;
            None: they are added up in place.
    """

    parameters: int = 0
    buffers: int = 0
    optimizer: int = 0
    rollback: int = 0
    batch: int = 0
    tied: int = 0
    step: int = 0
    commit: int = 0
    speculates: bool = False
    keeps_sends: bool = True
    gathered: Mapping[int, int] = field(default_factory=dict)
    in_pass: Mapping[int, int] = field(default_factory=dict)
    summed: Mapping[int, int] | None = None

    @property
    def total(self) -> int:
        """Bytes that are there all the time."""
        state = self.parameters + self.buffers + self.optimizer
        return state + self.rollback + self.batch


def resident_memory(
    memory: ModelMemory,
    steps: Steps,
    schedule: Schedule,
    chunks: Mapping[int, Sequence[int]],
    kept: int,
) -> ResidentMemory:
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
    layers = [layer for of_chunk in chunks.values() for layer in of_chunk]
    parameters, n = memory.parameters(layers), steps.n_parts
    if n > 1 and any(map(is_sharded, parameters)):
        raise RequestError(
            "replicas cannot divide parameters that tensor parallelism has divided in "
            "an estimate; leave --shard out, or estimate the plain layers"
        )
    speculates = schedule.is_post_validated
    step = memory.optimizer(
        layers, steps.optimizer, n_parts=dict.fromkeys(parameters, n)
    )
    ends: list[Tensor] = []
    if 0 in layers:
        ends += tensors_in(memory.fake.inputs)
    if memory.n_layers - 1 in layers:
        ends += tensors_in(memory.fake.targets)
    tied_sent, tied_received = memory.tied(layers)
    buffers = memory.bytes_of(memory.buffers(layers)) + kept + tied_sent
    sizes = {
        chunk: [memory.bytes_of(memory.parameters([layer])) for layer in of_chunk]
        for chunk, of_chunk in chunks.items()
    }
    gathered, in_pass = {}, {}
    if n > 1 and gathers_in_passes(steps.data_parallel, steps.shard):
        in_pass = {chunk: max(of_layers) for chunk, of_layers in sizes.items()}
    elif n > 1:
        gathered = {chunk: sum(of_layers) for chunk, of_layers in sizes.items()}
    return ResidentMemory(
        parameters=memory.bytes_of(
            [part_of(memory.fake.mode, p, n) for p in parameters]
        ),
        buffers=buffers,
        optimizer=step.state,
        rollback=step.rollback if speculates else 0,
        batch=memory.bytes_of(ends) * schedule.n_microbatches,
        tied=tied_received,
        step=step.speculative_peak if speculates else step.peak,
        commit=step.commit_peak,
        speculates=speculates,
        keeps_sends=memory.options.device.type == "cpu",
        gathered=gathered,
        in_pass=in_pass,
        summed=None
        if n == 1
        else {
            c: sum(_gradient_parts(memory, n, of_chunk))
            for c, of_chunk in chunks.items()
        },
    )


def _gradient_parts(memory: ModelMemory, n: int, layers: Sequence[int]) -> list[int]:
    """Bytes of a replica's part of the gradients of each layer."""
    return [
        sum(
            round(size * prod(part_shape(p.shape, n)) / max(1, p.numel()))
            for p, size in memory.gradients([layer]).items()
        )
        for layer in layers
    ]
