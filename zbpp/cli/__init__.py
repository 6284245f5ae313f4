"""The ``zbpp`` command; `commands` holds one dataclass a command."""
