"""Files in JSON that other tools read: schedules, costs of chunks, costs of layers.

A schedule has a row of jobs for each stage, and one of parts where passes have them.
Costs have a key for each column. An error names the fault and its place.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    Never,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from zbpp.core.costs import Costs
from zbpp.core.errors import RequestError
from zbpp.core.jobs import Job
from zbpp.core.layers import LayerCosts
from zbpp.core.parts import Parts
from zbpp.core.placement import Placement
from zbpp.core.schedule import Recompute, Schedule
from zbpp.core.text import mistake, parse_job

_C = TypeVar("_C", Costs, LayerCosts)
Source = str | Path | Mapping[str, Any]
"""The path of a file, or its JSON object."""
_ALWAYS = ("f", "b", "w", "comm", "optimizer", "m_b", "m_w")
"""Columns of chunks that are written even where they are the default."""
_LONGEST = 2**29
"""Bytes of a text file: a plan of 1024 stages and 4096 micro-batches has a quarter."""


def read(path: str | Path) -> str:
    """Read a text file."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise OSError(f"it is longer than {_LONGEST // 2**20} MiB")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file; text as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None


def object_of(text: str, source: str) -> Mapping[str, Any]:
    """Read one JSON object; ``source`` names the text in errors."""

    def refuse(name: str) -> Never:
        fail(source, f"{name} is not a number that JSON knows")

    try:
        data = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        fail(source, f"line {error.lineno}, column {error.colno}: no JSON: {error.msg}")
    except (ValueError, RecursionError) as error:  # a huge number, or nested too deep
        fail(source, f"no usable JSON: {error}")
    if not isinstance(data, dict):
        fail(source, "the file must contain one JSON object")
    return data


def refuse_unknown(source: str, data: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Refuse keys that are not known."""
    for key in data:
        if key not in keys:
            fail(source, f"unknown key {key!r}; the keys are {', '.join(keys)}")


def decode(kind: Any, value: object, source: str, name: str = "") -> Any:
    """Read a value of JSON as a type of Python; an error names its place.

    Types are bool, int (from 0 on), float, str, list, dict, tuples of one type,
    literals, dataclasses, and unions of these.
    """
    is_union = get_origin(kind) in (Union, UnionType)
    options = get_args(kind) if is_union else (kind,)
    for option in options:
        if not _has_form(option, value):
            continue
        if isinstance(value, list) and get_origin(option) is tuple:
            entry = get_args(option)[0]
            pairs = enumerate(value)
            return tuple(decode(entry, x, source, f"{name}[{i}]") for i, x in pairs)
        if isinstance(value, dict) and is_dataclass(option):
            return _decode_object(option, value, source, name)
        return value
    forms = " or ".join(map(_words, options))
    fail(source, f"{name} is {value!r:.60}, not {forms}")


def _decode_object(kind: Any, data: dict[str, Any], source: str, name: str) -> Any:
    """Read a dataclass from an object with its fields as keys."""
    types = get_type_hints(kind)
    place = f"{source}: {name}" if name else source
    refuse_unknown(place, data, tuple(types))
    for field in fields(kind):
        if field.default is MISSING and field.name not in data:
            fail(place, f"the key {field.name!r} is missing")
    values = {key: decode(types[key], x, place, key) for key, x in data.items()}
    try:
        return kind(**values)
    except RequestError as error:
        fail(source, str(error))


_FORMS = {
    bool: "true or false",
    int: "a whole number from 0 on",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    NoneType: "null",
}


def _form(kind: Any) -> type:
    """The type whose values JSON has for a type."""
    if is_dataclass(kind):
        return dict
    form: type = get_origin(kind) or kind
    return form


def _words(kind: Any) -> str:
    """Name the type of a value in a message."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _FORMS[_form(kind)]


def _has_form(kind: Any, value: object) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind) and not isinstance(value, bool)
    form = _form(kind)
    if isinstance(value, bool) and form is not bool:
        return False
    if isinstance(value, int) and form is int:
        return value >= 0
    accepted = {float: (int, float), tuple: (list,)}.get(form, (form,))
    return isinstance(value, accepted)


def fail(source: str, reason: str) -> Never:
    """Raise the error for a source, with the fault and its place."""
    raise RequestError(f"{source}: {reason}")


# ---- Costs.


def write_costs(costs: Costs | LayerCosts, path: str | Path) -> None:
    """Write a costs file, or a layers file, as `read_costs` and `read_layers` read.

    Raises:
        RequestError: the file cannot be written.
    """
    write_file(path, json.dumps(costs_data(costs)) + "\n")


def costs_data(costs: Costs | LayerCosts) -> dict[str, object]:
    """The object of a costs file: all but defaults."""
    always = _ALWAYS if isinstance(costs, Costs) else ("n_layers",)
    data: dict[str, object] = {
        field.name: getattr(costs, field.name)
        for field in fields(costs)
        if field.name in always or getattr(costs, field.name) != field.default
    }
    if isinstance(costs.parts, tuple):
        data["parts"] = [vars(entry) for entry in costs.parts]
    elif costs.parts is not None:
        data["parts"] = vars(costs.parts)
    return data


def read_costs(source: Source) -> Costs:
    """Read a costs file; keys that are missing, or null, have their defaults.

    The keys are the fields of `Costs`. A number is for a whole stage, a list has
    one entry per chunk (``comm``: per edge between chunks; ``memory_limit``, ``speed``
    and ``splits``: per stage). ``parts`` is an object with ``f``, ``b`` and ``w``,
    lists of pairs such as ``["compute", 1.5]`` and ``["network", 0.5]`` for one layer,
    and with ``layers``: how many a stage has; a list has one object per chunk. Memories
    are numbers of bytes, or of any other unit; a text such as "40GiB" is a number of
    bytes.

    Raises:
        RequestError: the file cannot be read or contains no valid costs.
    """
    return table_of(Costs, *_object(source, "costs"))


def read_layers(source: Source) -> LayerCosts:
    """Read a layers file; keys that are missing, or null, have their defaults.

    The keys are the fields of `LayerCosts`. A number is for every layer, a list has
    one entry each; so has ``parts``, with objects as in a costs file, without
    ``layers``.

    Raises:
        RequestError: the file cannot be read or contains no valid costs.
    """
    return table_of(LayerCosts, *_object(source, "layers"))


def either_of(source: Source) -> Costs | LayerCosts:
    """Read costs of layers, which have the key n_layers, or of chunks."""
    data, name = _object(source, "costs")
    if "n_layers" in data:
        return table_of(LayerCosts, data, name)
    return table_of(Costs, data, name)


def _object(source: Source, name: str) -> tuple[Mapping[str, Any], str]:
    """The object of a source, and its name in errors."""
    if isinstance(source, Mapping):
        return source, name
    return object_of(read(source), str(source)), str(source)


def table_of(table: type[_C], data: Mapping[str, Any], source: str) -> _C:
    """Make costs of the keys that there are; null is as good as nothing."""
    refuse_other_kind(source, data, "costs" if table is Costs else "layers")
    refuse_unknown(source, data, [field.name for field in fields(table)])
    values = {name: value for name, value in data.items() if value is not None}
    if table is LayerCosts and "n_layers" not in values:
        fail(source, "n_layers is missing: the number of layers of the model")
    try:
        if isinstance(parts := values.get("parts"), list):
            values["parts"] = tuple(map(_parts_of, parts))
        elif parts is not None:
            values["parts"] = _parts_of(parts)
        return table(**values)
    except RequestError as error:
        fail(source, str(error))


def _parts_of(entry: object) -> Parts:
    """Read an object with f, b, w and layers."""
    keys = {"f", "b", "w", "layers"}
    if not isinstance(entry, Mapping) or not {"f", "b"} <= set(entry) <= keys:
        raise RequestError(
            f"parts: {entry!r:.60} is no object with the keys f, b, w and layers"
        )
    return Parts(**entry)


def refuse_other_kind(source: str, data: Mapping[str, Any], wanted: str) -> None:
    """Refuse a file of another kind than the wanted one, and name its use."""
    if "format" in data or "jobs" in data:
        kind, how = "schedule", "name it in place of a mode"
    elif "n_layers" in data:
        kind, how = "layers", "give it as --layers"
    elif set(data) & {"f", "b", "w", "m_b", "m_w", "parts"}:
        kind, how = "costs", "give it as --costs (costs= in Python)"
    else:
        return
    if kind != wanted and (kind, wanted) != ("costs", "layers"):
        other = "schedule or plan" if wanted == "schedule" else wanted
        fail(source, f"this is a {kind} file, not a {other} file; {how}")


# ---- Schedules.


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


def parse_schedule(text: str, *, source: str = "schedule") -> Schedule:
    """Read a schedule from JSON text; ``source`` names it in errors.

    Raises:
        RequestError: the text contains no valid schedule.
    """
    return schedule_of(object_of(text, source), source=source)


def schedule_of(data: Mapping[str, Any], *, source: str = "schedule") -> Schedule:
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
