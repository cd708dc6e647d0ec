"""The errors a user can meet. Each message is a sentence: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class UnskewError(Exception):
    """Base of every error that unskew raises on purpose."""


class ConfigError(UnskewError):
    """An option, a name or a configuration file is wrong."""


class DataError(UnskewError):
    """The data cannot be used as given."""


class MethodConflictError(ConfigError):
    """Two methods of a composition fill the same exclusive slot."""


class CheckpointError(UnskewError):
    """A checkpoint is missing, damaged or belongs to another run."""


class EngineError(UnskewError):
    """An engine cannot run here, or one of its workers died."""


LONGEST_LIST = 40
"""Largest number of names listed in a message."""


def unknown_name(kind: str, name: str, existing: Iterable[str], owner: str = "", meant: str | None = None) -> str:
    """Write a sentence for an unknown name, with the nearest existing ones.

    Args:
        kind: What a name is called, such as ``option``.
        name: The unknown name.
        existing: The known names.
        owner: What has these names, such as a method.
        meant: The name that another library's ``name`` stands for, if it is known.

    >>> unknown_name("method", "fedavgg", ["fedavg", "fedprox"])
    "There is no method 'fedavgg'. Did you mean 'fedavg'? Known: fedavg, fedprox."
    >>> unknown_name("option", "lambda", ["mu"], owner="fedprox")
    "fedprox has no option 'lambda'; it has mu."
    """
    names = sorted(existing)
    near = [meant] if meant is not None else difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    if owner:
        return f"{owner} has no {kind} {name!r}; it has {', '.join(names)}.{hint}"
    listed = f" Known: {', '.join(names)}." if len(names) <= LONGEST_LIST else ""
    return f"There is no {kind} {name!r}.{hint}{listed}"


def short_repr(value: object, write: Callable[[object], str] = repr) -> str:
    """A value as a sentence shows it, whatever it is: Python does not write integers of more than 4300 digits.

    Args:
        value: Any value.
        write: Converts the value to text.

    >>> short_repr("a"), short_repr(10**5000)
    ("'a'", 'an object of type int that cannot be written out')
    """
    try:
        return write(value)
    except Exception:  # a user's class may fail in any way
        return f"an object of type {type(value).__name__} that cannot be written out"


def list_items(values: Any, wrong: UnskewError) -> list[Any]:
    """Return the items of a list-like value; text and scalars raise the error ``wrong``.

    Args:
        values: Value that should be a list.
        wrong: Error to raise.

    Raises:
        UnskewError: The error ``wrong``, if the value is not a list.
    """
    if isinstance(values, str | bytes):
        raise wrong
    try:
        return list(values)
    except TypeError:
        raise wrong from None


def plain_message(message: str) -> str:
    """A validation library's message as part of a sentence.

    >>> plain_message("Input should be greater than 0")
    'it must be greater than 0'
    """
    return message.removeprefix("Value error, ").replace("Input should be", "it must be", 1)
