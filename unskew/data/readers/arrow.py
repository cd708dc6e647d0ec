"""The modules of pyarrow that readers use; each is imported when it is used first, because pyarrow is optional."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
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
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:  # import_module is slow enough to notice in tables with thousands of columns
            try:
                self._module = import_module(self._name)
            except ImportError as error:
                raise DataError("Reading tables requires the package pyarrow: pip install 'unskew[hub]'.") from error
        return getattr(self._module, attribute)


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


def plain_numbers(column: Any) -> Any:
    """Return a column of decimals as int64, or as float64 if one has a fraction, and one of float16 as float32.

    Other columns are returned unchanged, because pyarrow and NumPy compute with their types. Whole numbers of more than 64
    bits stay decimals: no other type has all of their digits.

    Args:
        column: Values of the column.

    >>> import pyarrow as pa
    >>> column = pa.chunked_array([pa.array(["1.00", "10.00"]).cast(pa.decimal128(9, 2))])
    >>> plain_numbers(column).to_pylist()
    [1, 10]
    """
    if pa.types.is_float16(column.type):
        return column.cast(pa.float32())
    if not pa.types.is_decimal(column.type):
        return column
    integers = cast(column, pa.int64())
    if integers is not None:
        return integers
    whole = pc.all(pc.equal(column, pc.round(column))).as_py()
    return column if whole else column.cast(pa.float64(), safe=False)
