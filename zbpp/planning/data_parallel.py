"""Collectives of a schedule, by what the replicas of a stage shard among them.

========== =========================== ====================== ==========================
shard      each replica keeps          gathered (UNSHARD)     added up (REDUCE_GRAD)
========== =========================== ====================== ==========================
none       everything                  nothing                once a step (all-reduce)
optimizer  its part of the state       once a step            once a step
gradients  its part of gradients too   once a step            after every W
parameters its part of all             once a step            once a step
========== =========================== ====================== ==========================

Where parameters are sharded, a stage gathers a chunk for its passes and frees it after
the last B; full gradients of a chunk are there until they are added up. To gather for
every pass would take 2 m gathers of m micro-batches.
"""

from typing import Literal, get_args

from zbpp.core import RequestError, Schedule
from zbpp.schedules import add_collectives

__all__ = ["SHARDS", "Shard", "check_replicas", "replicated"]

Shard = Literal["none", "optimizer", "gradients", "parameters"]
"""State that is divided among replicas; each word includes the ones before."""

SHARDS: tuple[Shard, ...] = get_args(Shard)


def check_replicas(data_parallel: int, shard: str) -> None:
    """Refuse what is no number of replicas, or nothing that they can shard.

    Raises:
        RequestError: it is none.
    """
    if data_parallel < 1:
        raise RequestError(f"--data_parallel is {data_parallel}; it must be at least 1")
    if shard not in SHARDS:
        raise RequestError(f"--shard is {shard!r}; write one of {', '.join(SHARDS)}")
    if shard != "none" and data_parallel == 1:
        raise RequestError(
            f"--shard {shard} needs replicas to shard among; give --data_parallel, 2 "
            "or more"
        )


def replicated(schedule: Schedule, *, data_parallel: int, shard: str) -> Schedule:
    """Add the collectives of replicas; one alone leaves a schedule as it is.

    Args:
        schedule: of one replica; collectives that it has are replaced.
        data_parallel: replicas of every stage.
        shard: one of `SHARDS`.

    Raises:
        RequestError: as `check_replicas`.
    """
    check_replicas(data_parallel, shard)
    if data_parallel == 1:
        return schedule
    return add_collectives(
        schedule,
        shards=shard != "none",
        reduces="every" if shard == "gradients" else "last",
    )
