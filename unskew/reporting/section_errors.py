"""Sections of a report that cannot cost each other: a broken one states its error, the others are written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from unskew.reporting.templating import render_section

T = TypeVar("T")


def guard_section(title: str, write: Callable[[], T], instead: Callable[[str], T]) -> T:
    """Write a section, or what stands in its place if that fails; a failure is also a Python warning.

    Args:
        title: Name of the section.
        write: Writes it.
        instead: Gives what replaces it, from a sentence on the failure.

    Returns:
        What either of them gave.
    """
    try:
        return write()
    except Exception as error:  # whatever is wrong with one section, the results in the others must not be lost
        sentence = (
            f"The section {title!r} of the report is missing because of an error: {type(error).__name__}: {error}"
        )
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        return instead(sentence)


def section_html(title: str, write: Callable[[], str]) -> str:
    """The HTML of a section; of a broken one its heading and the error.

    Args:
        title: Heading of the section.
        write: Renders the section.
    """
    return guard_section(title, write, lambda reason: render_section("failed", title=title, reason=reason))
