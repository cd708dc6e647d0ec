"""Stored outputs of the libraries, and their table in Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conformance.trust.comparisons import SECTIONS

RESULTS = Path(__file__).parent / "results.json"
NAMES = {
    "opacus": "Opacus",
    "dp_accounting": "dp-accounting",
    "prv_accountant": "prv-accountant",
    "byzfl": "ByzFL",
    "flower": "Flower",
    "fedlab": "FedLab",
    "pytorch": "PyTorch",
}


def read() -> dict[str, Any]:
    """Return the stored results."""
    return json.loads(RESULTS.read_text())


def run_line(results: dict[str, Any]) -> str:
    """Return the sentence of the page on the run.

    Args:
        results: Results of all libraries.
    """
    return f"Run on {results['date']} with unskew {results['unskew']} and Python {results['python']} on CPU."


def number(value: float) -> str:
    """Format a difference."""
    if value == 0:
        return "0"
    return f"{value:.3f}" if value >= 1e-3 else f"{value:.0e}"


def table(results: dict[str, Any]) -> str:
    """Format the comparisons, with a row for each.

    Args:
        results: Results of all libraries.
    """
    rows = [["library", "compared", "cases", "difference", "with the change", "verdict"], ["---"] * 6]
    for comparisons in SECTIONS.values():
        for comparison in comparisons:
            stored = results["differences"].get(comparison.library, {}).get(comparison.title)
            if stored is None:
                continue
            version = results["libraries"][comparison.library]["version"]
            differences = [number(value) for value in stored]
            rows.append(
                [
                    f"{NAMES[comparison.library]} {version}",
                    comparison.title,
                    str(len(comparison.cases)),
                    differences[0],
                    differences[1] if len(differences) > 1 else "-",
                    comparison.verdict(stored),
                ]
            )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
