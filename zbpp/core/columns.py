"""Columns of costs: fields with one number for all, or one entry for each.

======  ==========================================================================
per     a list has one entry per
======  ==========================================================================
row     chunk, or layer; a number is that of a whole stage, split evenly over its
        chunks, or of every layer
edge    edge between two rows
stage   stage
link    link between neighbours: entry s joins stages s and s+1, and the last of
        as many entries as stages joins the last stage and the first
all     no list: there is one number
======  ==========================================================================

An edge within a stage takes no time, both ways of an edge are alike. Times share one
unit of the caller's choice. Memories are in bytes, or in any other unit in which
amounts are small, such as M_B. A text such as "40GiB" is a number of bytes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

from zbpp.core.errors import RequestError
from zbpp.core.placement import Placement

PerRow = float | tuple[float, ...]
"""A number, or one entry for each; see the module's text."""

_MOST_LIMIT = 1e150
_MOST = 1e100  # products and sums of these are finite
_LEAST = 1e-100  # and so are quotients

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_FORM = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_memory(text: str) -> float:
    """Read a number, or an amount with a unit as a number of bytes.

    >>> parse_memory("40GiB"), parse_memory("1.5 MB"), parse_memory("8")
    (42949672960.0, 1500000.0, 8.0)

    Raises:
        RequestError: it is neither.
    """
    match = _FORM.fullmatch(text)
    if match is not None and (not match[2] or match[2].lower() in _UNITS):
        try:
            return float(match[1]) * _UNITS[match[2].lower() or "b"]
        except ValueError:  # two points, for instance
            pass
    raise RequestError(
        f"{text!r} is no amount of memory; write 40GiB, 512MiB, 16GB, or a number in "
        "the unit of the costs"
    )


class Per(StrEnum):
    """The things that a list has one entry for."""

    ROW = "row"
    EDGE = "edge"
    STAGE = "stage"
    LINK = "link"
    ALL = "all"


@dataclass(frozen=True)
class Column:
    """Properties of a column.

    Args:
        per: the unit that has an entry each: a chunk, an edge, a stage.
        is_memory: it is an amount of memory, and may be written as ``"40GiB"``.
        is_rate: it is above 0.
        is_flag: it is true or false.
    """

    per: Per
    is_memory: bool = False
    is_rate: bool = False
    is_flag: bool = False


def column(default: PerRow | None, per: Per, **properties: bool) -> Any:
    """Declare a field as a column; see `Column`."""
    return field(default=default, metadata={"column": Column(per, **properties)})


_COLUMNS: dict[type, dict[str, Column]] = {}
"""By class: costs are made by the thousand where splits are searched."""


def columns_of(table: type) -> dict[str, Column]:
    """The columns of a class, by name."""
    if table not in _COLUMNS:
        about = {x.name: x.metadata.get("column") for x in fields(table)}
        _COLUMNS[table] = {name: x for name, x in about.items() if x}
    return _COLUMNS[table]


def check_columns(table: Any, n_rows: int | None = None) -> None:
    """Convert the columns of a new table to numbers and tuples, and check them.

    Lists, arrays and the numbers of numpy are converted; a memory may be a text. Where
    the number of rows is known, lists must have as many entries.
    """
    for name, about in columns_of(type(table)).items():
        value = listed(getattr(table, name))
        if value is None:
            continue
        most = _MOST_LIMIT if name == "memory_limit" else _MOST
        if isinstance(value, list | tuple) and value:
            if about.per is Per.ALL:
                raise RequestError(f"{name} is a list; it must be one number")
            value = tuple(_number(name, x, about, most, i) for i, x in enumerate(value))
            if n_rows is not None and about.per in (Per.ROW, Per.EDGE):
                is_edge = about.per is Per.EDGE
                what = "boundaries between layers" if is_edge else "layers"
                _check_length(name, value, n_rows - is_edge, what)
        else:
            value = _number(name, value, about, most)
        object.__setattr__(table, name, value)


def _number(
    name: str, value: Any, about: Column, most: float, index: int | None = None
) -> float:
    """Check an entry of a column: it must be small and large enough to count with."""
    if value.__class__ is float and _LEAST <= value <= most and not about.is_flag:
        return float(value)
    place = name if index is None else f"{name}[{index}]"
    value = listed(value)
    if about.is_flag:
        if not isinstance(value, bool):
            raise RequestError(f"{place} is {value!r:.60}, not true or false")
        return value
    if isinstance(value, str) and about.is_memory:
        try:
            value = parse_memory(value)
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{place} is {value!r:.60}, not a number")
    if not 0 <= value < math.inf:
        raise RequestError(
            f"{place} is {value!r:.40}; it must be finite and at least 0"
        )
    if value > most or 0 < value < _LEAST:
        raise RequestError(
            f"{place} is {value!r:.40}; take another unit: it must be 0, or at least "
            f"{_LEAST:g} and at most {most:g}"
        )
    if about.is_rate and not value:
        raise RequestError(f"{place} is {value!r}; it must be above 0")
    return float(value)


def checked_time(name: str, value: object) -> float:
    """Check a time that is not a column."""
    return _number(name, value, Column(Per.ALL), _MOST)


def _check_length(name: str, entries: Sequence[float], n: int, what: str) -> None:
    if len(entries) != n:
        raise RequestError(
            f"{name} has {len(entries)} entries for {n} {what}; give one number, or "
            "one for each"
        )


def listed(value: Any) -> Any:
    """Return an array as lists, a number of numpy as Python's, others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def whole_number(name: str, value: Any) -> int:
    """Return a whole number, of numpy too, as Python's.

    Raises:
        RequestError: it is none.
    """
    number = listed(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise RequestError(f"{name} is {value!r:.60}; give a whole number, such as 4")
    return number


def spread(
    table: Any, name: str, placement: Placement, default: float = 0.0
) -> tuple[float, ...]:
    """Return the entries of a column on a placement, one for each unit (``per``).

    A number per row is that of a stage, of which every chunk has its share. An edge
    within a stage takes no time. A column per link has the entry of the link that each
    edge uses. The default means None.
    """
    value, per = getattr(table, name), columns_of(type(table))[name].per
    value = default if value is None else value
    if per is Per.LINK:
        return _on_links(name, value, placement)
    n, what = {
        Per.ROW: (placement.n_chunks, "chunks"),
        Per.EDGE: (placement.n_chunks - 1, "edges between chunks"),
        Per.STAGE: (placement.n_stages, "stages"),
    }[per]
    if not isinstance(value, tuple):
        if per is Per.ROW:
            return tuple(value / n for n in placement.n_siblings)
        value = (value,) * n
    _check_length(name, value, n, what)
    if per is Per.EDGE:
        edges = zip(value, pairwise(placement.stage_of), strict=True)
        value = tuple(time if a != b else 0.0 for time, (a, b) in edges)
    return tuple(value)


def _on_links(name: str, value: PerRow, placement: Placement) -> tuple[float, ...]:
    """Return the entry of the link that each edge uses."""
    edges = list(pairwise(placement.stage_of))
    if not isinstance(value, tuple) or len(set(value)) == 1:
        # Equal links may have been measured on another number of stages.
        return (value[0] if isinstance(value, tuple) else value,) * len(edges)
    p, entries = placement.n_stages, []
    for edge in edges:
        near, far = min(edge), max(edge)
        link = {0: 0, 1: near, p - 1: far}.get(far - near) if p > 2 else 0
        if link is None or link >= len(value) or not p - 1 <= len(value) <= p:
            raise RequestError(
                f"{name} has {len(value)} entries, and none for the link of stages "
                f"{edge[0]} and {edge[1]}; give one number, or one for each of the {p} "
                f"links, of which the last joins stages {p - 1} and 0"
            )
        entries.append(value[link])
    return tuple(entries)
