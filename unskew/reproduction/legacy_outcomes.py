"""Outcomes from before a default changed, which tables mark until the runs are repeated.

The identity of such an outcome contains the former option. It is therefore shown only if the run that a preset now
describes is missing, and in a separate row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unskew.reproduction.preset import PresetCell

MARK = " †"
"""Suffix of rows that show earlier outcomes."""
EARLIER = {
    "fedssyn": (
        "match_steps=epochs",
        "with equal local epochs instead of equal steps, as in the authors' code",
    ),
    "fedcog": (
        "cycle=by_step",
        "with synthetic batches in the order of classes; some inputs are skipped if a client has incomplete batches",
    ),
}
"""Former option of each rule, and its meaning."""


def legacy_identity(cell: PresetCell) -> PresetCell | None:
    """Return the run of a cell as it was before a default changed, marked; None if no default changed.

    >>> from unskew.config.loader import experiment
    >>> cell = legacy_identity(PresetCell("both", "all", experiment({"method": "fedssyn:rho=1+scaffold"})))
    >>> cell.row, cell.config.method
    ('both †', 'fedssyn:rho=1,match_steps=epochs+scaffold')
    """
    was = "+".join(_as_earlier(part) for part in cell.config.method.split("+"))
    if was == cell.config.method:
        return None
    return replace(cell, row=cell.row + MARK, config=cell.config.model_copy(update={"method": was}))


def _as_earlier(part: str) -> str:
    """Add the former option to one rule, unless it is set already."""
    name, colon, options = part.partition(":")
    option, _ = EARLIER.get(name, ("", ""))
    if not option or any(option_text.startswith(option.partition("=")[0] + "=") for option_text in options.split(",")):
        return part
    return f"{part}{',' if colon else ':'}{option}"


def without_mark(row: str) -> str:
    """Return the name of a row in the preset."""
    return row.removesuffix(MARK)


def notes(cells: Iterable[PresetCell]) -> list[str]:
    """Return the explanations of a table's marks."""
    methods = {cell.config.method for cell in cells if cell.row.endswith(MARK)}
    return [
        f"{MARK.strip()} Measured with an earlier default: {meaning} (`{rule}:{option}`)."
        for rule, (option, meaning) in EARLIER.items()
        if any(option in method for method in methods)
    ]
