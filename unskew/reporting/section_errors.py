"""Error isolation of report sections: a failed section shows its error, and the others are written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from unskew.reporting.templating import render_section

T = TypeVar("T")


def guard_section(title: str, write: Callable[[], T], instead: Callable[[str], T]) -> T:
    """Write a section, or its replacement if that fails; a failure also emits a Python warning.

    Args:
        title: Name of the section.
        write: Writes the section.
        instead: Creates the replacement from a description of the failure.

    Returns:
        Result of ``write`` or ``instead``.
    """
    try:
        return write()
    except Exception as error:  # an error in one section must not lose the results in the others
        sentence = (
            f"The section {title!r} of the report is missing because of an error: {type(error).__name__}: {error}"
        )
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        return instead(sentence)


def section_html(title: str, write: Callable[[], str]) -> str:
    """Return the HTML of a section, or its heading and the error if it fails.

    Args:
        title: Heading of the section.
        write: Renders the section.
    """
    return guard_section(title, write, lambda reason: render_section("failed", title=title, reason=reason))
