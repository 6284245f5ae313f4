"""The words of a command line, checked before tyro parses them.

tyro tells a wrong word in a box of up to 30 lines, in the names of Python's types. Here
it is one line that names the mend. What is right is handed on in its long spelling:

    zbpp plan ZBV -p 4 -m 8 -o plan.json
    zbpp plan --pipeline_schedule_mode ZBV --stages 4 --microbatches 8 --out plan.json
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from zbpp.core import RequestError, parse_memory
from zbpp.training.options import MemoryText

__all__ = ["SHORT", "command_named", "long_words"]

SHORT = {
    "-p": "--stages",
    "-m": "--microbatches",
    "-o": "--out",
    "--mode": "--pipeline_schedule_mode",
}
_SCHEDULES = ("schedule", "pipeline_schedule_mode", "modes")
"""Fields that name schedules: a bare word is the first of them that a command has."""
_METAVARS = {Path: "PATH", int: "INT", float: "FLOAT", str: "TEXT"}


def command_named(word: str, commands: Mapping[str, type]) -> type:
    """Find the command that a command line begins with.

    Raises:
        RequestError: there is none of this name.
    """
    if word in commands:
        return commands[word]
    names = ", ".join(commands)
    if word.startswith("-"):
        raise RequestError(f"{word} stands before the command; begin with one: {names}")
    raise RequestError(
        f"{word} is not a command; {_nearest(word, commands) or f'choose {names}'}"
    )


def long_words(name: str, command: type, words: Sequence[str]) -> list[str]:
    """Check the words after the command's name, and spell them out for tyro.

    Args:
        name: of the command.
        command: its dataclass, whose fields are the flags.
        words: what follows the name.

    Raises:
        RequestError: a word is wrong, or one is missing.
    """
    if {"-h", "--help"} & set(words):
        return list(words)
    hints = get_type_hints(command, include_extras=True)
    hints = {field.name: hints[field.name] for field in fields(command)}
    given: dict[str, list[str]] = {}
    bare: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not _is_flag(word):
            bare.append(word)
            continue
        flag, equals, value = word.partition("=")
        field, spelled = _field_of(name, flag, hints)
        kinds = _kinds(hints[field])
        if equals:
            rest.appendleft(value)
        if bool in kinds:
            if equals:
                raise RequestError(f"{flag} takes no value; leave ={value} out")
            given[field] = [spelled]
            continue
        values = [rest.popleft()] if rest and (equals or not _is_flag(rest[0])) else []
        while tuple in kinds and rest and not _is_flag(rest[0]):
            values.append(rest.popleft())
        if not values:
            raise RequestError(f"{flag} needs a value: {flag} {_metavar(kinds)}")
        for value in values:
            _check(flag, value, hints[field], kinds)
        given[field] = [spelled, *values]
    given |= _bare_words(name, bare, hints, given)
    _check_complete(name, command, given, hints)
    return [word for words_of_flag in given.values() for word in words_of_flag]


def _is_flag(word: str) -> bool:
    """True of what begins with a hyphen and is no negative number."""
    return word.startswith("-") and word != "-" and not _is_number(word, float)


def _is_number(word: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _field_of(name: str, flag: str, hints: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field that a flag sets, and the flag in full."""
    spelled = SHORT.get(flag, flag).removeprefix("--").replace("-", "_")
    spellings = {field: field for field in hints}
    for field, hint in hints.items():
        if bool in _kinds(hint) and tyro.conf.FlagCreatePairsOff not in get_args(hint):
            spellings[f"no_{field}"] = field
    if spelled in spellings and not (flag.startswith("-") and flag == spelled):
        return spellings[spelled], f"--{spelled}"
    near = _nearest(spelled, spellings, before="--")
    raise RequestError(
        f"{flag} is not a flag of zbpp {name}; "
        f"{near or f'zbpp {name} --help lists its flags'}"
    )


def _nearest(word: str, names: Iterable[str], before: str = "") -> str:
    near = get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {before}{near[0]}?" if near else ""


def _kinds(hint: Any) -> set[Any]:
    """The types that a value may have; of a tuple also those of its entries."""
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(plain) in (Union, UnionType):
        return {kind for part in get_args(plain) for kind in _kinds(part)}
    if get_origin(plain) is tuple:
        return {tuple, *get_args(plain)}
    return {plain}


def _metavar(kinds: set[Any]) -> str:
    return next((_METAVARS[kind] for kind in _METAVARS if kind in kinds), "TEXT")


def _check(flag: str, word: str, hint: Any, kinds: set[Any]) -> None:
    """Check one value."""
    choices = [
        str(one) for k in kinds if get_origin(k) is Literal for one in get_args(k)
    ]
    if choices and word not in choices:
        raise RequestError(f"{flag} is {word!r}; choose {', '.join(choices)}")
    if hint == MemoryText:
        try:
            parse_memory(word)
        except RequestError as error:
            raise RequestError(f"{flag}: {error}") from None
    elif NoneType in kinds and word == "None":
        return
    elif int in kinds and not _is_number(word, int):
        raise RequestError(f"{flag} is {word!r}; give a whole number, such as 4")
    elif float in kinds and not _is_number(word, float):
        raise RequestError(f"{flag} is {word!r}; give a number, such as 1.5")
    elif Path in kinds and not word:
        raise RequestError(f"{flag} is empty; give a path")


def _bare_words(
    name: str,
    bare: Sequence[str],
    hints: Mapping[str, Any],
    given: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Hand bare words to the field that names schedules."""
    if not bare:
        return {}
    field = next((field for field in _SCHEDULES if field in hints), None)
    if field is None:
        raise RequestError(
            f"{bare[0]!r} is one word too many: zbpp {name} takes flags only, "
            f"and zbpp {name} --help lists them"
        )
    if field in given:
        raise RequestError(
            f"two schedules are named, {bare[0]} and {given[field][-1]}; give one"
        )
    if field == "modes":
        is_tuple = tuple in _kinds(hints[field])
        return {field: ["--modes", *(bare if is_tuple else [",".join(bare)])]}
    if len(bare) > 1:
        raise RequestError(
            f"{bare[1]!r} is one word too many, after {bare[0]!r}: a value belongs to "
            "a flag, and several schedules are joined by commas, in zbpp plot and trace"
        )
    return {field: [bare[0]] if field == "schedule" else [f"--{field}", bare[0]]}


def _check_complete(
    name: str, command: type, given: Mapping[str, Any], hints: Mapping[str, Any]
) -> None:
    for field in fields(command):
        if field.default is not MISSING or field.name in given:
            continue
        if field.name in _SCHEDULES:
            raise RequestError(
                f"no schedule is named; give zbpp {name} a mode, such as ZBV, or a file"
            )
        metavar = _metavar(_kinds(hints[field.name]))
        raise RequestError(
            f"zbpp {name} needs --{field.name}: --{field.name} {metavar}"
        )
