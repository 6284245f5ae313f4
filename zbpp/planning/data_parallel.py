"""Collectives of a schedule, by what the replicas of a stage hold in parts.

========== ================================= =============== =====================
shard      whole for a while                 UNSHARD         REDUCE_GRAD
========== ================================= =============== =====================
none       everything, always                never           once (an all-reduce)
optimizer  parameters from a chunk's first F once a step     once a step
           to its last B, gradients to its
           last W
gradients  parameters as above; gradients    once a step     after every W
           from a W to the end of its sum
parameters a layer's parameters in a pass;   never: F and B  after every W
           gradients as above                gather
========== ================================= =============== =====================

Whatever is in parts otherwise: parameters, gradients and optimizer state (ZeRO 1 to 3).
"""

from dataclasses import replace

from zbpp.core import Costs, RequestError, Schedule
from zbpp.core.sharding import SHARDS, Shard, gathers_once, reduces_every
from zbpp.schedules import add_collectives

__all__ = [
    "SHARDS",
    "Shard",
    "check_replicas",
    "gathers_in_passes",
    "replicated",
    "with_gathers",
]


def check_replicas(
    data_parallel: int, shard: str, *, alternating_buffers: bool = False
) -> None:
    """Refuse what is no number of replicas, or nothing that they can shard.

    Raises:
        RequestError: it is none, or nothing is gathered for a pass alone.
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
    if alternating_buffers and shard != "parameters":
        raise RequestError(
            f"--alternating_buffers hold layers for the time of a pass, and --shard is "
            f"{shard}, which keeps them whole for longer; give --shard parameters"
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
        shards=gathers_once(shard),
        reduces="every" if reduces_every(shard) else "last",
    )


def gathers_in_passes(data_parallel: int, shard: str) -> bool:
    """True if F and B gather parameters themselves, instead of an UNSHARD."""
    return data_parallel > 1 and shard == "parameters"


def with_gathers(costs: Costs, *, data_parallel: int, shard: str) -> Costs:
    """Let F and B gather parameters, where replicas hold them in parts."""
    return replace(costs, gathers=gathers_in_passes(data_parallel, shard))
