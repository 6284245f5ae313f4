"""One micro-batch through all chunks: what each of them is given in training.

The forwards run with gradients, and send what they put out, as in a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zbpp.core import Pass, PassKind, Placement, Value, What
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.stage import LossFn, Stage
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import Tensors, with_tensors

__all__ = ["Given", "begin", "capture", "fresh", "stage_like"]


@dataclass
class Given:
    """The part of a micro-batch that one stage's chunks read."""

    inputs: Tensors | None
    """Of the model, where this stage holds the first chunk."""
    targets: object | None
    """Of the loss, where it holds the last one."""
    of_chunk: dict[int, Tensors] = field(default_factory=dict)
    """Outputs of the chunk before; there is none for the first."""
    out_bytes: dict[int, int] = field(default_factory=dict)
    """Of what each chunk puts out."""


def capture(
    executors: Mapping[int, Executor],
    placement: Placement,
    options: Settings,
    microbatch: Mapping[int, Given],
    *,
    step: int,
) -> None:
    """Run the forwards of one micro-batch (every rank must call).

    Args:
        executors: of this process.
        placement: of the chunks.
        options: of the stages.
        microbatch: by stage, with inputs and targets; the rest is filled in.
        step: its number, for seeds.
    """
    runners = {}
    for stage, executor in executors.items():
        part = microbatch[stage]
        executor.transport.begin(
            MicroBatches(1, inputs=None if part.inputs is None else [part.inputs])
        )
        runners[stage] = stage_like(
            options, list(executor.stage.chunks.values()), n_chunks=placement.n_chunks
        )
        begin(runners[stage], part, step=step, n_microbatches=1)
    local: Tensors | None = None
    for chunk, stage in enumerate(placement.stage_of):
        if stage not in executors:
            continue
        transport = executors[stage].transport
        job = Pass(PassKind.F, chunk, 0)
        inputs = local
        if chunk > 0 and placement.stage_of[chunk - 1] != stage:
            value = Value(What.ACTIVATION, chunk - 1, 0)
            expected = transport.post(value, placement.stage_of[chunk - 1])
            inputs = expected.receive(job)
        if inputs is not None:
            microbatch[stage].of_chunk[chunk] = fresh(inputs)
        local = runners[stage].forward(chunk, 0, inputs)
        runners[stage].discard()
        microbatch[stage].out_bytes[chunk] = sum(y.nbytes for y in local)
        last = chunk + 1 == placement.n_chunks
        if not last and placement.stage_of[chunk + 1] != stage:
            value = Value(What.ACTIVATION, chunk, 0)
            transport.send(value, local, placement.stage_of[chunk + 1])
    for executor in executors.values():
        executor.transport.end()


def stage_like(
    options: Settings,
    chunks: Sequence[Chunk],
    *,
    n_chunks: int,
    loss_fn: LossFn | None = None,
) -> Stage:
    """Make a stage of other chunks, or with another loss, with the same settings."""
    return Stage(
        chunks,
        n_chunks=n_chunks,
        loss_fn=loss_fn or options.loss_fn,
        device=options.device,
        autocast=options.numerics.autocast,
        exact_sums=options.numerics.exact_sums,
    )


def begin(
    stage: Stage | Executor, microbatch: Given, *, step: int, n_microbatches: int
) -> None:
    """Start a step of the same micro-batch over and over."""
    inputs, targets = microbatch.inputs, microbatch.targets
    each = range(n_microbatches)
    stage.begin(
        MicroBatches(
            n_microbatches,
            step,
            None if inputs is None else [fresh(inputs) for _ in each],
            None if targets is None else [_fresh_targets(targets) for _ in each],
        )
    )


def fresh(tensors: Tensors) -> Tensors:
    """Copy tensors: a layer may change what it is given in place."""
    return with_tensors(
        tensors, (x.detach().clone().requires_grad_(x.requires_grad) for x in tensors)
    )


def _fresh_targets(targets: object) -> object:
    """Copy targets: a loss may change them in place."""
    return map_tensors(targets, lambda t: t.detach().clone())
