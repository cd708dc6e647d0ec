"""Stand-ins for packages that a library imports for what the suite does not use."""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock


def stand_in(*names: str) -> None:
    """Let ``import`` find something under these names, if the package is not here or does not load."""
    try:
        for name in names:
            importlib.import_module(name)
    except (ImportError, RuntimeError):
        for name in names:
            sys.modules[name] = MagicMock(__path__=[], __spec__=None)
