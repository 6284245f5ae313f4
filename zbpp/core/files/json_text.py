"""Text in files, and JSON in it: reading it, and saying what is wrong with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Never, Union, get_args, get_origin, get_type_hints

from zbpp.core.errors import RequestError

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
        fail(source, "the file must hold one JSON object")
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
    """Say what is wrong, and where."""
    raise RequestError(f"{source}: {reason}")
