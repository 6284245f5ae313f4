"""Schedule files: one row of jobs a stage, and one of parts where passes have them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zbpp.core.costs.table import Costs
from zbpp.core.errors import RequestError
from zbpp.core.files.costs_file import refuse_other_kind
from zbpp.core.files.json_text import decode, object_of, read, write_file
from zbpp.core.jobs import Job
from zbpp.core.placement import Placement
from zbpp.core.schedule import Schedule
from zbpp.core.text import mistake, parse_job
from zbpp.core.validation import Recompute


@dataclass(frozen=True)
class _File:
    """The keys of a schedule file, with the types of their values."""

    format: Literal["zbpp-schedule"]
    version: Literal[1]
    mode: str
    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    jobs: list[Any]
    split: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    parts: list[Any] | None = None


def schedule_text(schedule: Schedule) -> str:
    """Write a schedule as JSON, one line a stage."""
    head: dict[str, object] = {
        "format": "zbpp-schedule",
        "version": 1,
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
    write_file(path, schedule_text(schedule))


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
    file: _File = decode(_File, data, source)
    try:
        placement = Placement(file.placement)
        if placement.n_stages != file.n_stages:
            raise RequestError(
                f"n_stages is {file.n_stages}, but the placement names "
                f"{placement.n_stages} stages"
            )
        return Schedule(
            file.mode,
            placement,
            file.n_microbatches,
            _parse_rows("jobs", file.jobs),
            costs,
            split=file.split,
            recompute=file.recompute,
            parts=None if file.parts is None else _parse_rows("parts", file.parts),
        )
    except RequestError as error:
        raise type(error)(f"{source}: {error}") from None


def _parse_rows(name: str, rows: list[Any]) -> tuple[tuple[Job, ...], ...]:
    if not all(isinstance(row, list) for row in rows):
        raise RequestError(f"{name} is not a list of rows, one per stage")
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
