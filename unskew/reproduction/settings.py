"""Differences between the settings of a table's runs and the paper's, which every table states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from unskew.config.experiment import Experiment
from unskew.reproduction.preset import Preset, PresetCell, preset_cells, without_mark

STATED = ("data", "model", "clients", "rounds", "target")
"""Settings that a table states if they differ from the paper's."""


def published_settings(preset: Preset) -> dict[tuple[str, str], Experiment]:
    """Return the paper's experiment of each row and column, as ``{(row, column): experiment}``."""
    paper = preset_cells(preset.model_copy(update={"scales": {}}), "paper", 0, {})
    return {(cell.row, cell.column): cell.config for cell in paper}


def settings_note(preset: Preset, scale: str, table: Iterable[PresetCell]) -> str:
    """Return a sentence with the settings of a table's runs that are not the paper's; empty if there are none.

    Args:
        preset: The preset.
        scale: Scale of the preset.
        table: Cells of the table.
    """
    paper, pairs = published_settings(preset), dict[str, dict[tuple[Any, Any], None]]()
    for cell in table:
        paper_settings = paper.get((without_mark(cell.row), cell.column))
        for name in STATED if paper_settings is not None else ():
            pair = getattr(cell.config, name), getattr(paper_settings, name)
            if pair[0] != pair[1]:
                pairs.setdefault(name, {})[pair] = None
    return describe_settings(scale, {name: pairs[name] for name in STATED if name in pairs})


def describe_settings(scale: str, pairs: Mapping[str, Collection[tuple[Any, Any]]]) -> str:
    """Return a sentence that states settings, each with ours and the paper's values; empty without settings.

    Args:
        scale: Scale of the preset.
        pairs: Our and the paper's values of each field.

    >>> print(describe_settings("cpu", {"data": [("digits", "cifar100")], "target": [(0.8, 0.3), (0.9, 0.4)]}))
    Scale cpu is not the paper's setting: data digits (paper: cifar100); target 0.8, 0.9 (paper: 0.3, 0.4).
    """
    texts = []
    for name, both in pairs.items():
        ours, paper_text = (", ".join(dict.fromkeys(str(pair[side]) for pair in both)) for side in (0, 1))
        texts.append(f"{name} {ours} (paper: {paper_text})")
    return f"Scale {scale} is not the paper's setting: {'; '.join(texts)}." if texts else ""


def other_setting(value: str, ours: Experiment, theirs: Experiment) -> str:
    """Return the data or, for traffic, the target of the paper's number if it is not comparable with ours, otherwise "".

    Args:
        value: Name of the value.
        ours: Configuration of our run.
        theirs: Configuration of the paper.
    """
    if ours.data != theirs.data:
        return theirs.data
    traffic = value.endswith("to_target") or value == "saving"
    return f"target {theirs.target}" if traffic and ours.target != theirs.target else ""


def has_same_model(ours: Experiment, theirs: Experiment | None) -> bool:
    """Return whether our and the paper's run have the same model, so that their difference is meaningful.

    Args:
        ours: Configuration of our run.
        theirs: Configuration of the paper, if known.
    """
    return theirs is not None and (ours.model, ours.model_options) == (theirs.model, theirs.model_options)
