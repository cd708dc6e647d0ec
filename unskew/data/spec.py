"""Which samples there are and who holds them, in one object: with a seed it decides a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unskew.errors import ConfigError, shown


@dataclass(frozen=True)
class TextSpec:
    """How texts become token ids.

    Attributes:
        columns: Columns of the text, one or a pair; the source's own if empty.
        tokenizer: A name at the hub, a folder, or ``bytes``.
        block: At most so many tokens a text.
    """

    columns: tuple[str, ...] = ()
    tokenizer: str | None = None
    block: int = 128


@dataclass(frozen=True)
class DataSpec:
    """The data of a run. ``unskew.load_federation`` and ``unskew.Experiment`` say what each field means.

    Two that are equal give, with one seed, the same federation.
    """

    data: str
    data_path: str | Path | None = None
    label: str | None = None
    label_separator: str | None = None
    image: str | None = None
    image_size: int | None = None
    keep_classes: int | None = None
    keep_samples: int | None = None
    partition: str | object = "dirichlet:0.1"
    clients: int | None = 10
    holdout: float = 0.1
    server: int | str | None = None
    server_path: str | Path | None = None
    text: TextSpec = TextSpec()
    set_aside: int = 0
    features: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    task: str = "auto"
    categories: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    missing: str = "refuse"


def names_in(value: object) -> tuple[str, ...]:
    """Names in a list, or in text with commas between them.

    Raises:
        ConfigError: It is neither.

    >>> names_in("age, income"), names_in(["a,b"])
    (('age', 'income'), ('a,b',))
    """
    if isinstance(value, str):
        return tuple(piece.strip() for piece in value.split(",") if piece.strip())
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{shown(value)} is no list of names; write text such as 'age,income', or a list of it.")
    return tuple(value)
