"""Parser for partitions written as ``name[:value][,option=value...]``."""

from __future__ import annotations

import math

from unskew import plugins
from unskew.errors import ConfigError, unknown_name
from unskew.expressions import parse_expression

PARTITIONS: dict[str, str] = {
    "iid": "iid: a shuffled, equal share",
    "dirichlet": "dirichlet:ALPHA: label skew: each class is divided among clients by a Dirichlet draw. 0.1 is strong skew, "
    "1 mild, 100 nearly IID",
    "classes": "classes:S: exactly S of the C classes; S must divide C. With G = C / S groups, client i gets the "
    "classes S (i mod G) to S (i mod G) + S - 1; the clients of a group share its classes equally",
    "sorted": "sorted:COLUMN: a contiguous range of the samples, sorted by a column; plain sorted sorts by label",
    "quantity": "quantity:ALPHA: quantity skew: sizes follow a Dirichlet draw, labels are IID",
    "natural": "natural:COLUMN: one client per value of a column, such as a user or a hospital",
}
"""The form of each partition, and what a client gets."""
OPTIONS: dict[str, dict[str, str]] = {
    "iid": {"each": "samples per client; the rest is not used. By default, all samples are used"},
    "dirichlet": {
        "min": "minimum client size, 10 by default; the draw is repeated until every client reaches it. min=half means half "
        "of an equal share",
        "balanced": "a client that has an equal share receives no further samples (default). balanced=false,min=1 is the "
        "plain draw",
        "blocks": "clients per block, by default all. Each class is divided equally among blocks with draws of their own, so "
        "that even a thousand clients can each get min samples",
        "draws": "maximum draws per block, 1000 by default, fewer if they would take minutes. min=half with blocks of 20 "
        "clients needs about 5,000",
        "by": "column whose values are divided, instead of the label",
    },
    "classes": {
        "alpha": "exactly S classes, drawn by the seed: each class is divided among its clients by a Dirichlet draw with "
        "this concentration, at least one sample each. The numbers of clients per class differ by at most one. ExDir of Li "
        "and Lyu 2023 (arXiv:2311.03154)",
        "by": "column whose values are divided, instead of the label",
    },
    "quantity": {"min": "minimum client size, 1 by default"},
    "natural": {"min": "values with fewer samples are not used, 1 by default"},
}
"""The options of each partition, with their meanings."""
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
    allowed = OPTIONS.get(name, {})
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
