"""A page of tables and notes, with rich where it is installed and as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Words that a table colors where the terminal can.
COLORS = {"chosen": "green", "problem": "bold red", "note": "yellow", "-": "dim"}


@dataclass
class Section:
    """One table; no header makes it a list of names and values."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]]


@dataclass
class Page:
    """Sections in order, shown at once."""

    sections: list[Section] = field(default_factory=list)

    def add(self, title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
        """Append a section; one without rows is left out."""
        if rows:
            self.sections.append(
                Section(title, header, [[str(cell) for cell in row] for row in rows])
            )

    def show(self) -> None:
        """Write the page to standard output."""
        try:
            from rich.console import Console
        except ImportError:
            sys.stdout.write(self.plain())
            return
        console = Console(highlight=False)
        # A pipe has no width, so cells must not be folded at 80 columns.
        if not console.is_terminal:
            sys.stdout.write(self.plain())
            return
        console.print(self.rich())

    def rich(self) -> Any:
        """The page for a rich console."""
        from rich.console import Group

        return Group(*map(_table, self.sections))

    def plain(self) -> str:
        """The page as aligned text."""
        blocks = []
        for section in self.sections:
            rows = [list(section.header), *section.rows] if section.header else section.rows
            columns = max(map(len, rows))
            widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
            lines = [
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
                for row in rows
            ]
            blocks.append("\n".join([section.title, *(f"  {line}".rstrip() for line in lines)]))
        return "\n\n".join(blocks) + "\n"


class Paged:
    """What is shown as a page, in text and in rich's consoles."""

    def page(self) -> Page:
        """What there is to say, in tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.page().plain()

    def __rich__(self) -> Any:
        return self.page().rich()


def _table(section: Section) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    header = bool(section.header)
    title = Text(section.title, style="bold")
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if header else None,
        show_header=header,
    )
    for index in range(max(map(len, section.rows))):
        table.add_column(section.header[index] if header else "", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell, style=COLORS.get(cell, "")) for cell in row))
    return table
