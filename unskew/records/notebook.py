"""Tables for notebooks: as HTML and as data frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from unskew.errors import ConfigError
from unskew.tasks.formatting import missing_text

if TYPE_CHECKING:
    import pandas as pd


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
    """Return rows as an HTML table with their keys as header; all text is escaped."""
    header = "".join(f"<th>{escape(str(name))}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row.values())}</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def to_data_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a data frame.

    Args:
        rows: Rows as dictionaries.

    Raises:
        ConfigError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("to_pandas needs: pip install 'unskew[pandas]'.") from error
    return pd.DataFrame(rows)
