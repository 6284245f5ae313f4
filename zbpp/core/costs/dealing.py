"""Numbers for stages and chunks, and how they are dealt to chunks.

A number stands for a whole stage and is dealt evenly to the chunks of the stage. A
tuple is read by its length, for p stages and C chunks:

=======  ================================================================
C        one entry per chunk
p        one per stage, each dealt evenly to the chunks of its stage
=======  ================================================================

Where C is p, entries are chunks. ``limit`` and ``splits`` are per stage, ``comm`` is
per link (`zbpp.core.costs.links`). Dealing suits stages that differ as machines do;
where the layers differ, as a head on the last chunk, give one entry per chunk. Times
share one unit of the caller's choice, and so do memories.
"""

import math

from zbpp.core.errors import RequestError
from zbpp.core.placement import Placement

__all__ = [
    "MOST_LIMIT",
    "PerChunk",
    "check_memory_unit",
    "check_numbers",
    "deal_limit",
    "per_chunk",
]

PerChunk = float | tuple[float, ...]
"""A whole stage's value, or one value per stage or per chunk."""

MOST_LIMIT = 1e150
_MOST = 1e100  # products and sums of these are finite
_LEAST = 1e-100  # and so are quotients


def check_numbers(name: str, value: PerChunk, *, most: float = _MOST) -> None:
    """Refuse what is negative, not finite, or too large or small to be counted with.

    Raises:
        RequestError: it names the number.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if not 0 <= number < math.inf:
            raise RequestError(
                f"{name} is {number!r}; it must be finite and at least 0"
            )
        if number > most or 0 < number < _LEAST:
            raise RequestError(
                f"{name} is {number!r:.40}; take another unit: it must be 0, or at "
                f"least {_LEAST:g} and at most {most:g}"
            )


def check_memory_unit(unit: str | None) -> None:
    """Refuse a unit of memory that is not known.

    Raises:
        RequestError: it names the unit.
    """
    if unit not in (None, "bytes"):
        raise RequestError(
            f"memory_unit is {unit!r}; write 'bytes', or leave it out for any one unit"
        )


def per_chunk(name: str, value: PerChunk, placement: Placement) -> tuple[float, ...]:
    """Give every chunk its share; see the module's text.

    Raises:
        RequestError: a list of another length.
    """
    shares = [len(placement.chunks_of[stage]) for stage in placement.stage_of]
    if not isinstance(value, tuple):
        return tuple(value / share for share in shares)
    if len(value) == placement.n_chunks:
        return value
    if len(value) == placement.n_stages:
        by_stage = [value[stage] for stage in placement.stage_of]
        return tuple(one / share for one, share in zip(by_stage, shares, strict=True))
    raise RequestError(
        f"{name} has {len(value)} entries for {placement.n_chunks} chunks; give one "
        f"number, or one per stage ({placement.n_stages}) or chunk"
    )


def deal_limit(limit: PerChunk | None, placement: Placement) -> tuple[float, ...]:
    """Give every stage its memory limit; infinite where there is none.

    Raises:
        RequestError: a list of another length than there are stages.
    """
    if limit is None:
        return (math.inf,) * placement.n_stages
    if not isinstance(limit, tuple):
        return (limit,) * placement.n_stages
    if len(limit) != placement.n_stages:
        raise RequestError(
            f"memory_limit has {len(limit)} entries for {placement.n_stages} stages"
        )
    return limit
