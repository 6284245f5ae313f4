"""What a call of a pipeline means for all its stages in this process."""

from collections.abc import Mapping

from zbpp.core import Placement, Schedule, Slot, Timeline
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets

__all__ = [
    "distribute_batch",
    "gather_splits",
    "gather_timeline",
    "mean_loss",
    "report_split",
]

Executors = Mapping[int, Executor]


def distribute_batch(
    executors: Executors,
    placement: Placement,
    batch: tuple[Batch | None, Batch | None],
    *,
    step: int,
    n_microbatches: int,
    even: bool,
) -> None:
    """Begin a step, or an evaluation: micro-batches go to the stages that read them.

    Args:
        executors: of this process, by stage.
        placement: of the chunks.
        batch: inputs for the first chunk, targets for the last.
        step: its number.
        n_microbatches: how many to cut the batch into.
        even: refuse micro-batches of different sizes.

    Raises:
        RequestError: a batch is missing, or cannot be cut so.
    """
    inputs, targets = batch
    m, first, last = n_microbatches, placement.stage_of[0], placement.stage_of[-1]
    cut_inputs = split_inputs(inputs, m, even=even) if first in executors else None
    cut_targets = split_targets(targets, m, even=even) if last in executors else None
    for stage, executor in executors.items():
        executor.stage.begin(
            step=step,
            inputs=cut_inputs if stage == first else None,
            targets=cut_targets if stage == last else None,
            n_microbatches=m,
        )


def mean_loss(executors: Executors) -> float:
    """Mean over the samples of the batch whose forwards have run."""
    reductions = [
        executor.transport.reduce(executor.stage.weighted_losses())
        for executor in executors.values()
    ]
    losses, weights = reductions[0].result()
    return float((losses * weights).sum() / weights.sum())


def gather_timeline(executors: Executors, schedule: Schedule) -> Timeline:
    """The jobs of all stages in the last step, with their times."""
    own = {stage: executor.slots for stage, executor in executors.items()}
    rows: dict[int, list[Slot]] = {}
    for part in next(iter(executors.values())).transport.gather(own):
        rows.update(part)
    return Timeline(
        schedule.name,
        schedule.placement,
        schedule.n_microbatches,
        tuple(tuple(rows[stage]) for stage in range(schedule.n_stages)),
    )


def report_split(executors: Executors) -> dict[str, str]:
    """For each parameter with a gradient: where it is computed, `SplitGraph.report`."""
    found = {}
    for executor in executors.values():
        for index, where in executor.stage.where.items():
            for place, layer in executor.stage.chunks[index].numbered():
                for name, p in layer.named_parameters(prefix=f"layers.{place}"):
                    if p in where:
                        found[name] = where[p]
    return found


def gather_splits(executors: Executors) -> list[bool]:
    """For each stage of all processes whether W has anything to do."""
    own = {
        stage: any("W" in part.values() for part in executor.stage.where.values())
        for stage, executor in executors.items()
    }
    splits: dict[int, bool] = {}
    for part in next(iter(executors.values())).transport.gather(own):
        splits |= part
    return [splits[stage] for stage in sorted(splits)]
