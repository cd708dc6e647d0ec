"""Virtual clock of a simulation: the time that transfers and local steps would take on real machines.

A client's update arrives ``latency + bytes down / downlink + steps * compute + latency + bytes up / uplink`` seconds after
the start of its round. A round ends when all updates in flight have arrived, or at its deadline.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.errors import ConfigError, DataError, unknown_name
from unskew.expressions import parse_expression
from unskew.protocol.messages import Update
from unskew.seeding import derive, fold, normal, uniform
from unskew.simulation.delays import parse_nonnegative, trace_rows
from unskew.simulation.server import Server

RATES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6}
"""Bytes per second of the units of bandwidths."""
DURATIONS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
"""Seconds of the units of durations."""
DEFAULTS = {"uplink": "inf", "downlink": "inf", "latency": "0", "compute": "0"}
"""Constants of a client, in the order of the columns of the table of speeds, and what they are if not configured."""
DISTRIBUTIONS = {"lognormal": ("median", "sigma"), "uniform": ("low", "high")}
WIDEST = 10.0
"""Largest sigma of a lognormal distribution."""


def parse_quantity(text: str, name: str) -> float:
    """Parse a bandwidth (bytes/s) or a duration (s).

    Args:
        text: Number with an optional unit; without one it is in bytes/s or s. ``inf`` is an unlimited bandwidth.
        name: Field of the section ``network``, or column of a trace.

    Raises:
        ConfigError: If the unit is unknown or the number is out of range.

    >>> parse_quantity("5MB/s", "uplink"), parse_quantity("40 Mbit/s", "downlink"), parse_quantity("50ms", "latency")
    (5000000.0, 5000000.0, 0.05)
    """
    units = RATES if name.endswith("link") else DURATIONS
    text = text.strip()
    unit = max((unit for unit in units if text.endswith(unit)), key=len, default="")
    try:
        number = float(text.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        number = math.nan
    positive = name in ("uplink", "downlink", "deadline")
    unlimited = number == math.inf and units is RATES
    if not (0 <= number < math.inf or unlimited) or (positive and number == 0):
        raise ConfigError(
            f"network.{name}={text[:40]!r} is not valid: use a {'positive' if positive else 'nonnegative'} number, "
            f"alone or with a unit: {', '.join(units)}."
        )
    return number


def parse_speed(text: str, name: str) -> tuple[str, tuple[float, ...]]:
    """Parse a constant, or a distribution over clients, into its kind and numbers in bytes/s or s.

    Args:
        text: Constant, such as ``5MB/s``, or distribution, such as ``lognormal:median=5MB/s,sigma=0.5``.
        name: Field of the section ``network``.

    Raises:
        ConfigError: If the text is neither.

    >>> parse_speed("uniform:low=10ms,high=1s", "latency")
    ('uniform', (0.01, 1.0))
    """
    if ":" not in text:
        return "constant", (parse_quantity(text, name),)
    expression = parse_expression(text)
    kind, options = expression.name, expression.options
    if kind not in DISTRIBUTIONS:
        raise ConfigError(unknown_name("distribution", kind, DISTRIBUTIONS))
    wanted = DISTRIBUTIONS[kind]
    if options.keys() != {*wanted} or expression.values:
        raise ConfigError(f"network.{name}={text!r} is not valid: {kind} needs the options {' and '.join(wanted)}.")
    first = parse_quantity(options[wanted[0]], name)
    if kind == "uniform":
        second = parse_quantity(options["high"], name)
        valid = first <= second < math.inf
    else:
        try:
            second = float(options["sigma"])
        except ValueError:
            second = math.nan
        valid = 0 <= second <= WIDEST and first < math.inf
    if not valid:
        limits = "low <= high" if kind == "uniform" else f"a finite median and 0 <= sigma <= {WIDEST:g}"
        raise ConfigError(f"network.{name}={text!r} is not valid: {kind} needs {limits}.")
    return kind, (first, second)


def draw_speeds(fields: Mapping[str, str | None], clients: int, seed: int) -> np.ndarray:
    """Draw the constants of all clients, a pure function of seed and client.

    Args:
        fields: Fields of the section ``network``; None for those that are not configured.
        clients: Number of clients ``K``.
        seed: Seed of the run.

    Returns:
        Uplink and downlink in bytes/s, latency and seconds per local step, float64 ``[K, 4]``.
    """
    key = torch.tensor(derive(seed, "client speed"))
    columns = []
    for number, (name, default) in enumerate(DEFAULTS.items()):
        kind, values = parse_speed(fields[name] or default, name)
        if kind == "constant":
            columns.append(np.full(clients, values[0]))
        elif kind == "uniform":
            share = uniform(fold(key, number), (clients,)).double().numpy()
            columns.append(values[0] + (values[1] - values[0]) * share)
        else:
            columns.append(values[0] * np.exp(values[1] * normal(fold(key, number), (clients,)).numpy()))
    return np.stack(columns, 1)


def read_speeds(path: Path, clients: int) -> np.ndarray:
    """Read the constants of all clients from a CSV file, see ``draw_speeds`` for the result.

    Args:
        path: File with the columns ``client``, ``uplink``, ``downlink``, ``latency`` and ``compute``, in bytes/s and s.
        clients: Number of clients ``K``; rows of further clients are ignored.

    Raises:
        DataError: If the file cannot be read, a value is invalid, or a client has no row or several.
    """
    rows: dict[int, list[float]] = {}
    for where, row in trace_rows(path, ("client", *DEFAULTS)):
        client = parse_nonnegative(row["client"], f"{where}: a client is a number from 0 on")
        if client in rows:
            raise DataError(f"{where}: client {client} has another row already. Remove one of the two.")
        try:
            rows[client] = [parse_quantity(row[name] or "", name) for name in DEFAULTS]
        except ConfigError as error:
            raise DataError(f"{where}: {error}") from error
    without = next((k for k in range(clients) if k not in rows), None)
    if without is not None:
        raise DataError(f"The trace {path} has no row for client {without} of {clients}. Add one.")
    return np.array([rows[k] for k in range(clients)])


class Clock:
    """Simulated time of a run, from the bytes that the server counts and the local steps that clients take.

    Args:
        server: Server of the run. Transfers that it has already counted, before the first round, take time.
        speeds: Constants of the clients, ``[K, 4]``, see ``draw_speeds``.
        deadline: Longest duration of a round in seconds; None for no limit.
        accepts_late: Whether updates that miss the deadline arrive in a later round instead of being lost.

    Attributes:
        now: Seconds since the start of the run.
        arrivals: Time at which each update in flight will have arrived, by client.
        num_late: Number of updates of the last round that were lost because they missed the deadline.
    """

    def __init__(self, server: Server, speeds: np.ndarray, deadline: float | None, accepts_late: bool):
        self.server = server
        self.speeds = speeds
        self.deadline = math.inf if deadline is None else deadline
        self.accepts_late = accepts_late
        self.arrivals: dict[int, float] = {}
        self.num_late = 0
        self.now = 0.0
        self.add_exchange({})
        self.latest = self.now
        self.bytes_before: dict[int, int] = {}

    @property
    def identity(self) -> str:
        """Digest of the clients' constants; those of a trace must match when a run is resumed."""
        return hashlib.sha256(self.speeds.tobytes()).hexdigest()[:16]

    @property
    def limit(self) -> float:
        """Time at which the current round ends at the latest."""
        return self.now + self.deadline

    def counted(self) -> dict[int, tuple[int, int]]:
        """Return the bytes up and down counted so far, by client."""
        return {client: (up, down) for client, (up, down) in self.server.traffic.total.clients.items()}

    def add_exchange(self, before: Mapping[int, tuple[int, int]]) -> None:
        """Wait for the slowest client of an exchange without training.

        Args:
            before: Output of ``counted`` before the exchange. Directions without bytes take no time.
        """
        after = self.counted()
        if not after:
            return
        clients = np.fromiter(after, np.int64)
        sizes = np.array([after[k] for k in after], float) - np.array([before.get(k, (0, 0)) for k in after], float)
        seconds = np.where(sizes > 0, self.speeds[clients, 2:3] + sizes / self.speeds[clients, :2], 0.0)
        self.now += float(seconds.sum(1).max())

    def start_round(self, cohort: Iterable[int]) -> None:
        """Note the bytes that the clients of a round received before it; called before its broadcasts.

        Args:
            cohort: Clients of the round.
        """
        traffic = self.server.traffic.total.clients
        self.bytes_before = {client: traffic.get(client, (0, 0))[1] for client in cohort}
        self.latest = self.now
        self.num_late = 0

    def arrival(self, update: Update) -> float:
        """Return the time at which an update of the current round arrives.

        Args:
            update: Update of a client of the round.
        """
        uplink, downlink, latency, compute = self.speeds[update.client].tolist()
        down = self.server.traffic.total.clients[update.client][1] - self.bytes_before[update.client]
        slices = self.server.broadcaster.slices(update.origin_round, update.client)[1]
        up = sum(self.server.traffic.upload_sizes(update, slices))
        time = self.now + latency + down / downlink + update.metrics["steps"] * compute + latency + up / uplink
        self.latest = max(self.latest, time)
        return float(time)

    def end_round(self) -> None:
        """Move to the end of the round, once all its updates are trained."""
        self.now = min(self.limit, max(self.latest, *self.arrivals.values(), self.now))

    def state(self) -> dict[str, Any]:
        """Return the state between two rounds, as JSON values."""
        return {"now": self.now, "arrivals": self.arrivals}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the output of ``state``.

        Args:
            state: Stored values.
        """
        self.now = float(state["now"])
        self.arrivals = {int(client): float(time) for client, time in state["arrivals"].items()}
