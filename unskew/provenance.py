"""Provenance of text: an import path that comes from an untrusted file is rejected before anything is imported.

The mark is on the text itself. What the command line or Python puts in its place has no mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from unskew.errors import ConfigError

TRUST = "add --trust-code (in Python trust_code=True)"


class UntrustedText(str):
    """Text from a file that is not trusted; it equals the same text without this mark.

    Most operations on text return it without the mark; use ``with_provenance`` to keep it.

    Attributes:
        source: The file.
        remedy: How to trust it, as an error message says it.
    """

    source: str
    remedy: str

    def __new__(cls, text: str, source: str, remedy: str) -> UntrustedText:
        """Mark a text."""
        marked = super().__new__(cls, text)
        marked.source, marked.remedy = source, remedy
        return marked

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        """Keep the mark in copies and in other processes."""
        return str(self), self.source, self.remedy


def with_provenance(text: str, origin: object) -> str:
    """Give a text that was made from ``origin`` the mark of ``origin``, if it has one.

    Args:
        text: The new text.
        origin: Value from which the text was made.
    """
    return UntrustedText(text, origin.source, origin.remedy) if isinstance(origin, UntrustedText) else text


def _keep(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return with_provenance(check(value), value)


Named = Annotated[str, WrapValidator(_keep)]
"""A text field that may name code; validation keeps its mark."""

_speaker: ContextVar[UntrustedText | None] = ContextVar("speaker", default=None)


@contextmanager
def on_behalf_of(*values: object) -> Iterator[None]:
    """Reject import paths in the block if one of ``values``, however deep, comes from an untrusted file."""
    mark = next(filter(None, map(_mark_in, values)), None)
    token = _speaker.set(mark if mark is not None else _speaker.get())
    try:
        yield
    finally:
        _speaker.reset(token)


def _mark_in(value: object) -> UntrustedText | None:
    if isinstance(value, UntrustedText):
        return value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(_mark_in, inner)), None)


def check_trusted(path: str, owner: str) -> None:
    """Reject an import path that comes from an untrusted file.

    Args:
        path: The import path.
        owner: What it stands for, as an error message says it: ``the model 'package.module:name'``.

    Raises:
        ConfigError: If the path, or what ``on_behalf_of`` was given, has the mark of an untrusted file.
    """
    mark = path if isinstance(path, UntrustedText) else _speaker.get()
    if mark is not None:
        raise ConfigError(
            f"{mark.source} names code to import, {owner}, and unskew imports what a file names only if you trust the file: "
            f"{mark.remedy}."
        )
