"""A script's flags, from the fields of a dataclass."""

from typing import TypeVar

from cyclopts import App, Parameter

__all__ = ["read_options"]

T = TypeVar("T")


def read_options(*kinds: type[T], words: list[str] | None = None) -> T:
    """Read the command line; several kinds are commands with the names of the classes.

    Args:
        kinds: dataclasses whose fields all have a default.
        words: None: those that the script was called with.
    """
    flag = Parameter(consume_multiple=True, name_transform=str, negative=())
    app = App(default_parameter=flag, version_flags=[])
    for kind in kinds:
        if len(kinds) == 1:
            app.default(kind)
        else:
            app.command(kind, name=kind.__name__.lower())
    command, bound, _ = app.parse_args(words)
    made = command(*bound.args, **bound.kwargs)
    if not isinstance(made, kinds):  # it was --help
        raise SystemExit(0)
    return made
