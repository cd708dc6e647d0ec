"""The figure that a run is judged by: the accuracy, or R² where numbers are predicted."""

from __future__ import annotations

from collections.abc import Container

SCORES: dict[str, str] = {"accuracy": "accuracy", "r2": "R²"}
"""Its names in files, and what readers call it; both are shown in per cent, higher is better, and 1 is perfect."""


def score_of(names: Container[str]) -> str:
    """The name of the figure that is scored, among the names of a row's or a summary's figures.

    >>> score_of({"round": 1, "r2": 0.5}), score_of(["best_accuracy", "accuracy"])
    ('r2', 'accuracy')
    """
    return "r2" if "r2" in names else "accuracy"
