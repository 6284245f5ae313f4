"""Layers files: times and memories of each layer of a model."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from zbpp.core.costs import LayerCosts
from zbpp.core.errors import RequestError
from zbpp.core.files.json_text import (
    fail,
    integer,
    memories,
    numbers,
    object_of,
    read,
    refuse_unknown,
    unit_of,
)

__all__ = ["is_layers_file", "parse_layers", "read_layers", "write_layers"]

_FIELD_OF = {
    {"limit": "memory_limit"}.get(field.name, field.name): field.name
    for field in fields(LayerCosts)
}
_MEMORIES = {
    *("m_b", "m_w", "m_fixed", "m_r", "message", "memory_limit", "parameters"),
    *("peak_f", "peak_b", "peak_w", "peak_o", "peak_r"),
}
_OWN_MEMORIES = _MEMORIES - {"memory_limit", "message"}
_ONE_NUMBER = (
    *("loss", "pass_f", "pass_b", "pass_w", "reduction", "validation"),
    *("replica_bandwidth", "replica_delay"),
)


def write_layers(layers: LayerCosts, path: str | Path) -> None:
    """Write a layers file, in the form that `parse_layers` reads."""
    default = LayerCosts(n_layers=layers.n_layers)
    data = {
        key: getattr(layers, field)
        for key, field in _FIELD_OF.items()
        if field == "n_layers" or getattr(layers, field) != getattr(default, field)
    }
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")


def read_layers(path: str | Path) -> LayerCosts:
    """Read a layers file; keys that are left out take their defaults.

    Raises:
        RequestError: the file cannot be read or holds no valid costs.
    """
    return parse_layers(read(path), source=str(path))


def is_layers_file(path: str | Path) -> bool:
    """True if a file holds costs of layers, not of chunks: it says ``n_layers``.

    Raises:
        RequestError: the file cannot be read or holds no JSON object.
    """
    return "n_layers" in object_of(read(path), str(path))


def parse_layers(text: str, *, source: str = "layers") -> LayerCosts:
    """Read the costs of layers from JSON text; ``source`` names it in errors.

    The keys are the fields of `LayerCosts`, and ``memory_limit``. A number stands for
    every layer, a list has one entry each. Without ``n_layers`` it is the length of the
    longest list.

    Raises:
        RequestError: the text holds no valid costs.
    """
    data = object_of(text, source)
    refuse_unknown(source, data, tuple(_FIELD_OF))
    values: dict[str, Any] = {
        _FIELD_OF[key]: (memories if key in _MEMORIES else numbers)(source, key, value)
        for key, value in data.items()
        if value is not None and key not in ("n_layers", "memory_unit")
    }
    for key in _ONE_NUMBER:
        if isinstance(values.get(key), tuple):
            fail(source, f"{key} is a list; it must be one number")
    if "n_layers" in data:
        n_layers = integer(source, "n_layers", data["n_layers"])
    else:
        lists = [len(value) for value in values.values() if isinstance(value, tuple)]
        if not lists:
            fail(source, "n_layers is missing, and there is no list to tell it by")
        n_layers = max(lists)
    try:
        return LayerCosts(
            n_layers=n_layers,
            memory_unit=unit_of(data.get("memory_unit"), values, _OWN_MEMORIES),
            **values,
        )
    except RequestError as error:
        fail(source, str(error))
