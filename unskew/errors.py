"""Exceptions for users. Each message states the problem, where it occurred, and how to solve it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class UnskewError(Exception):
    """Base class of all errors that unskew raises deliberately."""


class ConfigError(UnskewError):
    """An option, a name or a configuration file is invalid."""


class DataError(UnskewError):
    """The data cannot be used."""


class MethodConflictError(ConfigError):
    """Two methods of a composition fill the same exclusive slot."""


class CheckpointError(UnskewError):
    """A checkpoint is missing, corrupted or belongs to another run."""


class EngineError(UnskewError):
    """An engine cannot run here, or one of its workers died."""


@contextmanager
def explain_missing(message: str, error: type[UnskewError] = ConfigError) -> Iterator[None]:
    """Context manager for the import of an optional package: an ``ImportError`` becomes an error for users.

    Args:
        message: Text that names the package and how to install it.
        error: Class of the error.
    """
    try:
        yield
    except ImportError as missing:
        raise error(message) from missing


LONGEST_LIST = 40
"""Maximum number of names listed in a message."""


def unknown_name(kind: str, name: str, existing: Iterable[str], owner: str = "", meant: str | None = None) -> str:
    """Write an error message for an unknown name, with the closest known names.

    Args:
        kind: Kind of name, such as ``option``.
        name: The unknown name.
        existing: The known names.
        owner: Owner of the names, such as a method; empty for none.
        meant: Known name that corresponds to ``name`` in another library, if any.

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


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name, with a number from 2 if it is taken.

    Args:
        name: Preferred name.
        taken: Names that others have.

    >>> free_name("row", ["row", "row_2"])
    'row_3'
    """
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def abbreviate(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names and the number of further names, as one string.

    Args:
        names: Names to list.
        most: Maximum number of names to list.

    >>> abbreviate(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def short_repr(value: object, write: Callable[[object], str] = repr) -> str:
    """Return a value as text for a message, even if it has no text: Python does not convert integers above 4300 digits.

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
    """Rewrite a message of a validation library as part of a sentence.

    >>> plain_message("Input should be greater than 0")
    'it must be greater than 0'
    """
    return message.removeprefix("Value error, ").replace("Input should be", "it must be", 1)


def first_problem(error: ValueError) -> str:
    """Return the first problem of a validation error with the field that has it, as part of a sentence."""
    details = getattr(error, "errors", None)
    if details is None:
        return str(error).rstrip(".")
    first = details()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where[:80]}: {plain_message(first['msg'])}" if where else plain_message(first["msg"])
