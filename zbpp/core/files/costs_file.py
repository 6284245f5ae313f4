"""Costs files: times and memories of passes."""

import json
from pathlib import Path
from typing import Any

from zbpp.core.costs import Costs, MemoryModel
from zbpp.core.errors import RequestError
from zbpp.core.files.json_text import (
    booleans,
    fail,
    memories,
    numbers,
    object_of,
    read,
    refuse_unknown,
    unit_of,
)

__all__ = ["costs_data", "parse_costs", "read_costs", "write_costs"]

_TIME_KEYS = ("f", "b", "w", "comm", "optimizer")
_MEMORY_KEYS = {"m_b": "m_b", "m_w": "m_w", "memory_limit": "limit"}
_LATER_MEMORY_KEYS = (
    *("m_fixed", "peak_f", "peak_b", "peak_w", "peak_bw", "peak_o", "m_r"),
)
_ONE_NUMBER = ("loss", "reduction", "validation")
_LATER_KEYS = (*_ONE_NUMBER, "splits", "all_gather", "reduce_scatter", "send_occupies")
"""Written only where they say something."""
_UNIT_KEY = "memory_unit"
_DEFAULTS, _NO_LIMIT = Costs(), MemoryModel()


def write_costs(costs: Costs, memory: MemoryModel, path: str | Path) -> None:
    """Write a costs file, in the form that `parse_costs` reads."""
    text = json.dumps(costs_data(costs, memory)) + "\n"
    Path(path).write_text(text, encoding="utf-8")


def costs_data(costs: Costs, memory: MemoryModel) -> dict[str, object]:
    """The object of a costs file."""
    data: dict[str, object] = {key: getattr(costs, key) for key in _TIME_KEYS}
    for key in _LATER_KEYS:
        value = getattr(costs, key)
        if value != getattr(_DEFAULTS, key):
            data[key] = value
    for key, field in _MEMORY_KEYS.items():
        value = getattr(memory, field)
        if value is not None:
            data[key] = value
    for key in _LATER_MEMORY_KEYS:
        value = getattr(memory, key)
        if value != getattr(_NO_LIMIT, key):
            data[key] = value
    if memory.memory_unit is not None:
        data[_UNIT_KEY] = memory.memory_unit
    return data


def read_costs(path: str | Path) -> tuple[Costs, MemoryModel]:
    """Read a costs file; keys that are left out take their defaults.

    Raises:
        RequestError: the file cannot be read or holds no valid costs.
    """
    return parse_costs(read(path), source=str(path))


def parse_costs(text: str, *, source: str = "costs") -> tuple[Costs, MemoryModel]:
    """Read costs from JSON text; ``source`` names it in errors.

    ============  =======================================================  =======
    key           value: a number for a whole stage, or a list             default
    ============  =======================================================  =======
    f, b, w       time of a pass; list: per stage or per chunk             1
    optimizer     time of an optimizer step; list: per stage or chunk      0
    comm          time of a message; list: per link (`zbpp.core.costs.links`)    0
    send_occupies    part of it in which the sender computes nothing; likewise   0
    loss          time of the loss, on top of the last chunk's f; no list  0
    reduction     time of the sum of all stages' gradient norms; no list   by comm
    validation    time of a validation (V) of the last step; no list       0
    splits        list per stage: can its backward be split?               all can
    all_gather    time of an UNSHARD; list: per stage or per chunk         0
    reduce_scatter   time of a REDUCE_GRAD; list likewise                  0
    m_b, m_w      memory that F leaves, and B in its place                 1, 0.5
    memory_limit  list: per stage; null: none                              none
    m_fixed       memory that is there all the time                        0
    peak_f        most memory inside F above what is held before it        m_b
    peak_b        the same of B                                            m_w - m_b
    peak_w        the same of W                                            0
    peak_bw       the same of BW                                           B, then W
    peak_o        the same of an optimizer step                            0
    m_r           memory that F leaves of a chunk that is recomputed       none is
    ============  =======================================================  =======

    Memories have any one unit, or are texts such as "40GiB", in bytes, or numbers of
    them: then ``memory_unit`` is "bytes". The model is drawn
    in `zbpp.core.costs.memory_model`.

    Raises:
        RequestError: the text holds no valid costs.
    """
    data = object_of(text, source)
    memory_keys = {**_MEMORY_KEYS, **{key: key for key in _LATER_MEMORY_KEYS}}
    refuse_unknown(source, data, (*_TIME_KEYS, *memory_keys, *_LATER_KEYS, _UNIT_KEY))
    unit = data.get(_UNIT_KEY)
    values: dict[str, Any] = {
        key: (memories if key in memory_keys else numbers)(source, key, value)
        for key, value in data.items()
        if key not in ("splits", _UNIT_KEY)
        and not (key == "memory_limit" and value is None)
    }
    for key in _ONE_NUMBER:
        if isinstance(values.get(key), tuple):
            fail(source, f"{key} is a list; it must be one number")
    if "splits" in data:
        values["splits"] = booleans(source, "splits", data["splits"])
    try:
        times = (*_TIME_KEYS, *_LATER_KEYS)
        costs = Costs(**{key: values[key] for key in times if key in values})
        memory = MemoryModel(
            **{
                field: values[key]
                for key, field in memory_keys.items()
                if key in values
            },
            memory_unit=unit_of(unit, values, set(memory_keys) - {"memory_limit"}),
        )
    except RequestError as error:
        fail(source, str(error))
    return costs, memory
