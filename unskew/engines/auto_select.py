"""Resolution of ``auto``: engine, number of workers, and number of clients per grouped network."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unskew.engines import processes, timing
from unskew.engines.base import EngineConfig
from unskew.engines.cpu import num_cores, num_threads
from unskew.engines.names import BUILT_IN, parse_engine
from unskew.errors import ConfigError
from unskew.filesystem import read_json, write_atomic
from unskew.models.grouped.context import grouped_unchecked

FILE = "engine.json"
SHARE, LONGEST, SHORTEST = 0.02, 2.0, 0.1
"""A trial takes this share of the run at most, and so many seconds; less than the shortest is not worth beginning."""
FEWEST_STEPS = 500
"""Steps of all clients in all rounds, below which nothing is measured."""
MOSTLY = 0.5
"""Share of whole batches from which on clients are worth training together."""
WIDEST = 25
"""More clients together gain nothing."""
FEW = 3
"""Local steps that a trial takes at a time."""
MEMORY = 1 << 30
"""Bytes that the clients of one part may take at a time, roughly."""
MARGIN = 0.95
"""Largest share of the time of the simplest engine at which another one is chosen instead."""


@dataclass(frozen=True)
class EngineChoice:
    """Resolved way to train the clients of a run.

    Attributes:
        engine: Its name, not ``auto``.
        workers: Processes of the engine ``processes``.
        clients_per_group: Clients that are trained as one network.
        decided: ``given`` by the user, by a ``rule``, or ``measured``.
        trial: Where it was measured: seconds of a round by each candidate, as predicted from its steps.
        asked: What the user asked for, for a run that is resumed.
    """

    engine: str
    workers: int
    clients_per_group: int = 1
    decided: str = "rule"
    trial: dict[str, float] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)


class EngineCandidate(NamedTuple):
    """Candidate in a timing trial."""

    engine: str
    workers: int
    clients_per_group: int

    def said(self, usual: int) -> str:
        """Its name in a trial's table; so many workers are not mentioned."""
        parts = [self.engine]
        if self.engine == "processes" and self.workers != usual:
            parts.append(f"{self.workers} workers")
        if self.clients_per_group > 1:
            parts.append(f"{self.clients_per_group} together")
        return ", ".join(parts)


@dataclass(frozen=True)
class EngineRequest:
    """Requested engine: ``engine`` and ``together`` may be ``auto``, ``workers`` may be None; ``address`` names a cluster."""

    engine: str
    workers: int | None
    clients_per_group: int | str
    address: str | None = None

    @property
    def identity(self) -> list[Any]:
        """By which a kept choice is known to be the answer."""
        return [self.engine, self.workers, self.clients_per_group]


def choose_engine(
    asked: EngineRequest, setup: EngineConfig, cohort: int, rounds: int, folder: Path | None, resume: bool
) -> EngineChoice:
    """The choice of a run: the one kept in its folder, or else what was asked for, a rule, or a trial.

    Args:
        asked: What the user asked for.
        setup: The run.
        cohort: Clients in a round.
        rounds: Rounds of the run.
        folder: The run folder, which keeps the choice.
        resume: Whether the run goes on: what it did not keep, it never measured.
    """
    cluster = asked.engine == "auto" and asked.address is not None
    if cluster or parse_engine(asked.engine)[0] not in BUILT_IN:
        # Not measured: nodes differ, and bits must not depend on who trains a client.
        clients_per_group = min(asked.clients_per_group, cohort) if isinstance(asked.clients_per_group, int) else 1
        return EngineChoice(
            "ray" if cluster else asked.engine, asked.workers or 0, clients_per_group, "given", asked=asked.identity
        )
    if asked.engine == "vectorized" and asked.clients_per_group != "auto":
        raise ConfigError("vectorized maps all clients of a round anyway; together is for inline and processes.")
    kept_choice = _kept(folder) if resume else None
    if kept_choice is not None and kept_choice.asked == asked.identity and _possible(kept_choice):
        return kept_choice
    if setup.device.type != "cpu":
        if asked.clients_per_group not in ("auto", 1):
            raise ConfigError("Clients are trained together on a CPU only; on another device take engine=vectorized.")
        engine = "vectorized" if asked.engine == "auto" else asked.engine
        return EngineChoice(engine, 1, asked=asked.identity)
    # More workers than clients in a round would have nothing to do.
    workers = min(asked.workers or num_cores(), cohort)
    several = workers > 1 and cohort > 1 and processes.fork_available()
    engine = ("processes" if several else "inline") if asked.engine == "auto" else asked.engine
    plain = EngineChoice(engine, workers, 1, "rule" if "auto" in asked.identity else "given", asked=asked.identity)
    if isinstance(asked.clients_per_group, int):
        plain = EngineChoice(engine, workers, min(asked.clients_per_group, cohort), plain.decided, asked=asked.identity)
    open_ended = asked.engine == "auto" or (asked.engine == "processes" and asked.clients_per_group == "auto")
    choice = plain
    if open_ended and not resume:
        with contextlib.suppress(Exception):  # what is wrong with a step, the run itself says better
            choice = _measured(asked, plain, setup, cohort, rounds)
    if folder is not None:
        write_atomic(folder / FILE, (json.dumps(asdict(choice), indent=2) + "\n").encode())
    return choice


def _kept(folder: Path | None) -> EngineChoice | None:
    if folder is None:
        return None
    try:
        return EngineChoice(**read_json(folder / FILE))
    except (OSError, ValueError, TypeError):
        return None


def _possible(choice: EngineChoice) -> bool:
    return choice.engine != "processes" or processes.fork_available()


def _measured(asked: EngineRequest, plain: EngineChoice, setup: EngineConfig, cohort: int, rounds: int) -> EngineChoice:
    """The fastest by a trial; ``plain`` where the run is too short for one."""
    steps, full_share = _work(setup)
    if rounds * cohort * steps < FEWEST_STEPS:
        return plain
    began = time.perf_counter()
    with num_threads(1):
        alone = timing.median_seconds(timing.steps_workload(setup, None, 1, 1), 0)
    budget = min(LONGEST, SHARE * rounds * cohort * steps * alone / plain.workers)

    def left() -> float:
        return budget - (time.perf_counter() - began)

    if left() < SHORTEST:
        return plain
    form, groups = None, [1]
    if asked.clients_per_group != 1 and (isinstance(asked.clients_per_group, int) or full_share > MOSTLY):
        form = grouped_unchecked(setup.spec)
        groups = (
            [plain.clients_per_group]
            if isinstance(asked.clients_per_group, int)
            else _groups(setup, cohort, plain.workers)
        )
    if form is None:
        groups = [1]
    few = max(1, min(FEW, round(steps), int(left() / (8 * max(groups) * alone))))
    timings: dict[EngineCandidate, float] = {}

    def predict(engine: str, workers: int, seconds: dict[int, float]) -> None:
        for k, taken in seconds.items():
            # A batch of another size is a step of its own, at the pace of one client.
            step = taken / few if k == 1 else full_share * taken / few + (1 - full_share) * k * alone
            timings[EngineCandidate(engine, workers, k)] = math.ceil(math.ceil(cohort / k) / workers) * steps * step

    if plain.engine == "processes":
        share = 0.75 if asked.engine == "auto" else 1.0
        predict(
            "processes",
            plain.workers,
            timing.time_in_processes(setup, form, groups, few, plain.workers, share * left()),
        )
        half = plain.workers // 2
        if asked.workers is None and half > 1 and timings:
            # Where cores share their units, or wait for the same memory, fewer workers can be as fast, or faster.
            best = min(timings, key=lambda one: timings[one]).clients_per_group
            predict("processes", half, timing.time_in_processes(setup, form, [best], few, half, left() / 2))
    # With all threads a round takes the time of one thread divided by their number, at best.
    hopeless = min(timings.values(), default=math.inf) < cohort * steps * alone / num_cores()
    if plain.engine == "inline" or (asked.engine == "auto" and not hopeless):
        for k in groups if plain.engine == "inline" else groups[:1]:
            if left() > 2 * k * few * alone:
                predict("inline", 1, {k: timing.median_seconds(timing.steps_workload(setup, form, k, few), left() / 2)})
    return _fastest(plain, timings)


def _fastest(plain: EngineChoice, found: dict[EngineCandidate, float]) -> EngineChoice:
    first = EngineCandidate(plain.engine, plain.workers if plain.engine == "processes" else 1, plain.clients_per_group)
    if first not in found:  # no time for what is to be beaten
        return plain
    best = min(found, key=lambda name: found[name])
    chosen = best if found[best] < MARGIN * found[first] else first
    table = {name.said(plain.workers): round(seconds, 6) for name, seconds in found.items()}
    return EngineChoice(chosen.engine, chosen.workers, chosen.clients_per_group, "measured", table, plain.asked)


def _work(setup: EngineConfig) -> tuple[float, float]:
    """Mean number of local steps of a client, and the share of steps whose batch is whole."""
    training, clients = setup.training, setup.federation.clients
    sizes = {k: clients[k].examples for k in range(0, len(clients), math.ceil(len(clients) / timing.SAMPLED))}
    cuts = [training.cuts(size) for size in sizes.values() if size]
    count = [training.steps(size, client) for client, size in sizes.items() if size]
    full_shares = [sum(c.stop - c.start == training.batch_size for c in cut) / max(1, len(cut)) for cut in cuts]
    total = max(1, sum(count))
    return total / max(1, len(count)), sum(w * c for w, c in zip(full_shares, count, strict=True)) / total


def _groups(setup: EngineConfig, cohort: int, workers: int) -> list[int]:
    """Numbers of clients together to try: as many as leave all workers equal work, few different ones; 1 comes first."""
    spec = setup.spec
    values = 6 * spec.size + 4 * setup.training.batch_size * spec.widest
    most = min(WIDEST, cohort, MEMORY // (values * spec.dtype.itemsize))
    even = {math.ceil(cohort / (workers * turns)) for turns in range(1, cohort + 1)}
    fitting = sorted(k for k in even if 1 < k <= most)
    chosen = {min(fitting, key=lambda k: abs(k - wanted)) for wanted in (8, WIDEST)} if fitting else set()
    return [1, *sorted(chosen)]
