"""The one table of all benchmarks: printed as it stands in a README."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Table", "markdown"]


@dataclass(frozen=True)
class Table:
    """Rows of figures; ``None`` is what could not be measured here."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    note: str = ""

    def add(self, *cells: Any) -> None:
        """Add a row, a cell a column."""
        self.rows.append(cells)

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)

    def show(self) -> None:
        """Print it."""
        print(markdown(self.as_json()), flush=True)


def markdown(table: dict[str, Any]) -> str:
    """Write a table of `Table.as_json`; what is no name stands at the right."""
    rows = [[_text(cell) for cell in row] for row in table["rows"]]
    sides = [
        "---:" if i and all(_is_figure(row[i]) for row in rows) else "---"
        for i in range(len(table["columns"]))
    ]
    lines = [table["columns"], sides, *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = f"{table['note']}\n\n" if table["note"] else ""
    return f"### {table['title']}\n\n{note}{text}\n"


def _is_figure(text: str) -> bool:
    return not text or text[0] in "-+.0123456789"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
