"""The outputs of a command: files, checked before it computes anything, and tables."""

import os
from pathlib import Path

from rich.console import Console

from zbpp.core import RequestError
from zbpp.simulator.plot import picture_suffix

__all__ = ["Terminal", "check_outputs", "check_picture"]


class Terminal(Console):
    """Prints tables."""

    def on_broken_pipe(self) -> None:
        """Leave the error to `main`: a reader that has seen enough is none."""
        raise


def check_outputs(**paths: Path | None) -> None:
    """Refuse what could not be written in the end.

    Args:
        **paths: by their flags, without the hyphens; None is not written.

    Raises:
        RequestError: a path is a folder, or its folder is missing or closed.
    """
    for flag, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            reason = "it is a folder"
        elif not path.parent.is_dir():
            reason = f"there is no folder {path.parent}"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "permission denied"
        else:
            continue
        raise RequestError(
            f"--{flag} {path} cannot be written: {reason}; give the path of a file in "
            "a folder that exists"
        )


def check_picture(path: Path) -> None:
    """Refuse a name that ends like neither a picture nor a page.

    Raises:
        RequestError: it does, or matplotlib is missing for a picture.
    """
    if path.suffix.lower() != ".html":
        picture_suffix(path)
