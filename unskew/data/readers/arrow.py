"""The modules of pyarrow that readers use; each is imported when it is used first, because pyarrow is optional."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unskew.errors import DataError


class LazyModule:
    """Module that is imported when one of its attributes is used.

    Args:
        name: Name of the module.

    Raises:
        DataError: If the package is missing when an attribute is used.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            return getattr(import_module(self._name), attribute)
        except ImportError as error:
            raise DataError("Reading tables requires the package pyarrow: pip install 'unskew[hub]'.") from error


pa: Any = LazyModule("pyarrow")
pc: Any = LazyModule("pyarrow.compute")
arrow_csv: Any = LazyModule("pyarrow.csv")
arrow_json: Any = LazyModule("pyarrow.json")
parquet: Any = LazyModule("pyarrow.parquet")


def cast(column: Any, kind: Any) -> Any | None:
    """Return a column as another type, or None if a value cannot be converted.

    Args:
        column: Values of the column.
        kind: pyarrow type.
    """
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        return None
