"""Placeholders for packages that a library imports but the suite does not use."""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock


def stand_in(*names: str) -> None:
    """Make ``import`` succeed for these names if the package is missing or cannot be loaded."""
    try:
        for name in names:
            importlib.import_module(name)
    except (ImportError, RuntimeError):
        for name in names:
            sys.modules[name] = MagicMock(__path__=[], __spec__=None)
