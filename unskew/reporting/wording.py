"""How figures are written, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

F1 = {"C-F1": "c_f1", "O-F1": "o_f1"}
"""Columns and figures of the multi-label task: the mean of the labels' F1, and the F1 of all decisions."""


METRICS = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "f1": "F1",
    "balanced_accuracy": "balanced accuracy",
    "ece": "ECE",
}
"""Columns of the figures of a classifier that may be asked for; recalls are called by their class."""


def metrics_in(row: Iterable[str]) -> dict[str, str]:
    """Those figures among a row's, with their titles."""
    titles = {name: METRICS.get(name, name.replace("recall/", "recall of ", 1)) for name in row}
    return {
        name: title
        for name, title in titles.items()
        if name in METRICS or (name.startswith("recall/") and not name.endswith("_std"))
    }


LARGEST = 1e6
"""A figure from here on, as of a run that diverged, is written with an exponent."""


def method_title(row: Mapping[str, Any]) -> str:
    """Return the method of a comparison's row as tables show it, with the number of its runs that diverged.

    >>> method_title({"method": "fedavg", "seeds": 3, "diverged": 2})
    'fedavg (2 of 3 diverged)'
    """
    count, seeds = row.get("diverged", 0), row["seeds"]
    if not count:
        return str(row["method"])
    return f"{row['method']} ({'diverged' if seeds == 1 else f'{count} of {seeds} diverged'})"


def percent(value: float | None, spread: float | None = None) -> str:
    """A share as per cent.

    >>> percent(0.5, 0.012), percent(None), percent(-1e12)
    ('50.0 ± 1.2', '-', '-1.0e+14')
    """
    if value is None:
        return "-"
    if not abs(value) < LARGEST:
        return f"{100 * value:.1e}"
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def megabytes(value: float) -> str:
    """Bytes as MB (10^6).

    >>> megabytes(4_520), megabytes(88e6), megabytes(12e9)
    ('0.0045', '88.0', '12,000')
    """
    if value >= 1e9:
        return f"{value / 1e6:,.0f}"
    return f"{value / 1e6:.1f}" if value >= 1e6 else f"{value / 1e6:.2g}"


def number(value: float | None, spread: float | None = None) -> str:
    """A loss or a perplexity.

    >>> number(1.25, 0.0125), number(None), number(31.4)
    ('1.2500 ± 0.0125', '-', '31.40')
    """
    if value is None:
        return "-"
    if not abs(value) < LARGEST:
        return f"{value:.1e}"
    digits = 4 if abs(value) < 10 else 2
    return f"{value:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
