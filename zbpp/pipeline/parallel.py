"""The collectives of replicas and shards, added to a pipeline's schedule."""

from collections.abc import Mapping

from zbpp.core import Collective, CollectiveKind, Program, Schedule
from zbpp.core.collectives.sharding import reduces_every
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.mesh import Place
from zbpp.schedules import add_collectives, lower

__all__ = ["with_collectives"]


def with_collectives(
    schedule: Schedule,
    executors: Mapping[int, Executor],
    place: Place,
    shard: str,
    ties: tuple[tuple[int, ...], ...],
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
    """
    if place.n_replicas > 1:
        (executor,) = executors.values()
        kept = any(executor.transport.gather(executor.collectives.keeps))
        kinds = {job.kind for job in schedule.orders[0] if isinstance(job, Collective)}
        if kinds and (CollectiveKind.UNSHARD in kinds) == kept:
            return schedule, lower(schedule, ties=ties)
        schedule = add_collectives(
            schedule,
            shards=kept,
            reduces="every" if reduces_every(shard) else "last",
        )
    return schedule, lower(schedule, ties=ties)
