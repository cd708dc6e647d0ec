"""Terminal tables that never break words: if a table is too wide, each row is printed on separate lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class ReflowTable(Table):
    """Table that prints its rows stacked if the terminal is too narrow for its longest words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        omit_empty_columns(self, console)
        unlimited = options.update(max_width=10_000)
        for column in self.columns:
            column.width = None
        needed = self.__rich_measure__(console, unlimited)
        if needed.minimum <= options.max_width:
            if (
                needed.maximum > options.max_width
            ):  # rich may shrink columns below their longest word, and cut the last ones
                spare = (options.max_width - needed.minimum) / (needed.maximum - needed.minimum)
                for column in self.columns:
                    cells = (as_text(cell, console) for cell in (column.header, *column.cells))
                    widths = [Measurement.get(console, unlimited, cell) for cell in cells]
                    least, most = (max(side, default=0) for side in zip(*widths, strict=True))
                    column.width = least + int(spare * (most - least))
            yield from super().__rich_console__(console, options)
        else:
            yield from stacked_below(self, console)


def table_of(header: Iterable[str], rows: Iterable[Iterable[RenderableType]], title: str | None = None) -> ReflowTable:
    """Build a table.

    Args:
        header: Titles of the columns.
        rows: Cells of each row.
        title: Title of the table, or None.
    """
    table = ReflowTable(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def omit_empty_columns(table: Table, console: Console) -> None:
    """Remove the columns without any value.

    Args:
        table: Table to change.
        console: Console to print to.
    """
    if table.row_count:
        columns = [c for c in table.columns if not all(as_text(cell, console).plain in ("", "-") for cell in c.cells)]
        table.columns = [replace(column, _index=index) for index, column in enumerate(columns)]


def stacked_below(table: Table, console: Console) -> Iterator[RenderableType]:
    """Render the rows of a table below each other: the first cell as a heading, then a line with the other cells.

    Args:
        table: Table that is too wide.
        console: Console to print to.

    Yields:
        Rendered lines.
    """
    if table.title:
        yield console.render_str(table.title, style="italic") if isinstance(table.title, str) else table.title
    names = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        head, *rest = (as_text(cell, console) for cell in cells)
        head.stylize("bold")
        yield head
        line = Text()
        for name, cell in zip(names[1:], rest, strict=True):
            if not cell.plain or cell.plain == "·":
                continue
            line.append("; " if line else "")
            line.append(f"{name}: " if name else "")
            # Keep a value and its standard deviation on one line.
            text = " ".join(cell.plain.split("\n"))
            line.append(text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) < 20 else text)
        if line:
            yield Padding(line, (0, 0, 0, 2))
    if table.caption:
        yield Text(str(table.caption))


def as_text(cell: RenderableType, console: Console) -> Text:
    """Return the text of a cell.

    Args:
        cell: Content of a cell.
        console: Console to print to.
    """
    if isinstance(cell, Text):
        return cell.copy()
    return console.render_str(cell if isinstance(cell, str) else str(getattr(cell, "text", cell)))
