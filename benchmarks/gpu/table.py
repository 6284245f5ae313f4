"""Figures of one part of a GPU day, as JSON and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Sizes", "Table", "markdown"]


@dataclass(frozen=True)
class Sizes:
    """The device, and whether everything is as small as can be: a dry run."""

    device: torch.device
    is_tiny: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of figures; ``None`` is what could not be measured here."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


def markdown(table: dict[str, Any]) -> str:
    """A table of a README; numbers to the right."""
    rows = table["rows"]
    sides = [
        "---:" if all(not isinstance(row[i], str) for row in rows) else "---"
        for i in range(len(table["columns"]))
    ]
    lines = [table["columns"], sides, *([_text(x) for x in row] for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {table['title']}\n\n{table['note']}\n\n{text}\n"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
