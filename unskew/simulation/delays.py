"""Delays of updates in rounds.

A delay is written ``kind`` or ``kind:value``: ``none``; ``fixed:K`` rounds; ``half-normal:S``, that is ``floor(|z|)``
with ``z ~ N(0, S^2)`` (Zhu et al. 2025, arXiv:2503.20138); ``lognormal:M,S``, that is ``floor(M exp(S z))`` with median
``M``; or ``trace:FILE`` with observed delays: a CSV file with a column ``delay``, and optionally a column ``client``
for delays per client; rows with an empty client apply to all clients without rows.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from unskew.errors import ConfigError, DataError, unknown_name
from unskew.expressions import parse_expression
from unskew.seeding import numpy_generator

KINDS = ("none", "fixed", "half-normal", "lognormal", "trace")
LONGEST = 1_000_000  # a delay beyond any run


class Delays:
    """Random delays in rounds, a pure function of seed, round and client.

    Args:
        spec: Delay expression, such as ``half-normal:20``; the docstring of the module lists all.
        seed: Seed of the run.
        per_client: Whether each client has one delay for the whole run instead of one per broadcast.

    Raises:
        ConfigError: If the expression is not a valid delay.
        DataError: If the trace cannot be read.

    >>> Delays("fixed:3", seed=0)(round=5, client=1)
    3
    >>> Delays("half-normal:20", 0)(7, 2) == Delays("half-normal:20", 0)(7, 2)
    True
    """

    def __init__(self, spec: str, seed: int, per_client: bool = False):
        self.kind, self.numbers = parse_delay(spec)
        self.seed = seed
        self.per_client = per_client
        self.trace: dict[int | None, list[int]] = {}
        if self.kind == "trace":
            self.trace = read_trace(Path(spec.partition(":")[2]))

    def check(self, clients: int) -> None:
        """Validate that a trace has a delay for each of ``clients`` clients (raises ``DataError`` otherwise)."""
        if self.kind == "trace" and None not in self.trace:
            without = next((k for k in range(clients) if k not in self.trace), None)
            if without is not None:
                raise DataError(
                    f"The trace has no delay for client {without} of {clients}. Add a row for it, or rows with an empty "
                    "client, which apply to all clients without rows."
                )

    @property
    def identity(self) -> str:
        """Digest of the trace, which must match when a run is resumed; empty without a trace."""
        rows = sorted((-1 if client is None else client, delays) for client, delays in self.trace.items())
        return hashlib.sha256(repr(rows).encode()).hexdigest()[:16] if self.trace else ""

    @property
    def instant(self) -> bool:
        """Return whether all updates arrive in the round of their broadcast."""
        return self.kind == "none"

    def __call__(self, round: int, client: int) -> int:
        """Return the number of rounds between the broadcast in ``round`` and the arrival; 0 for the same round."""
        if self.kind == "none":
            return 0
        if self.kind == "fixed":
            return int(self.numbers[0])
        draws = numpy_generator(self.seed, "delay", 0 if self.per_client else round, client)
        if self.kind == "trace":
            known = self.trace[client] if client in self.trace else self.trace[None]
            return known[int(draws.integers(len(known)))]
        z = float(draws.standard_normal())
        if self.kind == "half-normal":
            return min(LONGEST, math.floor(abs(z) * self.numbers[0]))
        median, sigma = self.numbers
        return min(LONGEST, math.floor(median * math.exp(min(30.0, sigma * z))))


def parse_delay(spec: str) -> tuple[str, tuple[float, ...]]:
    """Parse a delay into its kind and numbers.

    Args:
        spec: Delay expression, such as ``lognormal:4,0.5``.

    Raises:
        ConfigError: If the expression is not a valid delay, or no update would ever arrive.

    >>> parse_delay("lognormal:4,0.5")
    ('lognormal', (4.0, 0.5))
    """
    kind, _, value = spec.partition(":")
    if kind not in KINDS:
        raise ConfigError(unknown_name("delay", kind, KINDS))
    if kind == "none" and value:
        raise ConfigError(f"The delay none takes no value, but {spec!r} has {value!r}.")
    if kind == "trace" and not value:
        raise ConfigError("The delay trace needs a file: trace:delays.csv.")
    if kind in ("none", "trace"):
        return kind, ()
    wanted = 2 if kind == "lognormal" else 1
    example = {"fixed": "fixed:3", "half-normal": "half-normal:20", "lognormal": "lognormal:4,0.5"}[kind]
    expression = parse_expression(spec)
    numbers = expression.numbers()
    integral = kind != "fixed" or all(number == int(number) for number in numbers)
    if len(numbers) != wanted or min(numbers) < 0 or not integral or expression.options:
        raise ConfigError(f"The delay {spec!r} is not valid. Example: {example}.")
    if max(numbers) > LONGEST:
        raise ConfigError(f"The delay {spec!r} is longer than any run. Its numbers must be at most {LONGEST:,}.")
    return kind, numbers


def read_trace(path: Path) -> dict[int | None, list[int]]:
    """Read delays by client; the key None contains the delays of rows without a client.

    Args:
        path: CSV file with the columns ``delay`` and, optionally, ``client``.

    Raises:
        DataError: If the file does not exist, or a row is not a delay.
    """
    delays: dict[int | None, list[int]] = {}
    for where, row in trace_rows(path, ("delay",)):
        client: int | None = None
        if row.get("client") not in (None, ""):
            client = parse_nonnegative(row["client"], f"{where}: a client is a number from 0 on")
        delay = parse_nonnegative(row["delay"], f"{where}: a delay is an integer number of rounds, 0 or more")
        delays.setdefault(client, []).append(delay)
    if not delays:
        raise DataError(f"{path} contains no delays.")
    return delays


def trace_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Read the rows of a CSV file.

    Args:
        path: The file.
        columns: Columns that it must have.

    Yields:
        File and line for error messages, and the row.

    Raises:
        DataError: If the file cannot be read, a column is missing, or a row has too many values.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # the file may start with a byte order mark
            rows = csv.DictReader(file, restkey="beyond", skipinitialspace=True)
            missing = next((name for name in columns if name not in (rows.fieldnames or ())), None)
            if missing is not None:
                raise DataError(
                    f"{path} has no column {missing!r}. The first line must contain comma-separated column names."
                )
            for row in rows:
                if "beyond" in row:
                    raise DataError(f"{path}, line {rows.line_num}: there are more values than columns.")
                yield f"{path}, line {rows.line_num}", row
    except OSError as error:
        raise DataError(f"The trace {path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"The trace {path} is not a CSV file: {error}.") from error


def parse_nonnegative(text: str | None, what: str) -> int:
    """Parse a nonnegative integer.

    Args:
        text: Text to parse.
        what: Start of the error message, such as "a delay is an integer".

    Raises:
        DataError: If the text is not a nonnegative integer.

    >>> parse_nonnegative("3", "a delay is an integer")
    3
    """
    try:
        number = int(text or "")
    except ValueError:
        number = -1
    if number < 0:
        raise DataError(f"{what}, not {(text or '')[:20]!r}.")
    return number
