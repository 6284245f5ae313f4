"""Schedule and costs files: JSON in the formats that other tools read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

from zbpp.core.costs import Costs, MemoryModel, PerChunk
from zbpp.core.errors import RequestError
from zbpp.core.jobs import Job
from zbpp.core.placement import Placement
from zbpp.core.schedule import Schedule
from zbpp.core.text import parse_job
from zbpp.core.validation import mistake

__all__ = [
    "parse_costs",
    "parse_schedule",
    "read_costs",
    "read_schedule",
    "schedule_text",
    "write_costs",
    "write_schedule",
]

_FORMAT = "zbpp-schedule"
_VERSION = 1
_SCHEDULE_KEYS = (
    "format",
    "version",
    "mode",
    "n_stages",
    "n_microbatches",
    "placement",
    "jobs",
)
_TIME_KEYS = ("f", "b", "w", "comm", "optimizer")
_MEMORY_KEYS = {"m_b": "m_b", "m_w": "m_w", "memory_limit": "limit"}
_ONE_NUMBER = ("loss", "reduction", "validation")
_LATER_KEYS = (*_ONE_NUMBER, "splits")  # written only where they say something
_DEFAULTS = Costs()


def schedule_text(schedule: Schedule) -> str:
    """Write a schedule as JSON, one line a stage."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "mode": schedule.name,
        "n_stages": schedule.n_stages,
        "n_microbatches": schedule.n_microbatches,
        "placement": list(schedule.placement.stage_of),
    }
    rows = ",\n  ".join(
        json.dumps([str(job) for job in order]) for order in schedule.orders
    )
    return f'{json.dumps(head)[:-1]}, "jobs": [\n  {rows}\n]}}\n'


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule file."""
    Path(path).write_text(schedule_text(schedule), encoding="utf-8")


def read_schedule(path: str | Path, *, memory: MemoryModel | None = None) -> Schedule:
    """Read a schedule file and validate it.

    Raises:
        RequestError: the file cannot be read or holds no valid schedule.
    """
    return parse_schedule(_read(path), source=str(path), memory=memory)


def parse_schedule(
    text: str, *, source: str = "schedule", memory: MemoryModel | None = None
) -> Schedule:
    """Read a schedule from JSON text; ``source`` names it in errors.

    Raises:
        RequestError: the text holds no valid schedule.
    """
    data = _object(text, source)
    for key in _SCHEDULE_KEYS:
        if key not in data:
            _fail(source, f"the key {key!r} is missing")
    _refuse_unknown(source, data, _SCHEDULE_KEYS)
    if data["format"] != _FORMAT or data["version"] != _VERSION:
        _fail(
            source,
            f"format {data['format']!r} version {data['version']!r} is not "
            f"{_FORMAT!r} version {_VERSION}",
        )
    if not isinstance(data["mode"], str):
        _fail(source, f"mode is {data['mode']!r}, not a text")
    n_stages = _integer(source, "n_stages", data["n_stages"])
    n_microbatches = _integer(source, "n_microbatches", data["n_microbatches"])
    if not isinstance(data["placement"], list):
        _fail(source, "placement is not a list of stages, one per chunk")
    stage_of = tuple(
        _integer(source, f"placement[{chunk}]", stage)
        for chunk, stage in enumerate(data["placement"])
    )
    try:
        placement = Placement(stage_of)
        if placement.n_stages != n_stages:
            _fail(
                source,
                f"n_stages is {n_stages}, but the placement names "
                f"{placement.n_stages} stages",
            )
        orders = _parse_rows(source, data["jobs"])
        return Schedule(data["mode"], placement, n_microbatches, orders, memory)
    except RequestError as error:
        if str(error).startswith(source):
            raise
        raise type(error)(f"{source}: {error}") from None


def _parse_rows(source: str, rows: object) -> tuple[tuple[Job, ...], ...]:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        _fail(source, "jobs is not a list of rows, one per stage")
    orders = []
    for stage, row in enumerate(rows):
        order = []
        for column, cell in enumerate(row):
            try:
                order.append(parse_job(cell, stage=stage))
            except RequestError as error:
                raise mistake(rows, stage, column, str(error)) from None
        orders.append(tuple(order))
    return tuple(orders)


def write_costs(costs: Costs, memory: MemoryModel, path: str | Path) -> None:
    """Write a costs file, in the form that `parse_costs` reads."""
    data: dict[str, object] = {key: getattr(costs, key) for key in _TIME_KEYS}
    for key in _LATER_KEYS:
        value = getattr(costs, key)
        if value != getattr(_DEFAULTS, key):
            data[key] = value
    for key, field in _MEMORY_KEYS.items():
        value = getattr(memory, field)
        if value is not None:
            data[key] = value
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")


def read_costs(path: str | Path) -> tuple[Costs, MemoryModel]:
    """Read a costs file; keys that are left out take their defaults.

    Raises:
        RequestError: the file cannot be read or holds no valid costs.
    """
    return parse_costs(_read(path), source=str(path))


def parse_costs(text: str, *, source: str = "costs") -> tuple[Costs, MemoryModel]:
    """Read costs from JSON text; ``source`` names it in errors.

    ============  =======================================================  =======
    key           value: a number for a whole stage, or a list             default
    ============  =======================================================  =======
    f, b, w       time of a pass; list: per stage or per chunk             1
    optimizer     time of an optimizer step; list: per stage or chunk      0
    comm          time of a message; list: per link (`zbpp.core.links`)    0
    loss          time of the loss, on top of the last chunk's f; no list  0
    reduction     time of the sum of all stages' gradient norms; no list   by comm
    validation    time of a validation (V) of the last step; no list       0
    splits        list per stage: can its backward be split?               all can
    m_b, m_w      memory from F to B, and of it to W; list: stage, chunk   1, 0.5
    memory_limit  list: per stage; null: none                              none
    ============  =======================================================  =======

    Raises:
        RequestError: the text holds no valid costs.
    """
    data = _object(text, source)
    _refuse_unknown(source, data, (*_TIME_KEYS, *_MEMORY_KEYS, *_LATER_KEYS))
    values: dict[str, Any] = {
        key: _numbers(source, key, value)
        for key, value in data.items()
        if key != "splits" and not (key == "memory_limit" and value is None)
    }
    for key in _ONE_NUMBER:
        if isinstance(values.get(key), tuple):
            _fail(source, f"{key} is a list; it must be one number")
    if "splits" in data:
        values["splits"] = _booleans(source, "splits", data["splits"])
    try:
        times = (*_TIME_KEYS, *_LATER_KEYS)
        costs = Costs(**{key: values[key] for key in times if key in values})
        memory = MemoryModel(
            **{
                field: values[key]
                for key, field in _MEMORY_KEYS.items()
                if key in values
            }
        )
    except RequestError as error:
        _fail(source, str(error))
    return costs, memory


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


def _object(text: str, source: str) -> Mapping[str, Any]:
    def refuse(name: str) -> Never:
        _fail(source, f"{name} is not a number that JSON knows")

    try:
        data = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        _fail(
            source, f"line {error.lineno}, column {error.colno}: no JSON: {error.msg}"
        )
    except (ValueError, RecursionError) as error:  # a huge number, or nested too deep
        _fail(source, f"no usable JSON: {error}")
    if not isinstance(data, dict):
        _fail(source, "the file must hold one JSON object")
    return data


def _refuse_unknown(
    source: str, data: Mapping[str, Any], known: tuple[str, ...]
) -> None:
    for key in data:
        if key not in known:
            _fail(source, f"unknown key {key!r}; the keys are {', '.join(known)}")


def _integer(source: str, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _fail(source, f"{name} is {value!r}, not a whole number from 0 on")
    return value


def _numbers(source: str, name: str, value: object) -> PerChunk:
    if isinstance(value, list) and value:
        return tuple(_number(source, f"{name}[{i}]", v) for i, v in enumerate(value))
    return _number(source, name, value)


def _booleans(source: str, name: str, value: object) -> tuple[bool, ...]:
    if not isinstance(value, list) or not all(isinstance(one, bool) for one in value):
        _fail(source, f"{name} is {value!r}, not a list of true or false, one a stage")
    return tuple(value)


def _number(source: str, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        _fail(source, f"{name} is {value!r}, not a number")
    return value


def _fail(source: str, reason: str) -> Never:
    raise RequestError(f"{source}: {reason}")
