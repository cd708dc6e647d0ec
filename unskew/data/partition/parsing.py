"""Parser for partitions written as ``name[:value][,option=value...]``."""

from __future__ import annotations

import math

from unskew import plugins
from unskew.errors import ConfigError, unknown_name
from unskew.expressions import parse_expression

PARTITIONS: dict[str, str] = {
    "iid": "iid: shuffle and split equally",
    "dirichlet": "dirichlet:ALPHA[,min=10|half][,balanced=true][,blocks=B][,draws=N][,by=COLUMN]: label skew",
    "classes": "classes:S[,alpha=A][,by=COLUMN]: exactly S classes per client, divided equally or by Dirichlet draws",
    "sorted": "sorted[:COLUMN]: sort by label, or by a column, and split into equal chunks",
    "quantity": "quantity:ALPHA[,min=1]: client sizes are drawn from a Dirichlet distribution, labels are iid",
    "natural": "natural:COLUMN[,min=1]: one client per value of a column, such as a user or a writer",
}
OPTIONS: dict[str, tuple[str, ...]] = {
    "iid": ("each",),
    "dirichlet": ("min", "balanced", "blocks", "draws", "by"),
    "classes": ("alpha", "by"),
    "quantity": ("min",),
    "natural": ("min",),
}
COLUMNS = ("natural", "sorted")
"""Partitions whose value is a column."""
LARGEST = 10**12  # more samples than any data set has
EXAMPLES = {"dirichlet": "dirichlet:0.1", "classes": "classes:2", "quantity": "quantity:0.5", "natural": "natural:user"}


def parse_partition(spec: str) -> tuple[str, str, dict[str, str]]:
    """Parse ``name:value,option=value`` into name, value (may be empty) and options.

    >>> parse_partition("dirichlet:0.1,min=half")
    ('dirichlet', '0.1', {'min': 'half'})
    """
    expression = parse_expression(spec)
    name, options = expression.name, dict(expression.options)
    value = expression.values[0] if expression.values else ""
    if name not in PARTITIONS:
        plugins.find_plugin(plugins.PARTITIONS, "partition", name, PARTITIONS)
    if name in EXAMPLES and not value:
        raise ConfigError(f"The partition {name} requires a value, for example {EXAMPLES[name]}.")
    if name == "iid" and value:
        raise ConfigError(f"The partition iid does not take a value. Remove {value!r} from {spec!r}.")
    allowed = OPTIONS.get(name, ())
    wrong = [*expression.values[1:], *(f"{key}=" for key, text in options.items() if not text)]
    if wrong:
        hint = f' Write a column name with commas in double quotes: {name}:"site, name".' * (name in COLUMNS)
        raise ConfigError(f"In the partition {spec!r}, {wrong[0]!r} is not of the form option=value.{hint}")
    for key in options if name in PARTITIONS else ():
        if not allowed:
            raise ConfigError(f"The partition {name} does not take options. Remove {key!r} from {spec!r}.")
        if key not in allowed:
            raise ConfigError(unknown_name("option", key, allowed, f"The partition {name}"))
    return name, value, options


def partition_column(spec: object) -> str | None:
    """Return the column whose values decide a partition; None if no column does.

    >>> partition_column("natural:user"), partition_column("dirichlet:0.1,by=genre"), partition_column("sorted")
    ('user', 'genre', None)
    """
    if not isinstance(spec, str):  # a partitioner of flwr_datasets may have a column
        by = getattr(spec, "_partition_by", None)
        return by if isinstance(by, str) else None
    name, value, options = parse_partition(spec)
    return options.get("by") or (value if name in COLUMNS else None) or None


def parse_positive(text: str, what: str) -> float:
    """Parse a positive finite number.

    Args:
        text: Text to parse.
        what: Name of the number, for errors.
    """
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{what} must be a number, not {text!r}.") from None
    if not (number > 0 and math.isfinite(number)):
        raise ConfigError(f"{what} must be a positive number, not {text}.")
    return number


def parse_count(text: str, what: str) -> int:
    """Parse an integer from 1 to ``LARGEST``.

    Args:
        text: Text to parse.
        what: Name of the number, for errors.
    """
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(f"{what} must be an integer, not {text!r}.") from None
    if number < 1:
        raise ConfigError(f"{what} must be at least 1, not {number}.")
    if number > LARGEST:
        raise ConfigError(f"{what} must be at most {LARGEST:,}, not {number}.")
    return number


def parse_bool(text: str, what: str) -> bool:
    """Parse ``true`` or ``false``, ignoring case.

    Args:
        text: Text to parse.
        what: Name of the option, for errors.
    """
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"{what} must be true or false, not {text!r}.")
    return text.lower() == "true"
