"""From the words of a command line to a command: cyclopts over a dataclass's fields.

    zbpp plan ZBV -p 4 -m 8 -o plan.json
    zbpp plan --pipeline_schedule_mode ZBV --stages 4 --microbatches 8 --out plan.json

Flags may be written with hyphens or underscores. A bare word names a schedule. Lists
have commas or spaces. What is wrong is told in one line.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from importlib.metadata import version
from typing import Annotated, Any, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.exceptions import CoercionError, UnusedCliTokensError
from cyclopts.help import (
    ColumnSpec,
    DefaultFormatter,
    DescriptionRenderer,
    NameRenderer,
    PanelSpec,
)

from zbpp.cli.outputs import Terminal
from zbpp.core import RequestError, parse_memory
from zbpp.training.options import Memory

__all__ = ["application", "parse"]

_SHORT = {"stages": "-p", "microbatches": "-m", "out": "-o"}
_SCHEDULES = ("pipeline_schedule_mode", "modes")
"""Fields that name schedules: these take the bare words."""
_HELP = DefaultFormatter(
    panel_spec=PanelSpec(padding=0),
    column_specs=(
        ColumnSpec(renderer=NameRenderer(max_width=34), style="cyclopts.name"),
        ColumnSpec(renderer=DescriptionRenderer(), overflow="fold"),
    ),
)


def application(commands: Mapping[str, type]) -> App:
    """Make the parser of commands."""
    short = ", ".join(f"{short} is --{name}" for name, short in _SHORT.items())
    app = App(
        name="zbpp",
        help="Plan, simulate and run zero-bubble pipeline schedules.\n\n"
        f"In all commands {short}; a mode or a schedule file may stand bare; lists "
        "have commas or spaces. zbpp COMMAND --help has the flags.",
        help_format="plaintext",
        help_formatter=_HELP,
        console=Terminal(),
        version=lambda: f"zbpp {version('zbpp')}",
        default_parameter=Parameter(allow_repeating=True, negative_bool="no_"),
    )
    for place, (name, command) in enumerate(commands.items()):
        about = (command.__doc__ or "").partition("Raises:")[0].split("\n\n")
        app.command(
            _maker(command),
            name=name,
            help="\n\n".join(" ".join(part.split()) for part in about),
            sort_key=place,
        )
    return app


def parse(app: App, words: Sequence[str]) -> Any:
    """Make the command that the words name; None once help has been printed.

    Raises:
        RequestError: a word is wrong, or one is missing.
    """
    try:
        make, bound, _ = app.parse_args(
            list(map(_spelled, words)), exit_on_error=False, print_error=False
        )
    except UnusedCliTokensError as error:
        reason = f"{(error.unused_tokens or words)[0]!r} is one word too many."
    except CycloptsError as error:
        reason = str(error)
    else:
        return make(*bound.args, **bound.kwargs)
    command = "".join(f"{word} " for word in words[:1] if word in app)
    raise RequestError(f"{reason} (see zbpp {command}--help)")


def _spelled(word: str) -> str:
    """Write a flag with underscores."""
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        flag = f"--{flag[2:].replace('-', '_')}"
    return flag + equals + value


def _maker(command: type) -> Callable[..., Any]:
    """Make the function with a parameter for each field, which cyclopts reads."""
    hints = get_type_hints(command, include_extras=True)
    flags = {field.name: field for field in fields(command)}
    owners = {
        name: owner
        for owner in reversed(command.__mro__)
        for name in vars(owner).get("__annotations__", {})
    }
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        owner = owners[name]
        title = "Flags" if owner is command else (owner.__doc__ or "").partition(".")[0]
        group = Group(title, sort_key=-len(owner.__mro__))  # its own come first
        about = _flag(flags[name], hints[name], group)
        kind = (
            parameter.POSITIONAL_OR_KEYWORD
            if name in _SCHEDULES
            else parameter.KEYWORD_ONLY
        )
        hint = Annotated[hints[name], about]  # type: ignore[valid-type]
        parameters.append(parameter.replace(kind=kind, annotation=hint))
    signature = inspect.Signature(
        sorted(parameters, key=lambda parameter: parameter.kind)
    )

    def make(*words: Any, **values: Any) -> Any:
        return command(**signature.bind(*words, **values).arguments)

    make.__signature__ = signature  # type: ignore[attr-defined]
    return make


def _flag(field: Field[Any], hint: Any, group: Group) -> Parameter:
    about, default = field.metadata, field.default
    names = [f"--{name}" for name in (field.name, *about["also"])]
    shown = isinstance(default, str | int | float) and not isinstance(default, bool)
    some = -1 if about["many"] else None
    return Parameter(
        [*names, _SHORT[field.name]] if field.name in _SHORT else names,
        help=about["text"] + (f" [{default}]" if shown else ""),
        metavar=about["metavar"],
        group=group,
        show_default=False,
        negative=None if about["pair"] else (),
        converter=_value if some or hint in (int, int | None, Memory) else None,
        n_tokens=some,
        consume_multiple=1 if some else None,
    )


def _value(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read a list with commas, memory, or whole numbers: cyclopts makes 2 of 2.5."""
    text = ",".join(token.value for token in tokens)
    if kind is float:
        return parse_memory(text)
    try:
        if kind is int:
            return int(text)
        if get_origin(kind) is tuple:
            return tuple(map(int, text.replace(",", " ").split()))
    except ValueError:
        reason = f"{text!r}; give whole numbers, such as 4"
        raise CoercionError(msg=reason, token=tokens[0]) from None
    return kind(text)
