"""Tables of figures, for a terminal and for a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class _Row:
    """The cells of a row; a note stands in place of all but the first of them."""

    cells: Sequence[str]
    look: Literal["", "bold", "dim"] = ""
    note: str = ""


@dataclass
class Table:
    """Texts under heads; all columns but the first ``left`` are justified right."""

    heads: Sequence[str]
    title: str = ""
    caption: str = ""
    left: int = 1
    rows: list[_Row] = field(default_factory=list)

    def add(
        self, *cells: str, look: Literal["", "bold", "dim"] = "", note: str = ""
    ) -> None:
        """Append a row."""
        self.rows.append(_Row(cells, look, note))

    def for_terminal(self) -> "rich.table.Table":
        """The table as rich prints it; a row with a note has dashes, and no note."""
        from rich.table import Table as RichTable

        table = RichTable(
            title=self.title or None,
            caption=self.caption or None,
            title_justify="left",
            caption_justify="left",
        )
        for number, head in enumerate(self.heads):
            table.add_column(head, overflow="fold", no_wrap=number < self.left)
            if number >= self.left:
                table.columns[-1].justify = "right"
        for row in self.rows:
            missing = len(self.heads) - len(row.cells)
            filled = ["-" if row.note else ""] * missing
            table.add_row(*row.cells, *filled, style=row.look or None)
        return table

    def html(self) -> str:
        """The table as elements of a page, its title above it."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.heads)
        body = "".join(map(self._html_row, self.rows))
        return (
            f'<h2>{escape(self.title)}</h2><div class="wide"><table>'
            f"<caption>{escape(self.caption)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _html_row(self, row: _Row) -> str:
        name, *others = map(escape, row.cells)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        if row.note:
            short = escape(row.note.partition(";")[0])
            cells = (
                f'<td class="why" colspan="{len(self.heads) - 1}" '
                f'title="{escape(row.note)}">{short}</td>'
            )
        look = f' class="{row.look}"' if row.look else ""
        return f'<tr{look}><th scope="row">{name}</th>{cells}</tr>'
