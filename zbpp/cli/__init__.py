"""The ``zbpp`` command, `main`; `commands` has one dataclass per command."""

from zbpp.cli.commands import main

__all__ = ["main"]
