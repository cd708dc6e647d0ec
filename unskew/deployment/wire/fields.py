"""Validated access to the fields of a message."""

from __future__ import annotations

import json
import math
from typing import Any

from unskew.deployment.wire.tensor_codec import InvalidMessageError, printable

LARGEST_NUMBER, LARGEST_WEIGHT, LARGEST_METRIC = 1e9, 1e15, 1e38
"""Bounds of seconds and steps, of the weight of a client, and of metrics such as losses."""


def read_integer(config: dict[str, Any], name: str, largest: int = 1 << 62) -> int:
    """Return a non-negative integer field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.
        largest: Largest accepted value.

    Raises:
        InvalidMessageError: If the field is missing, is not such an integer, or is too large.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise InvalidMessageError(f"{name} is {printable(value)[:40]!r} instead of an integer from 0 to {largest}")
    return value


def read_number(config: dict[str, Any], name: str, lowest: float, highest: float) -> float:
    """Return a finite number field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.
        lowest: Smallest accepted value.
        highest: Largest accepted value.

    Raises:
        InvalidMessageError: If the field is missing, or is not a number in this range.
    """
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidMessageError(
            f"{name} is {printable(value)[:40]!r} instead of a number from {lowest:g} to {highest:g}"
        )
    return float(value)


def read_metric(metrics: dict[str, float], name: str) -> float:
    """Return a metric of a message; NaN if it was not finite and therefore not sent, as in a training that diverged.

    Args:
        metrics: Metrics of a message.
        name: Name of the metric.

    Raises:
        InvalidMessageError: If it is out of range.
    """
    missing = not math.isfinite(metrics.get(name, math.nan))
    return math.nan if missing else read_number(metrics, name, -LARGEST_METRIC, LARGEST_METRIC)


def read_text(config: dict[str, Any], name: str) -> str:
    """Return a string field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.

    Raises:
        InvalidMessageError: If the field is missing or is not a string.
    """
    value = config.get(name)
    if not isinstance(value, str):
        raise InvalidMessageError(f"{name} is {printable(value)[:40]!r} instead of a string")
    return value


def parse_json_field(config: dict[str, Any], name: str) -> Any:
    """Parse a JSON field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.

    Raises:
        InvalidMessageError: If the field is missing or is not JSON.
    """
    try:
        return json.loads(read_text(config, name))
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(f"{name} cannot be read") from error
