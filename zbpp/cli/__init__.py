"""The ``zbpp`` command, `main`; `commands` holds one dataclass a command."""

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Args:
        arguments: words behind ``zbpp``; None: those of this process.
    """
    # here, as a browser that plans has not all that the commands need
    from zbpp.cli import commands

    return commands.main(arguments)
