"""Schedule files: one row of jobs a stage, and one of parts where passes have them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zbpp.core.costs import Costs
from zbpp.core.errors import RequestError
from zbpp.core.files.costs_file import refuse_other_kind
from zbpp.core.files.json_text import fail, integer, object_of, read, refuse_unknown
from zbpp.core.jobs import Job
from zbpp.core.placement import Placement
from zbpp.core.schedule import Recompute, Schedule
from zbpp.core.text import parse_job
from zbpp.core.validation import mistake

__all__ = [
    "parse_schedule",
    "read_schedule",
    "schedule_of",
    "schedule_text",
    "write_schedule",
]

_FORMAT, _VERSION = "zbpp-schedule", 1
_SCHEDULE_KEYS = (
    "format",
    "version",
    "mode",
    "n_stages",
    "n_microbatches",
    "placement",
    "jobs",
)
_OPTIONAL_KEYS = ("split", "recompute", "parts")


def schedule_text(schedule: Schedule) -> str:
    """Write a schedule as JSON, one line a stage."""
    head: dict[str, object] = {
        "format": _FORMAT,
        "version": _VERSION,
        "mode": schedule.name,
        "n_stages": schedule.n_stages,
        "n_microbatches": schedule.n_microbatches,
        "placement": list(schedule.placement.stage_of),
    }
    if schedule.split is not None:
        head["split"] = list(schedule.split)
    if schedule.recompute is not None:
        head["recompute"] = schedule.recompute
    text = f'{json.dumps(head)[:-1]}, "jobs": [\n  {_rows_text(schedule.orders)}\n]'
    if schedule.parts is not None:
        text += f', "parts": [\n  {_rows_text(schedule.parts)}\n]'
    return text + "}\n"


def _rows_text(rows: Sequence[Sequence[Job]]) -> str:
    return ",\n  ".join(json.dumps([str(job) for job in row]) for row in rows)


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule file."""
    Path(path).write_text(schedule_text(schedule), encoding="utf-8")


def read_schedule(path: str | Path, *, costs: Costs | None = None) -> Schedule:
    """Read a schedule file and validate it.

    Raises:
        RequestError: the file cannot be read or holds no valid schedule.
    """
    return parse_schedule(read(path), source=str(path), costs=costs)


def parse_schedule(
    text: str, *, source: str = "schedule", costs: Costs | None = None
) -> Schedule:
    """Read a schedule from JSON text; ``source`` names it in errors.

    Raises:
        RequestError: the text holds no valid schedule.
    """
    return schedule_of(object_of(text, source), source=source, costs=costs)


def schedule_of(
    data: Mapping[str, Any], *, source: str = "schedule", costs: Costs | None = None
) -> Schedule:
    """Read a schedule from the object of a schedule file, or of a plan file.

    Raises:
        RequestError: the object is no valid schedule.
    """
    if isinstance(data.get("schedule"), Mapping):
        data = data["schedule"]
    refuse_other_kind(source, data, "schedule")
    for key in _SCHEDULE_KEYS:
        if key not in data:
            fail(source, f"the key {key!r} is missing")
    refuse_unknown(source, data, (*_SCHEDULE_KEYS, *_OPTIONAL_KEYS))
    if data["format"] != _FORMAT or data["version"] != _VERSION:
        fail(
            source,
            f"format {data['format']!r} version {data['version']!r} is not "
            f"{_FORMAT!r} version {_VERSION}",
        )
    if not isinstance(data["mode"], str):
        fail(source, f"mode is {data['mode']!r}, not a text")
    n_stages = integer(source, "n_stages", data["n_stages"])
    n_microbatches = integer(source, "n_microbatches", data["n_microbatches"])
    if not isinstance(data["placement"], list):
        fail(source, "placement is not a list of stages, one per chunk")
    stage_of = tuple(
        integer(source, f"placement[{chunk}]", stage)
        for chunk, stage in enumerate(data["placement"])
    )
    try:
        placement = Placement(stage_of)
        if placement.n_stages != n_stages:
            fail(
                source,
                f"n_stages is {n_stages}, but the placement names "
                f"{placement.n_stages} stages",
            )
        orders = _parse_rows(source, "jobs", data["jobs"])
        return Schedule(
            data["mode"],
            placement,
            n_microbatches,
            orders,
            costs,
            split=_parse_split(source, data.get("split")),
            recompute=_parse_recompute(source, data.get("recompute")),
            parts=_parse_rows(source, "parts", data["parts"])
            if "parts" in data
            else None,
        )
    except RequestError as error:
        if str(error).startswith(source):
            raise
        raise type(error)(f"{source}: {error}") from None


def _parse_rows(source: str, name: str, rows: object) -> tuple[tuple[Job, ...], ...]:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        fail(source, f"{name} is not a list of rows, one per stage")
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


def _parse_split(source: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        fail(source, f"split is {value!r}, not a list of layers, one a chunk")
    return tuple(integer(source, f"split[{c}]", n) for c, n in enumerate(value))


def _parse_recompute(source: str, value: object) -> tuple[Recompute, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        fail(source, f"recompute is {value!r}, not a list with one entry a chunk")
    recompute: list[Recompute] = []
    for chunk, which in enumerate(value):
        name = f"recompute[{chunk}]"
        if isinstance(which, bool):
            recompute.append(which)
        elif isinstance(which, list):
            recompute.append(tuple(integer(source, name, layer) for layer in which))
        else:
            fail(source, f"{name} is {which!r}, not true, false or a list of layers")
    return tuple(recompute)
