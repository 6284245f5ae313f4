"""Text in files, and JSON in it: reading it, and saying what is wrong with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

from zbpp.core.errors import RequestError

__all__ = [
    "fail",
    "integer",
    "number",
    "object_of",
    "read",
    "refuse_unknown",
    "write_file",
]

_LONGEST = 2**29
"""Bytes of a text file: a plan of 1024 stages and 4096 micro-batches has a quarter."""


def read(path: str | Path) -> str:
    """Read a text file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise OSError(f"it is longer than {_LONGEST // 2**20} MiB")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None


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


def object_of(text: str, source: str) -> Mapping[str, Any]:
    """Read one JSON object; ``source`` names the text in errors.

    Raises:
        RequestError: the text is none.
    """

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


def refuse_unknown(source: str, data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse keys that are not known.

    Raises:
        RequestError: it names the key.
    """
    for key in data:
        if key not in keys:
            fail(source, f"unknown key {key!r}; the keys are {', '.join(keys)}")


def integer(source: str, name: str, value: object) -> int:
    """Read a whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        fail(source, f"{name} is {value!r}, not a whole number from 0 on")
    return value


def number(source: str, name: str, value: object) -> float:
    """Read a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        fail(source, f"{name} is {value!r}, not a number")
    return value


def fail(source: str, reason: str) -> Never:
    """Say what is wrong, and where."""
    raise RequestError(f"{source}: {reason}")
