"""The modules of pyarrow that readers use; each is imported when it is used first, because pyarrow is optional."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Module that is imported when one of its attributes is used.

    Args:
        name: Name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


pa: Any = LazyModule("pyarrow")
pc: Any = LazyModule("pyarrow.compute")
