"""Several values in one flag, and the words of a command."""

import shlex
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from zbpp.planning import is_file

__all__ = ["command_text", "command_words", "paths_in", "schedules_in"]

_BARE = "pipeline_schedule_mode"


def schedules_in(text: str) -> list[str]:
    """Split ``1F1B,ZBV,plan.json``; a file whose name has a comma is one.

    >>> schedules_in("1F1B,ZBV")
    ['1F1B', 'ZBV']
    """
    if is_file(text) and Path(text).is_file():
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()] or [text]


def paths_in(path: Path | None) -> list[Path | None]:
    """Split ``a.json,b.json``; a file whose name has a comma is one."""
    if path is None or path.is_file():
        return [path]
    return [Path(part) for part in str(path).split(",") if part] or [path]


def command_text(command: object) -> str:
    """Write the flags that a command was given: what repeats it.

    >>> from zbpp.cli.pictures.compare import Compare
    >>> command_text(Compare(stages=4, microbatches=8, effort="fast"))
    'zbpp compare --stages 4 --microbatches 8 --effort fast'
    """
    return shlex.join(["zbpp", *command_words(command)])


def command_words(command: object) -> list[str]:
    """The words behind ``zbpp`` that repeat a command."""
    assert is_dataclass(command)
    words = [type(command).__name__.lower()]
    for field in fields(command):
        value = getattr(command, field.name)
        if value == _default(field):
            continue
        if field.name == _BARE:
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(f"--{'' if value else 'no_'}{field.name}")
        else:
            words += [f"--{field.name}", _number(value)]
    return words


def _default(field: Field[Any]) -> object:
    return None if field.default is MISSING else field.default


def _number(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    gib = value / 2**30
    if gib < 1:
        return repr(value)
    return f"{repr(gib).removesuffix('.0')}GiB"
