"""The outputs of commands: tables in a terminal, pictures and pages in files."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from zbpp.simulator.plot import check_suffix
from zbpp.training.options import check_output


class Terminal(Console):
    """Prints tables."""

    def on_broken_pipe(self) -> None:
        """Leave the error to `main`: a reader that has seen enough is none."""
        raise


def _check_picture(_: Any, path: Path | None) -> None:
    if path is not None and path.suffix.lower() != ".html":
        check_suffix(path)


def _check_drawing(_: Any, path: Path | None) -> None:
    if path is not None and path.suffix.lower() != ".json":
        _check_picture(_, path)


OUT = Parameter(alias="-o")
Picture = Annotated[Path, OUT, Parameter(validator=(check_output, _check_picture))]
"""A picture or a page, by the end of its name."""
Drawing = Annotated[Path, OUT, Parameter(validator=(check_output, _check_drawing))]
"""A picture, a page, or a trace (.json)."""
