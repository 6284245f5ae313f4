"""The ``zbpp`` command, `main`; `commands` holds one dataclass a command."""

from zbpp.cli.commands import main

__all__ = ["main"]
