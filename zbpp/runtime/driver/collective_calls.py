"""Pipeline operations over the stages of this process."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zbpp.core import Schedule, Slot, Timeline
from zbpp.core.clock import off_lane
from zbpp.runtime.comm.clocks import clock_name, compare_clocks
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.executor import Executor

__all__ = [
    "failures_told",
    "gather_slots",
    "gather_splits",
    "gather_timelines",
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
        peers.of_replicas(rows)[:, :-2].reshape(-1, 2, table[0].numel()).unbind(1)
    )
    n_inputs, n_targets = (int(count) or None for count in rows[peers.row, -2:])
    mean = float((losses * weights).sum() / weights.sum())
    return mean, (n_inputs, n_targets)


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


def gather_splits(executors: Executors) -> list[bool]:
    """True for each stage of all processes where W has anything to do."""
    own = {stage: executor.stage.defers for stage, executor in executors.items()}
    splits: dict[int, bool] = {}
    for part in next(iter(executors.values())).transport.gather_pipeline(own):
        splits |= part
    return [splits[stage] for stage in sorted(splits)]
