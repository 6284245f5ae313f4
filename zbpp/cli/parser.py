"""From the words of a command line to a command: argparse over a dataclass's fields.

    zbpp plan ZBV -p 4 -m 8 -o plan.json
    zbpp plan --pipeline_schedule_mode ZBV --stages 4 --microbatches 8 --out plan.json

Flags may be written with hyphens or underscores. A bare word names a schedule. Lists
have commas or spaces. What is wrong is told in one line that names the mend.
"""

import argparse
import tomllib
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from zbpp.core import RequestError, parse_memory
from zbpp.training.options import Memory

__all__ = ["SHORT", "command_named", "help_text", "parse"]

SHORT = {"stages": "-p", "microbatches": "-m", "out": "-o"}
C = TypeVar("C")
_SCHEDULES = ("schedule", "pipeline_schedule_mode", "modes")
"""Fields that name schedules: a bare word is the first of them that a command has."""
_METAVARS = {Path: "PATH", int: "INT", float: "FLOAT", str: "TEXT"}
_COLUMN = 32  # of the help texts


def command_named(word: str, commands: Mapping[str, Any]) -> str:
    """Find the command that a command line begins with.

    Raises:
        RequestError: there is none of this name.
    """
    if word in commands:
        return word
    names = ", ".join(commands)
    if word.startswith("-"):
        raise RequestError(f"{word} stands before the command; begin with one: {names}")
    raise RequestError(
        f"{word} is not a command; {_nearest(word, commands) or f'choose {names}'}"
    )


def parse(name: str, command: type[C], words: Sequence[str]) -> C:
    """Make a command of the words after its name.

    Raises:
        RequestError: a word is wrong, or one is missing.
    """
    flags = {field.name: field for field in fields(command)}  # type: ignore[arg-type]
    hints = get_type_hints(command, include_extras=True)
    parser = _parser(name, command)
    given: dict[str, Any] = {}
    words = [_underscored(word) for word in words]
    if "config" in flags:
        words = _with_config(words)
    try:
        found, rest = parser.parse_known_args(_with_bare_values(words, flags))
    except argparse.ArgumentError as error:
        raise RequestError(_told(error, parser)) from None
    for field, value in vars(found).items():
        given[field] = (
            _joined(value, hints[field]) if flags[field].metadata["many"] else value
        )
    unknown = [word for word in rest if word.startswith("-") and word != "-"]
    if unknown:
        word = unknown[0].partition("=")[0]
        known = [o for o in parser._option_string_actions if o.startswith("--")]
        near = _nearest(f"--{word.lstrip('-')}", known)
        raise RequestError(
            f"{word} is not a flag of zbpp {name}; "
            f"{near or f'zbpp {name} --help lists its flags'}"
        )
    given |= _bare_words(name, rest, flags, given)
    for one in flags.values():
        if one.default is MISSING and one.name not in given:
            raise RequestError(_missing(name, one, hints[one.name]))
    return command(**given)


def _underscored(word: str) -> str:
    """Write a flag with underscores."""
    if not word.startswith("--"):
        return word
    spelled, equals, value = word[2:].partition("=")
    return f"--{spelled.replace('-', '_')}{equals}{value}"


def _with_config(words: list[str]) -> list[str]:
    """Put the flags of ``--config run.toml`` in front: what is typed overrules them.

    Tables are headings that group the flags.

    Raises:
        RequestError: the file is none.
    """
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config", nargs="?")
    found, _ = reader.parse_known_args(words)
    if found.config is None:
        return words
    try:
        data = tomllib.loads(Path(found.config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"--config {found.config}: cannot be read: {reason}"
        ) from None
    return [*_words_of(data), *words]


def _words_of(data: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for key, value in data.items():
        name = _underscored(f"--{key}")
        match value:
            case dict():
                words += _words_of(value)
            case True:
                words.append(name)
            case False:
                words.append(f"--no_{name[2:]}")
            case list():
                words.append(f"{name}={','.join(map(str, value))}")
            case _:
                words.append(f"{name}={value}")
    return words


def _with_bare_values(
    words: Sequence[str], flags: Mapping[str, Field[Any]]
) -> list[str]:
    """Give flags that may stand without a value their value."""
    bare = {
        f"--{n}": f.metadata["bare"] for n, f in flags.items() if f.metadata["bare"]
    }
    spelled: list[str] = []
    for word, following in pairwise([*words, ""]):
        if word in bare and following not in ("off", bare[word]):
            spelled.append(f"{word}={bare[word]}")
        elif f"--{word.removeprefix('--no_')}" in bare:
            spelled.append(f"--{word.removeprefix('--no_')}=off")
        else:
            spelled.append(word)
    return spelled


class _Help(argparse.HelpFormatter):
    """Flags of a pair in one spelling, and no lines for short ones."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_COLUMN)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [option for option in action.option_strings if option[1] != "-"]
        shown.append(next(o for o in action.option_strings if o[:2] == "--"))
        if getattr(action, "has_pair", False):
            shown[-1] = f"--[no_]{shown[-1][2:]}"
        value = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(shown) + value


def _parser(name: str, command: type) -> argparse.ArgumentParser:
    """Build the parser of a command; nothing is set that was not given."""
    about = (command.__doc__ or "").partition("\n\n    Raises:")[0]
    parser = argparse.ArgumentParser(
        prog=f"zbpp {name}",
        usage=f"zbpp {name} [flags]",
        description=" ".join(about.split()),
        allow_abbrev=False,
        add_help=False,
        argument_default=SUPPRESS,
        exit_on_error=False,
        formatter_class=_Help,
    )
    hints = get_type_hints(command, include_extras=True)
    owners: dict[str, type] = {}
    for kind in command.__mro__:
        for field in vars(kind).get("__annotations__", {}):
            owners.setdefault(field, kind)
    groups: dict[type, Any] = {}
    for field in fields(command):
        owner = owners[field.name]
        if owner not in groups:
            title = (owner.__doc__ or "").partition(".")[0]
            groups[owner] = parser.add_argument_group(
                "flags" if owner is command else title.lower()
            )
        _add(groups[owner], field, hints[field.name])
    parser._action_groups = [
        *(group for owner, group in groups.items() if owner is command),
        *(group for owner, group in groups.items() if owner is not command),
    ]
    return parser


def _add(group: Any, field: Field[Any], hint: Any) -> None:
    about, kinds = field.metadata, _kinds(hint)
    options = [SHORT[field.name]] if field.name in SHORT else []
    options += [f"--{name}" for name in (field.name, *about["also"])]
    text = about["text"].replace("%", "%%")
    if field.default is MISSING:
        text += " (needed)"
    elif field.default is not None and not isinstance(field.default, bool):
        text += f" [{field.default}]"
    text = SUPPRESS if about["hidden"] else text
    if bool in kinds:
        options = [o for o in options if o.startswith("--")]
        action = group.add_argument(
            *options, dest=field.name, action="store_true", help=text
        )
        if about["pair"]:
            action.has_pair = True
            group.add_argument(
                *(f"--no_{option[2:]}" for option in options),
                dest=field.name,
                action="store_false",
                help=SUPPRESS,
            )
        return
    choices = [
        w for kind in kinds if get_origin(kind) is Literal for w in get_args(kind)
    ]
    group.add_argument(
        *options,
        dest=field.name,
        nargs="+" if about["many"] else None,
        type=str if about["many"] else _converter(hint, kinds, choices),
        metavar="|".join(choices) or about["metavar"] or _metavar(hint, kinds),
        help=text,
    )


def help_text(name: str, command: type) -> str:
    """Describe the flags of a command."""
    return _parser(name, command).format_help()


def _kinds(hint: Any) -> set[Any]:
    """The types that a value may have; of a tuple those of its entries."""
    if hint == Memory:
        return {float, NoneType}
    if get_origin(hint) in (Union, UnionType):
        return {kind for part in get_args(hint) for kind in _kinds(part)}
    if get_origin(hint) is tuple:
        return set(get_args(hint)) - {...}
    return {hint}


def _metavar(hint: Any, kinds: set[Any]) -> str:
    if hint == Memory:
        return "MEMORY"
    return next((_METAVARS[kind] for kind in _METAVARS if kind in kinds), "TEXT")


def _converter(
    hint: Any, kinds: set[Any], choices: Sequence[str]
) -> Callable[[str], Any]:
    """Make the function from a word to a value."""

    def convert(word: str) -> Any:
        if NoneType in kinds and word == "None":
            return None
        if choices and word not in choices:
            raise ArgumentTypeError(f"is {word!r}; choose {', '.join(choices)}")
        if hint == Memory:
            try:
                return parse_memory(word)
            except RequestError as error:
                raise ArgumentTypeError(f"is {word!r}; {error}") from None
        for kind, wanted in ((int, "a whole number, such as 4"),
                             (float, "a number, such as 1.5")):  # fmt: skip
            if kind in kinds:
                try:
                    return kind(word)
                except ValueError:
                    raise ArgumentTypeError(f"is {word!r}; give {wanted}") from None
        if Path in kinds:
            if not word:
                raise ArgumentTypeError("is empty; give a path")
            return Path(word)
        return word

    return convert


def _joined(words: Sequence[str], hint: Any) -> Any:
    """Make a list of words, with commas or spaces between them, the value of a flag."""
    text = ",".join(words)
    kinds = _kinds(hint)
    if get_origin(hint) is not tuple:
        return Path(text) if Path in kinds else text
    convert = _converter(hint, kinds, ())
    try:
        return tuple(
            convert(word) for word in text.replace(" ", ",").split(",") if word
        )
    except ArgumentTypeError as error:
        raise RequestError(f"a list, {text}: an entry {error}") from None


def _told(error: argparse.ArgumentError, parser: argparse.ArgumentParser) -> str:
    """Say what is wrong with a flag's value."""
    name = str(error.argument_name).split("/")
    spelled = next(option for option in name if option.startswith("--"))
    if error.message.startswith("ignored explicit argument"):
        value = error.message.split("'")[1]
        return f"{spelled} takes no value; leave ={value} out"
    if error.message.startswith("expected"):
        metavar = parser._option_string_actions[spelled].metavar
        return f"{spelled} needs a value: {spelled} {metavar}"
    return f"{spelled} {error.message}"


def _nearest(word: str, names: Iterable[str]) -> str:
    near = get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _bare_words(
    name: str,
    bare: Sequence[str],
    flags: Mapping[str, Field[Any]],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Hand bare words to the field that names schedules."""
    if not bare:
        return {}
    field = next((field for field in _SCHEDULES if field in flags), None)
    if field is None:
        raise RequestError(
            f"{bare[0]!r} is one word too many: zbpp {name} takes flags only, "
            f"and zbpp {name} --help lists them"
        )
    if field in given:
        raise RequestError(
            f"two schedules are named, {bare[0]} and {given[field]}; give one"
        )
    if len(bare) > 1 and not flags[field].metadata["many"]:
        raise RequestError(
            f"{bare[1]!r} is one word too many, after {bare[0]!r}: zbpp {name} takes "
            "one schedule, and a value belongs to a flag"
        )
    return {field: ",".join(bare)}


def _missing(name: str, field: Field[Any], hint: Any) -> str:
    if field.name in _SCHEDULES:
        return f"no schedule is named; give zbpp {name} a mode, such as ZBV, or a file"
    metavar = field.metadata["metavar"] or _metavar(hint, _kinds(hint))
    return f"zbpp {name} needs --{field.name}: --{field.name} {metavar}"
