"""Search space of an option: a numeric range, or a list of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from unskew.errors import ConfigError, short_repr


@dataclass(frozen=True)
class RangeSpace:
    """Numbers from ``low`` to ``high``, both included.

    Attributes:
        low: Smallest value.
        high: Largest value.
        log: Whether the scale is logarithmic.
        integer: Whether only integers are allowed.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}{':log' if self.log else ''}"


@dataclass(frozen=True)
class CategoricalSpace:
    """Discrete set of values; a single value fixes the option."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.values))


Space: TypeAlias = RangeSpace | CategoricalSpace
FORMAT = "Write a search space as a range, such as 0.001:0.3:log or 0:0.9, or as values, such as 1|2|4."
"""What a user may write as a search space."""


def log_range(low: float, high: float) -> RangeSpace:
    """Return a range on a logarithmic scale: 0.01 to 0.1 is as wide as 0.1 to 1.

    Args:
        low: Smallest value.
        high: Largest value.
    """
    return RangeSpace(low, high, log=True, integer=isinstance(low, int) and isinstance(high, int))


def uniform_range(low: float, high: float) -> RangeSpace:
    """Return a range on a linear scale.

    Args:
        low: Smallest value.
        high: Largest value.
    """
    return RangeSpace(low, high, integer=isinstance(low, int) and isinstance(high, int))


def one_of(*values: Any) -> CategoricalSpace:
    """Return a discrete search space, such as the grid of a paper."""
    return CategoricalSpace(values)


def read_space(value: object, name: str, check: Callable[[Any], None]) -> Space:
    """Parse a search space in any form that a user may write.

    Args:
        value: ``0.001:0.3``, ``0.001:0.3:log``, ``16|32|64``, a single value, a list of values, a mapping with ``low``,
            ``high`` and optionally ``log``, or a space.
        name: Name of the option.
        check: Raises ``ConfigError`` for a value that the option does not accept.

    Raises:
        ConfigError: If the value is not a search space, or the option does not accept its values.
    """
    space = (
        value
        if isinstance(value, RangeSpace | CategoricalSpace)
        else parse_range(value) or CategoricalSpace(_values(value))
    )
    ends = (space.low, space.high) if isinstance(space, RangeSpace) else space.values
    if not ends:
        raise ConfigError(f"The search space of {name} is empty. {FORMAT}")
    for end in ends:
        try:
            check(end)
        except ConfigError as error:
            raise ConfigError(f"{error} {FORMAT}") from error
    if isinstance(space, CategoricalSpace):
        return space
    if not (math.isfinite(space.low) and math.isfinite(space.high) and space.low < space.high):
        raise ConfigError(f"The search space {name}={space} is not valid: the first number must be below the second.")
    if space.log and space.low <= 0:
        raise ConfigError(f"The search space {name}={space} is logarithmic, so it must start above 0.")
    return RangeSpace(space.low, space.high, space.log, _wholes_only(space, check))


def _wholes_only(space: RangeSpace, check: Callable[[Any], None]) -> bool:
    """Return whether the option accepts only integers, so that values between two integers are rejected."""
    if not (float(space.low).is_integer() and float(space.high).is_integer()):
        return False
    try:
        check(space.low + 0.5)
    except ConfigError:
        return True
    return False


def _number(text: Any) -> float:
    """Parse a number; integers stay integers because some options accept nothing else."""
    number = float(text)
    return int(number) if isinstance(text, int) or (isinstance(text, str) and text.strip().isdigit()) else number


def parse_range(value: object) -> RangeSpace | None:
    """Parse a string or a mapping as a range; return None if it is not a range."""
    if isinstance(value, Mapping):
        if not {"low", "high"} <= set(value) <= {"low", "high", "log"}:
            raise ConfigError(f"A range needs the keys low, high and optionally log, not {short_repr(value)}.")
        parts: list[Any] = [value["low"], value["high"], *(["log"] if value.get("log") else [])]
    else:
        parts = value.split(":") if isinstance(value, str) else []
    if len(parts) not in (2, 3) or (len(parts) == 3 and str(parts[2]).strip() != "log"):
        return None
    try:
        return RangeSpace(_number(parts[0]), _number(parts[1]), len(parts) == 3)
    except (TypeError, ValueError):
        if isinstance(value, Mapping):
            raise ConfigError(f"low and high of a range must be numbers, got {short_repr(value)}.") from None
        return None


def _values(value: object) -> tuple[Any, ...]:
    """Return the values of a choice; a string is split at bars and its parts are parsed as YAML scalars."""
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
