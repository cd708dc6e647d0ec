"""Methods that a method cannot be combined with, and the reasons."""

from __future__ import annotations

import re

from unskew.errors import MethodConflictError
from unskew.methods.registry import METHODS, method


def conflicts(name: str) -> dict[str, str]:
    """Return the registered methods that a method cannot be combined with, by name, with the reason.

    Args:
        name: Name or import path of the method.

    Raises:
        ConfigError: If there is no such method.
    """
    reasons = {}
    own = method(name)
    for other in METHODS:
        if other == name:
            continue
        try:
            method([own, other])
        except MethodConflictError as error:
            reasons[other] = str(error)
    return reasons


def grouped_conflicts(name: str) -> dict[str, list[str]]:
    """Return the reasons why a method conflicts with others, and the names of the others that each reason is about.

    Args:
        name: Name or import path of the method.
    """
    groups: dict[str, list[str]] = {}
    for other, reason in conflicts(name).items():
        general = re.sub(rf"(?<![\w-]){re.escape(method(other).name)}(?![\w-])", "the other method", reason)
        groups.setdefault(re.sub("^the", "The", general), []).append(other)
    return groups
