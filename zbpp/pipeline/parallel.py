"""Programs of a pipeline's stages, with the collectives of replicas and shards."""

import logging
import os
from collections.abc import Mapping

from zbpp.core import (
    Collective,
    CollectiveKind,
    Costs,
    Program,
    RequestError,
    Schedule,
)
from zbpp.core.collectives.sharding import reduces_every
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.mesh import Place
from zbpp.schedules import add_collectives, find_self_waits, lower

__all__ = ["check_one_queue", "with_collectives"]

_log = logging.getLogger("zbpp")


def with_collectives(
    schedule: Schedule,
    executors: Mapping[int, Executor],
    place: Place,
    shard: str,
    *,
    ties: tuple[tuple[int, ...], ...],
    costs: Costs | None = None,
) -> tuple[Schedule, tuple[Program, ...]]:
    """Add the jobs that the replicas' layers need; all processes must call.

    A schedule that has such jobs keeps them where they are. Without replicas there is
    nothing for them to do.

    Args:
        schedule: of the pipeline.
        executors: of this process.
        place: of this process.
        shard: what was asked for.
        ties: chunks of each tied parameter.
        costs: what the schedule was planned for; None: not known.

    Raises:
        RequestError: all streams of the GPU share one queue, and with this schedule a
            stage may wait for itself there.
    """
    transport = next(iter(executors.values())).transport
    if place.n_replicas > 1:
        (executor,) = executors.values()
        kept = any(transport.gather(executor.collectives.keeps))
        kinds = {job.kind for job in schedule.orders[0] if isinstance(job, Collective)}
        if not kinds or (CollectiveKind.UNSHARD in kinds) != kept:
            schedule = add_collectives(
                schedule,
                shards=kept,
                reduces="every" if reduces_every(shard) else "last",
            )
    if transport.on_device:
        check_one_queue(schedule, ties, os.environ)
    programs = lower(schedule, ties=ties, costs=costs, on_device=transport.on_device)
    return schedule, programs


def check_one_queue(
    schedule: Schedule,
    ties: tuple[tuple[int, ...], ...],
    environment: Mapping[str, str],
) -> None:
    """Look at schedules of a GPU whose streams all share one hardware queue.

    A job waits there for the messages that were begun before it. Where shapes are new,
    a receive is posted only when it is read, behind a header: the other end's send may
    then stop the job that this stage waits for.

    Args:
        schedule: that is to run.
        ties: chunks of each tied parameter.
        environment: of the process.

    Raises:
        RequestError: stages may wait for each other for ever.
    """
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return
    waits = find_self_waits(lower(schedule, ties=ties, ahead=0))
    if waits:
        raise RequestError(
            f"CUDA_DEVICE_MAX_CONNECTIONS is 1, and with {schedule.name} stages may "
            f"wait for each other for ever in steps with new shapes ({waits[0]}); "
            "leave the variable unset, set it to 32, or choose 1F1B"
        )
    _log.warning(
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: messages may hold up jobs that do not need "
        "them; leave the variable unset, or set it to 32"
    )
