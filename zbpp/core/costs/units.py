"""Units of memory: amounts as people write them, and limits beside memories.

Costs say that they are in bytes by ``memory_unit``, or by texts such as "1.5GiB" in
their file; a limit says so by its unit. Where a limit in bytes meets memories that are
not, it is refused, as is one of more than a million times the largest memory.
"""

from dataclasses import replace
from typing import TypeVar

from zbpp.core.amounts import BYTES_FROM, format_bytes
from zbpp.core.costs.columns import Bytes, PerChunk, columns_of
from zbpp.core.costs.layers import LayerCosts
from zbpp.core.costs.table import Costs
from zbpp.core.errors import RequestError

__all__ = [
    "check_unit",
    "is_in_bytes",
    "is_limit_in_bytes",
    "with_limit",
]

_C = TypeVar("_C", bound=Costs | LayerCosts)
_NO_COSTS = Costs()


def with_limit(costs: _C, limit: PerChunk | None, *, name: str = "memory_limit") -> _C:
    """Give costs another limit; None leaves theirs.

    A limit of their own that has no unit is in theirs, however large it is.

    Raises:
        RequestError: as `check_unit`.
    """
    if limit is not None:
        costs = replace(costs, memory_limit=limit)
    if limit is not None or _has_unit(costs.memory_limit):
        check_unit(costs, name=name)
    return costs


def check_unit(costs: Costs | LayerCosts, *, name: str = "memory_limit") -> None:
    """Refuse a limit in bytes where the memories are in another unit.

    Args:
        costs: with the limit.
        name: of the limit, for the message.

    Raises:
        RequestError: it says what to write.
    """
    limit = costs.memory_limit
    if limit is None or is_in_bytes(costs) or not is_limit_in_bytes(limit, costs):
        return
    most = max(limit) if isinstance(limit, tuple) else limit
    raise RequestError(
        f"{name} is {format_bytes(most)}, but nothing says that the memories of the "
        f"costs are bytes: the largest is {_largest(costs):g}; add "
        '"memory_unit": "bytes" to the file of the costs (memory_unit="bytes" in '
        "Python) if they are, or give m_b and m_w in bytes (--costs, layers=, or "
        "example= of zbpp.plan_model), or the limit in their unit"
    )


def is_in_bytes(costs: Costs | LayerCosts) -> bool:
    """True if memories are said to be in bytes."""
    return costs.memory_unit == "bytes"


def is_limit_in_bytes(limit: PerChunk, costs: Costs | LayerCosts = _NO_COSTS) -> bool:
    """True if a limit has a unit, or is beyond any use in the unit of the costs."""
    limits = limit if isinstance(limit, tuple) else (limit,)
    most = BYTES_FROM * max(1.0, _largest(costs))
    return _has_unit(limit) or max(limits) >= most


def _has_unit(limit: PerChunk | None) -> bool:
    limits = limit if isinstance(limit, tuple) else (limit,)
    return any(isinstance(stage_limit, Bytes) for stage_limit in limits)


def _largest(costs: Costs | LayerCosts) -> float:
    values: list[PerChunk | None] = [
        getattr(costs, name)
        for name, about in columns_of(type(costs)).items()
        if about.is_memory
        and name not in ("memory_limit", "message", "parameters", "peak_r")
    ]
    return max(
        amount
        for value in values
        if value is not None
        for amount in (value if isinstance(value, tuple) else (value,))
    )
