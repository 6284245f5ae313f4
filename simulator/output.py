"""Shared by pictures, pages and traces: writing a file, and the unit of memory."""

from collections.abc import Collection
from pathlib import Path

from zbpp.core import Costs, RequestError

__all__ = ["memory_unit", "write_file"]

_BYTES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 0.0}


def memory_unit(most: float, costs: Collection[Costs]) -> tuple[str, float]:
    """Name and size of the unit in which memory is shown; M_B where F leaves 1.

    Args:
        most: the largest amount that is shown.
        costs: whose memories are shown beside one another.
    """
    if costs and all(one.memory_unit == "bytes" for one in costs):
        name = next(name for name, size in _BYTES.items() if most >= size)
        return name, _BYTES[name] or 1.0
    return ("M_B" if all(one.m_b == 1.0 for one in costs) else ""), 1.0


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file; text as UTF-8.

    Raises:
        RequestError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None
