"""Costs files, per chunk or per layer: a key for each column of the costs."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from zbpp.core.costs.layers import LayerCosts
from zbpp.core.costs.parts import Parts
from zbpp.core.costs.table import Costs
from zbpp.core.errors import RequestError
from zbpp.core.files.json_text import (
    fail,
    object_of,
    read,
    refuse_unknown,
    write_file,
)

_C = TypeVar("_C", Costs, LayerCosts)
_ALWAYS = ("f", "b", "w", "comm", "optimizer", "m_b", "m_w")
"""Columns of chunks that are written even where they are the default."""


def write_costs(costs: Costs | LayerCosts, path: str | Path) -> None:
    """Write a costs file, or a layers file, as `parse_costs` and `parse_layers` read.

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


def read_costs(path: str | Path) -> Costs:
    """Read a costs file; keys that are left out take their defaults.

    Raises:
        RequestError: the file cannot be read or holds no valid costs.
    """
    return parse_costs(read(path), source=str(path))


def read_layers(path: str | Path) -> LayerCosts:
    """Read a layers file; keys that are left out take their defaults.

    Raises:
        RequestError: the file cannot be read or holds no valid costs.
    """
    return parse_layers(read(path), source=str(path))


def parse_costs(text: str, *, source: str = "costs") -> Costs:
    """Read costs from JSON text; ``source`` names it in errors.

    The keys are the fields of `Costs`; what is left out, or null, has its default. A
    number stands for a whole stage, a list has one entry per chunk (``comm``: per
    edge between chunks; ``memory_limit``, ``speed`` and
    ``splits``: per stage). ``parts`` is an object with ``f``, ``b`` and ``w``, lists of
    pairs such as ``["compute", 1.5]`` and ``["network", 0.5]`` for one layer, and with
    ``layers``: how many a stage has; a list has one object per chunk. Memories are
    numbers of bytes, or of any other unit; a text such as "40GiB" is a number of bytes.

    Raises:
        RequestError: the text holds no valid costs.
    """
    return table_of(Costs, object_of(text, source), source)


def parse_layers(text: str, *, source: str = "layers") -> LayerCosts:
    """Read the costs of layers from JSON text; ``source`` names it in errors.

    The keys are the fields of `LayerCosts`. A number stands for every layer, a list has
    one entry each; so has ``parts``, with objects as in a costs file, without
    ``layers``.

    Raises:
        RequestError: the text holds no valid costs.
    """
    return table_of(LayerCosts, object_of(text, source), source)


def either_of(value: Mapping[str, Any] | str | Path) -> Costs | LayerCosts:
    """Read costs of layers, which have the key n_layers, or of chunks: a file's."""
    source = "costs" if isinstance(value, Mapping) else str(value)
    data = value if isinstance(value, Mapping) else object_of(read(value), source)
    if "n_layers" in data:
        return table_of(LayerCosts, data, source)
    return table_of(Costs, data, source)


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
        kind, how = "schedule", "name it where a mode stands"
    elif "n_layers" in data:
        kind, how = "layers", "give it as --layers"
    elif set(data) & {"f", "b", "w", "m_b", "m_w", "parts"}:
        kind, how = "costs", "give it as --costs (costs= in Python)"
    else:
        return
    if kind != wanted and (kind, wanted) != ("costs", "layers"):
        other = "schedule or plan" if wanted == "schedule" else wanted
        fail(source, f"this is a {kind} file, not a {other} file; {how}")
