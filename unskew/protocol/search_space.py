"""Search space of an option: a range, or a choice among values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from unskew.errors import ConfigError, short_repr
from unskew.provenance import on_behalf_of


@dataclass(frozen=True)
class RangeSpace:
    """All numbers from ``low`` to ``high``, both included.

    Attributes:
        low: The least.
        high: The largest.
        log: Whether a factor counts, not a difference.
        whole: Whether only integers are meant.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}{':log' if self.log else ''}"


@dataclass(frozen=True)
class CategoricalSpace:
    """One of some values; of a single one, which is then fixed."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.values))


Space: TypeAlias = RangeSpace | CategoricalSpace


def log_range(low: float, high: float) -> RangeSpace:
    """A range where a factor counts: 0.01 to 0.1 is as wide as 0.1 to 1.

    Args:
        low: Smallest value.
        high: Largest value.
    """
    return RangeSpace(low, high, log=True, whole=isinstance(low, int) and isinstance(high, int))


def uniform_range(low: float, high: float) -> RangeSpace:
    """A range where a difference counts.

    Args:
        low: Smallest value.
        high: Largest value.
    """
    return RangeSpace(low, high, whole=isinstance(low, int) and isinstance(high, int))


def one_of(*values: Any) -> CategoricalSpace:
    """A choice, as of a paper's grid."""
    return CategoricalSpace(values)


def read_space(value: object, name: str, check: Callable[[Any], None]) -> Space:
    """A space as a user writes it.

    Args:
        value: ``0.001:0.3``, ``0.001:0.3:log``, ``16|32|64``, a single value, a list of values, a mapping with ``low``,
            ``high`` and perhaps ``log_range``, or a space.
        name: Of the option.
        check: Refuses a value that the option does not take.

    Raises:
        ConfigError: The value is not a search space, or the option does not accept its values.
    """
    space = (
        value if isinstance(value, RangeSpace | CategoricalSpace) else _range(value) or CategoricalSpace(_values(value))
    )
    ends = (space.low, space.high) if isinstance(space, RangeSpace) else space.values
    if not ends:
        raise ConfigError(f"The space of {name} is empty; write for instance {name}=0.001:0.3:log or {name}=1|2|4.")
    with on_behalf_of(value):  # the pieces of a text have no mark of the file that it comes from
        for end in ends:
            check(end)
    if isinstance(space, CategoricalSpace):
        return space
    if not (math.isfinite(space.low) and math.isfinite(space.high) and space.low < space.high):
        raise ConfigError(f"The space {name}={space} is not a range: the first number must be below the second.")
    if space.log and space.low <= 0:
        raise ConfigError(f"The space {name}={space} is logarithmic, so it must begin above 0.")
    return RangeSpace(space.low, space.high, space.log, _wholes_only(space, check))


def _wholes_only(space: RangeSpace, check: Callable[[Any], None]) -> bool:
    """Return whether the option takes integers only, so that values between two integers are rejected."""
    if not (float(space.low).is_integer() and float(space.high).is_integer()):
        return False
    try:
        check(space.low + 0.5)
    except ConfigError:
        return True
    return False


def _number(text: Any) -> float:
    """An integer stays one, which options that take nothing else ask for."""
    number = float(text)
    return int(number) if isinstance(text, int) or (isinstance(text, str) and text.strip().isdigit()) else number


def _range(value: object) -> RangeSpace | None:
    """The range that a text or a mapping means; None if it is none."""
    if isinstance(value, Mapping):
        if not {"low", "high"} <= set(value) <= {"low", "high", "log"}:
            raise ConfigError(f"A range is a mapping of low, high and perhaps log, not {short_repr(value)}.")
        parts: list[Any] = [value["low"], value["high"], *(["log"] if value.get("log") else [])]
    else:
        parts = value.split(":") if isinstance(value, str) else []
    if len(parts) not in (2, 3) or (len(parts) == 3 and str(parts[2]).strip() != "log"):
        return None
    try:
        return RangeSpace(_number(parts[0]), _number(parts[1]), len(parts) == 3)
    except (TypeError, ValueError):
        if isinstance(value, Mapping):
            raise ConfigError(f"low and high of a range are numbers, not in {short_repr(value)}.") from None
        return None


def _values(value: object) -> tuple[Any, ...]:
    """The values of a choice; of a text those between bars, read as YAML reads them."""
    if isinstance(value, str):
        return tuple(_plain(part.strip()) for part in value.split("|") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,)


def _plain(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)
