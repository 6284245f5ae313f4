"""Bytes that a stage holds all the time, by the rules of its steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from zbpp.core import RequestError, Schedule
from zbpp.memory.model import ModelMemory
from zbpp.memory.optimizer import part_of, part_shape
from zbpp.planning.replicas import Shard, gathers_in_passes
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.policies import IsExpert
from zbpp.runtime.support.fsdp_buffers import aligned
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded

__all__ = [
    "ResidentMemory",
    "Steps",
    "gradient_parts",
    "gradients_elsewhere",
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
    alternating_buffers: bool = False
    """Layers are gathered and reduced in buffers that are there all the time."""
    expert_parallel: int = 1
    """Processes of every replica that hold different experts."""
    expert_parameters: IsExpert | None = None
    """Tells experts by the model's own names."""

    @property
    def n_replicas(self) -> int:
        """Processes that gradients are summed over."""
        return self.data_parallel * self.expert_parallel

    @property
    def n_parts(self) -> int:
        """Replicas that hold a part each; 1: every one holds all."""
        return 1 if self.shard == "none" else self.n_replicas

    def parts_of(self, name: str, parameter: nn.Parameter) -> "Parts":
        """Return the parts that a parameter is divided into."""
        is_expert = self.expert_parallel > 1 and (
            self.expert_parameters is not None
            and self.expert_parameters(name, parameter)
        )
        if not is_expert:
            return Parts(1, self.n_parts)
        n_dealt = 1 if self.shard == "none" else self.data_parallel
        return Parts(self.expert_parallel, n_dealt)


class Parts(NamedTuple):
    """Processes with other experts, and among those with the same ones replicas that
    hold a part each."""

    n_own: int
    n_dealt: int

    @property
    def n(self) -> int:
        """Parts of the parameter of the whole model."""
        return self.n_own * self.n_dealt


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
    parts = {p: steps.parts_of(name, p) for p, name in memory.named(layers).items()}
    if n > 1 and any(map(is_sharded, parameters)):
        raise RequestError(
            "replicas cannot divide parameters that tensor parallelism has divided in "
            "an estimate; leave --shard out, or estimate the plain layers"
        )
    speculates = schedule.is_post_validated
    step = memory.optimizer(
        layers, steps.optimizer, n_parts={p: part.n for p, part in parts.items()}
    )
    ends: list[Tensor] = []
    if 0 in layers:
        ends += tensors_in(memory.fake.inputs)
    if memory.n_layers - 1 in layers:
        ends += tensors_in(memory.fake.targets)
    tied_sent, tied_received = memory.tied(layers)
    buffers = memory.bytes_of(memory.buffers(layers)) + kept + tied_sent
    sizes = {
        chunk: [_gathered_bytes(memory, parts, layer) for layer in of_chunk]
        for chunk, of_chunk in chunks.items()
    }
    gathered, in_pass = {}, {}
    if steps.alternating_buffers:
        buffers += _alternating(memory, n, layers)
    elif n > 1 and gathers_in_passes(steps.n_replicas, steps.shard):
        in_pass = {chunk: max(of_layers) for chunk, of_layers in sizes.items()}
    elif n > 1:
        gathered = {chunk: sum(of_layers) for chunk, of_layers in sizes.items()}
    return ResidentMemory(
        parameters=memory.bytes_of(
            [part_of(memory.fake.mode, p, parts[p].n) for p in parameters]
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
            c: sum(gradient_parts(memory, steps, of_chunk))
            for c, of_chunk in chunks.items()
        },
    )


def _alternating(memory: ModelMemory, n: int, layers: Sequence[int]) -> int:
    """Bytes of two buffers for the largest layer, and of two for its gradients."""
    sizes = [
        [
            (aligned(n * prod(part_shape(p.shape, n)) * p.itemsize), p.requires_grad)
            for p in memory.parameters([layer])
        ]
        for layer in layers
    ]
    parameters = max(sum(size for size, _ in of_layer) for of_layer in sizes)
    gradients = max(
        sum(size for size, learns in of_layer if learns) for of_layer in sizes
    )
    return 2 * (parameters + gradients)


def _gathered_bytes(
    memory: ModelMemory, parts: Mapping[nn.Parameter, Parts], layer: int
) -> int:
    """Bytes of a layer's parameters that are in parts, when they are gathered."""
    return memory.bytes_of(
        [
            part_of(memory.fake.mode, p, parts[p].n_own)
            for p in memory.parameters([layer])
            if parts[p].n_dealt > 1
        ]
    )


def gradient_parts(
    memory: ModelMemory, steps: Steps, layers: Sequence[int]
) -> list[int]:
    """Bytes of a replica's part of the gradients of each layer."""
    return [
        sum(
            _part_bytes(p, size, steps.parts_of(name, p).n)
            for p, name, size in _gradients(memory, layer)
        )
        for layer in layers
    ]


def gradients_elsewhere(
    memory: ModelMemory, steps: Steps, layers: Sequence[int]
) -> list[int]:
    """Bytes of the gradients of each layer's experts that other processes have."""
    return [
        sum(
            size - _part_bytes(p, size, steps.parts_of(name, p).n_own)
            for p, name, size in _gradients(memory, layer)
        )
        for layer in layers
    ]


def _gradients(
    memory: ModelMemory, layer: int
) -> Iterator[tuple[nn.Parameter, str, int]]:
    names = memory.named([layer])
    return ((p, names[p], size) for p, size in memory.gradients([layer]).items())


def _part_bytes(p: nn.Parameter, size: int, n: int) -> int:
    return round(size * prod(part_shape(p.shape, n)) / max(1, p.numel()))
