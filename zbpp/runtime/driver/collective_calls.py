"""Pipeline operations over the stages of this process."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from zbpp.core import RequestError, Schedule, Slot, Timeline
from zbpp.core.clock import off_lane
from zbpp.runtime.comm.clocks import clock_name, compare_clocks
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.executor import Executor
from zbpp.runtime.loss import names_text
from zbpp.runtime.microbatches import merge
from zbpp.runtime.optim.decision import StepSums, StepVectorLayout

__all__ = [
    "failures_told",
    "gather_slots",
    "gather_splits",
    "gather_timelines",
    "last_outputs",
    "learn_metrics",
    "mean_loss",
    "report_split",
    "tell_failure",
]

Executors = Mapping[int, Executor]


@contextmanager
def failures_told(executors: Executors) -> Iterator[None]:
    """Tell the other processes, before an error leaves, that this one has failed."""
    try:
        yield
    except BaseException as error:
        tell_failure(executors, error)
        raise


def tell_failure(
    executors: Executors, error: BaseException, *, doing: str | None = None
) -> None:
    """Tell the other processes that this one has failed, and why.

    Args:
        executors: of this process.
        error: the cause.
        doing: what was under way; None: the last call.
    """
    transport = next(iter(executors.values())).transport
    transport.doing = doing or transport.doing
    transport.report(error)


def mean_loss(
    executors: Executors, samples: tuple[int | None, int | None]
) -> tuple[float, tuple[int | None, int | None]]:
    """Mean over the samples of all replicas' batches whose forwards have run.

    Args:
        executors: of this process.
        samples: of inputs and targets, where this process knows them.

    Returns:
        The mean, and the samples as any process of this pipeline knows them.
    """
    sums: list[Reduction] = []
    peers = next(iter(executors.values())).transport.peers
    for executor in executors.values():
        table = executor.stage.loss.table()
        told = [0 if sums else count or 0 for count in samples]  # once a process
        sums.append(
            executor.transport.reduce(
                torch.cat([table.flatten(), table.new_tensor(told)])
            )
        )
    rows = peers.rows(sums[0].result())
    losses, weights = (
        peers.of_replicas(rows)[:, :-2].reshape(-1, *table.shape)[:, :2].unbind(1)
    )
    n_inputs, n_targets = (int(count) or None for count in rows[peers.row, -2:])
    mean = float((losses * weights).sum() / weights.sum())
    return mean, (n_inputs, n_targets)


def learn_metrics(executors: Executors) -> StepSums | None:
    """Tell all processes the metrics of the step that has run (every rank must call).

    From the next step on they are summed with its losses.

    Returns:
        The sums with those of this step; None: there are no metrics.

    Raises:
        RequestError: replicas have different ones.
    """
    first = next(iter(executors.values()))
    own = {executor.stage.loss.returned for executor in executors.values()}
    every = set().union(*first.transport.gather(own)) - {None}
    if len({frozenset(names) for names in every}) > 1:
        told = "; others: ".join(map(names_text, sorted(every)))
        raise RequestError(
            f"replicas of the pipeline return different metrics of loss_fn: {told}"
        )
    names = min(every, default=())
    for executor in executors.values():
        executor.stage.loss.names = names
    if not names:
        return None
    sums = [
        executor.transport.reduce(executor.stage.loss.table().flatten())
        for executor in executors.values()
    ]
    return StepSums(
        sums[0],
        StepVectorLayout(0, first.stage.n_microbatches, metrics=names),
        step=first.stage.step,
        peers=first.transport.peers,
    )


def last_outputs(executors: Executors, stage: int) -> Any:
    """Take the outputs of all micro-batches, joined; None on other processes.

    Args:
        executors: of this process.
        stage: that has the last chunk.
    """
    if stage not in executors:
        return None
    held = executors[stage].stage
    outputs, held.outputs = held.outputs, None
    return None if outputs is None else merge([outputs[i] for i in sorted(outputs)])


def gather_timelines(
    executors: Executors, schedule: Schedule, n: int = 1
) -> list[Timeline]:
    """The jobs of all stages in the last steps, with their times, oldest first.

    Times are those of the first process's clock; the others' are compared with it.

    Args:
        executors: of this process.
        schedule: of the steps.
        n: how many; fewer come back where fewer have run, or are kept.
    """
    own = {stage: executor.times.steps(n) for stage, executor in executors.items()}
    gather = next(iter(executors.values())).transport.gather_pipeline
    steps, error_s = gather_slots(own, gather)
    made = []
    for step in steps:
        kept, lanes = off_lane(step)
        made.append(
            Timeline(
                *(schedule.name, schedule.placement, schedule.n_microbatches, kept),
                recomputing=schedule.recomputing,
                clock_error=error_s,
                collectives=lanes,
            )
        )
    return made


def gather_slots(
    own: Mapping[int, Sequence[list[Slot]]], gather: Callable[[Any], list[Any]]
) -> tuple[list[tuple[list[Slot], ...]], float]:
    """Bring the jobs of all stages to one clock (every rank must call).

    Args:
        own: jobs of each step, by the stages of this process, in seconds.
        gather: gives every process the things of all.

    Returns:
        For each step the jobs of all stages, and the largest error of their clocks.
    """
    names, parts = zip(*gather((clock_name(), own)), strict=True)
    clocks = compare_clocks(gather, names)
    rows: dict[int, list[list[Slot]]] = {}
    for part, ahead_s in zip(parts, clocks.ahead_s, strict=True):
        for stage, of_steps in part.items():
            rows[stage] = [_earlier(step, ahead_s) for step in of_steps]
    steps = zip(*(rows[stage] for stage in sorted(rows)), strict=True)
    return list(steps), clocks.error_s


def _earlier(slots: list[Slot], seconds: float) -> list[Slot]:
    if seconds == 0.0:
        return slots
    return [Slot(one.job, one.start - seconds, one.end - seconds) for one in slots]


def report_split(executors: Executors) -> dict[str, str]:
    """Name the origin of each parameter's gradient: `SplitGraph.report`."""
    found = {}
    for executor in executors.values():
        where = ChainMap(*executor.stage.where.values())
        for _, name, p in executor.stage.named_leaves():
            if p in where:
                found[name] = where[p]
    return found


def leaf_sizes(executors: Executors) -> dict[str, int]:
    """Elements of each parameter, by the names of `report_split`."""
    leaves = chain.from_iterable(e.stage.named_leaves() for e in executors.values())
    return {name: p.numel() for _, name, p in leaves}


def gather_splits(executors: Executors) -> list[bool]:
    """True for each stage of all processes where W has anything to do."""
    own = {stage: executor.stage.defers for stage, executor in executors.items()}
    splits: dict[int, bool] = {}
    for part in next(iter(executors.values())).transport.gather_pipeline(own):
        splits |= part
    return [splits[stage] for stage in sorted(splits)]
