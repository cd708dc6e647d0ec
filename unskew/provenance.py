"""Provenance of text: an import path from an untrusted file is rejected before anything is imported.

The text itself has a mark. Text from the command line or from Python that replaces it has none.
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
    """Text from an untrusted file; it equals the same text without this mark.

    Most string operations return text without the mark; use ``with_provenance`` to keep it.

    Attributes:
        source: The file.
        remedy: How to trust the file, for error messages.
    """

    source: str
    remedy: str

    def __new__(cls, text: str, source: str, remedy: str) -> UntrustedText:
        """Mark a text."""
        marked = super().__new__(cls, text)
        marked.source, marked.remedy = source, remedy
        return marked

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        """Preserve the mark in copies and in other processes."""
        return str(self), self.source, self.remedy


def with_provenance(text: str, origin: object) -> str:
    """Return a text derived from ``origin``, with the mark of ``origin`` if it has one.

    Args:
        text: The new text.
        origin: Value that the text is derived from.
    """
    return UntrustedText(text, origin.source, origin.remedy) if isinstance(origin, UntrustedText) else text


def _keep(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return with_provenance(check(value), value)


Named = Annotated[str, WrapValidator(_keep)]
"""Text field that may name code; validation preserves its mark."""

_speaker: ContextVar[UntrustedText | None] = ContextVar("speaker", default=None)


@contextmanager
def on_behalf_of(*values: object) -> Iterator[None]:
    """Context manager that rejects import paths if one of ``values``, at any depth, comes from an untrusted file."""
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
    """Validate that an import path does not come from an untrusted file.

    Args:
        path: The import path.
        owner: Description of the path for error messages: ``the model 'package.module:name'``.

    Raises:
        ConfigError: If the path, or a value of ``on_behalf_of``, comes from an untrusted file.
    """
    mark = path if isinstance(path, UntrustedText) else _speaker.get()
    if mark is not None:
        raise ConfigError(f"{mark.source} names code to import, {owner}. To import it, trust the file: {mark.remedy}.")
