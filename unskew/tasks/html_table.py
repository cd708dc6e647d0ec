"""Tables as HTML, by which notebooks display objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from unskew.tasks.formatting import missing_text


def format_mean_std(value: float | None, std: float | None = None, factor: float = 1.0) -> str:
    """Format a number with its standard deviation, or a dash if it is not known.

    Args:
        value: The mean, or None.
        std: The standard deviation, or None.
        factor: Factor of both.

    >>> format_mean_std(0.81234, 0.01), format_mean_std(2_500_000, factor=1e-6), format_mean_std(None)
    ('0.8123 ± 0.01', '2.5', '–')
    >>> format_mean_std(float("inf"))
    'diverged'
    """
    if value is None or not math.isfinite(value):
        return missing_text(value).replace("-", "–")
    return f"{factor * value:.4g}" + (f" ± {factor * std:.2g}" if std else "")


def html_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as an HTML table with their keys as header; all text is escaped, and missing values are empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    header = "".join(f"<th>{escape(str(name))}</th>" for name in names)
    lines = ("".join(f"<td>{escape(cell_text(row.get(name)))}</td>" for name in names) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def cell_text(value: object) -> str:
    """Return the text of a table cell: numbers with four digits, nothing for None."""
    return "" if value is None else format_mean_std(value) if isinstance(value, float) else str(value)


def html_page(sentences: Iterable[str], *tables: Sequence[Mapping[str, object]]) -> str:
    """Return paragraphs and the tables that have rows as HTML, without styles, so that it follows the notebook's theme.

    Args:
        sentences: One text for each paragraph; all text is escaped.
        *tables: Rows of each table.
    """
    return "".join([*(f"<p>{escape(line)}</p>" for line in sentences), *map(html_table, filter(None, tables))])
