"""Resolution of ``auto``: engine, number of workers, and number of clients per grouped network."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from unskew.engines import calibration, processes, timing
from unskew.engines.base import EngineConfig
from unskew.engines.calibration import Measurement
from unskew.engines.cpu import num_cores, num_threads
from unskew.engines.names import BUILT_IN, parse_engine
from unskew.errors import CheckpointError, ConfigError
from unskew.json_models import STRICT, read_model, write_model
from unskew.models.grouped.context import GroupedModel, grouped_unchecked
from unskew.models.user_modules import describe_error

LOG = logging.getLogger("unskew")
FILE = "engine.json"
MIN_STEPS = 150
"""Local steps of all clients in all rounds, below which nothing is measured."""
SHORT_SECONDS = 6.0
"""Estimated duration, of a run and of earlier runs that timed no groups either, below which groups are not timed."""
LONG_SECONDS = 30.0
"""The same duration, from which groups are timed for every model, not only for those with short steps."""
SHORT_STEP = 4e-3
"""CPU seconds of a local step below which a model is likely to train faster in groups."""
LONG_STEP = 50e-3
"""CPU seconds of a local step from which groups are not timed: such models keep a core busy by themselves."""
MIN_FULL_SHARE = 0.5
"""Share of full batches below which clients are not grouped."""
GROUP_SIZES = (8, 25)
"""Group sizes to time; sizes near them that give all workers equal work are used."""
GROUP_SECONDS = 0.15
"""CPU seconds that one run of a workload should take at most."""
MAX_GROUP_BYTES = 1 << 30
"""Approximate memory limit of a group of clients."""
MARGIN = 0.95
"""Groups or fewer workers are used if they take at most this share of the default's time."""
INLINE_MARGIN = 0.85
"""``inline`` replaces ``processes`` if it takes at most this share of the time: other programs slow it down more."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class EngineChoice:
    """Resolved way to train the clients of a run.

    Attributes:
        engine: Name of the engine, not ``auto``.
        workers: Number of worker processes of ``processes``.
        clients_per_group: Number of clients that are trained as one network.
        decided: ``given`` by the user, by a ``rule``, or ``measured``.
        trial: Predicted seconds of a round for each measured candidate.
        asked: The user's request, for a run that is resumed.
    """

    engine: str
    workers: Annotated[int, pydantic.Field(ge=0, le=4096)]
    clients_per_group: Annotated[int, pydantic.Field(ge=1, le=1024)] = 1
    decided: Literal["given", "rule", "measured"] = "rule"
    trial: dict[str, float] = field(default_factory=dict)
    asked: list[str | int | None] = field(default_factory=list)


class EngineCandidate(NamedTuple):
    """Engine, workers and group size that are compared with others."""

    engine: str
    workers: int
    clients_per_group: int

    def label(self, default_workers: int) -> str:
        """Return the name in the table of a trial; the default number of workers is not mentioned."""
        parts = [self.engine]
        if self.engine == "processes" and self.workers != default_workers:
            parts.append(f"{self.workers} workers")
        if self.clients_per_group > 1:
            parts.append(f"{self.clients_per_group} together")
        return ", ".join(parts)


@dataclass(frozen=True)
class EngineRequest:
    """Engine requested by the user.

    Attributes:
        engine: Name of an engine, or ``auto``.
        workers: Number of worker processes, or None.
        clients_per_group: Number of clients per grouped network, or ``auto``.
        address: Address of a Ray cluster, or None.
    """

    engine: str
    workers: int | None
    clients_per_group: int | str
    address: str | None = None

    @property
    def identity(self) -> list[Any]:
        """Values by which a stored choice is recognized as the answer to this request."""
        return [self.engine, self.workers, self.clients_per_group]


@dataclass(frozen=True)
class Budget:
    """Local work of a run.

    Attributes:
        cohort: Clients per round.
        rounds: Number of rounds.
        steps: Mean number of local steps of a client.
        full_share: Share of steps with a full batch.
    """

    cohort: int
    rounds: int
    steps: float
    full_share: float

    @property
    def total_steps(self) -> float:
        """Local steps of all clients in all rounds."""
        return self.rounds * self.cohort * self.steps


def choose_engine(
    request: EngineRequest, setup: EngineConfig, cohort: int, rounds: int, folder: Path | None, resume: bool
) -> EngineChoice:
    """Resolve a request: use the choice stored in the run folder, the request itself, a rule, or a measurement.

    Args:
        request: The user's request.
        setup: Configuration of the engine.
        cohort: Clients per round.
        rounds: Number of rounds.
        folder: Run folder, which stores the choice; None for a run without a folder.
        resume: Whether the run is resumed; then nothing is measured.

    Raises:
        ConfigError: If the request is contradictory.
    """
    cluster = request.engine == "auto" and request.address is not None
    if cluster or parse_engine(request.engine)[0] not in BUILT_IN:
        # Not measured: nodes differ, and bits must not depend on who trains a client.
        clients_per_group = min(request.clients_per_group, cohort) if isinstance(request.clients_per_group, int) else 1
        return EngineChoice(
            "ray" if cluster else request.engine,
            request.workers or 0,
            clients_per_group,
            "given",
            asked=request.identity,
        )
    if request.engine == "vectorized" and request.clients_per_group != "auto":
        raise ConfigError(
            "clients_per_group applies to inline and processes; vectorized always groups all clients of a round. Remove it."
        )
    # More workers than clients in a round would have nothing to do.
    workers = min(request.workers or num_cores(), cohort)
    kept_choice = _stored_choice(folder) if resume else None
    if kept_choice is not None and kept_choice.asked == request.identity and _is_available(kept_choice):
        return replace(kept_choice, workers=min(kept_choice.workers, workers))
    if setup.device.type != "cpu":
        if request.clients_per_group not in ("auto", 1):
            raise ConfigError("clients_per_group needs device=cpu; on another device, use engine=vectorized.")
        engine = engine_by_rule(setup.device.type, 1) if request.engine == "auto" else request.engine
        return EngineChoice(engine, 1, asked=request.identity)
    engine = engine_by_rule("cpu", workers) if request.engine == "auto" else request.engine
    plain = EngineChoice(engine, workers, 1, "rule" if "auto" in request.identity else "given", asked=request.identity)
    if isinstance(request.clients_per_group, int):
        plain = EngineChoice(
            engine, workers, min(request.clients_per_group, cohort), plain.decided, asked=request.identity
        )
    open_ended = request.engine == "auto" or (request.engine == "processes" and request.clients_per_group == "auto")
    choice = plain
    if open_ended and not resume:
        try:
            choice = _measure(request, plain, setup, Budget(cohort, rounds, *_local_work(setup)))
        except Exception as error:  # the run itself reports what is wrong with a step
            LOG.info("Engines could not be compared (%s), so %s is used.", describe_error(error), plain.engine)
    if folder is not None:
        write_model(folder / FILE, choice)
    return choice


def engine_by_rule(device: str, workers: int) -> str:
    """Return the engine of ``auto`` without a measurement.

    Args:
        device: Type of the device, such as ``cpu``.
        workers: Number of worker processes, at most the clients of a round.
    """
    if device != "cpu":
        return "vectorized"
    return "processes" if workers > 1 and processes.fork_available() else "inline"


def _stored_choice(folder: Path | None) -> EngineChoice | None:
    if folder is None:
        return None
    try:
        return read_model(folder / FILE, EngineChoice)
    except CheckpointError:  # without the file, the choice is made again
        return None


def _is_available(choice: EngineChoice) -> bool:
    return choice.engine in BUILT_IN and (choice.engine != "processes" or processes.fork_available())


def _measure(request: EngineRequest, plain: EngineChoice, setup: EngineConfig, budget: Budget) -> EngineChoice:
    """Return the fastest candidate by measurement, or ``plain`` if the run is too short for one."""
    if budget.total_steps < MIN_STEPS:
        return plain
    inputs = str(setup.federation.clients[timing.largest_client(setup)].x.dtype)
    key = calibration.calibration_key(setup, round(budget.steps), plain.workers, inputs)
    known = calibration.read_entries().get(key)
    alone = known.alone if known else _seconds_alone(setup)
    duration = budget.total_steps * alone / plain.workers + (known.unmeasured if known else 0.0)
    groups, form = _group_sizes(request, plain, setup, budget), None
    stored = known is not None and all(f"{plain.workers}x{k}" in known.processes for k in groups)
    worth_it = duration >= SHORT_SECONDS and alone < SHORT_STEP
    worth_it = worth_it or (duration >= LONG_SECONDS and alone < LONG_STEP) or groups == [1]
    if groups != [1]:
        form = grouped_unchecked(setup.spec) if worth_it or stored or plain.clients_per_group > 1 else None
        groups = groups if form is not None else [1]
    steps = max(1, min(round(budget.steps), int(GROUP_SECONDS / (max(groups) * alone))))
    if known is None or not (stored or groups == [1]):  # times without groups have too many steps for a trial of groups
        known = Measurement(alone=alone, steps=steps)
    trial = Trial(request, plain, setup, budget, form, known)
    if not (worth_it or stored):
        trial.store(unmeasured=duration)
    trial.time_groups(groups)
    trial.time_inline(groups)
    if trial.changed:
        calibration.save_measurement(key, trial.measurement)
    return trial.fastest()


@dataclass
class Trial:
    """Comparison of candidates by measured and stored times.

    Attributes:
        request: The user's request.
        plain: Default choice.
        setup: Configuration of the engine.
        budget: Local work of the run.
        form: Grouped form of the model, if groups are compared.
        measurement: Times that are known already.
        changed: Whether times were added to the measurement.
        predicted: Predicted seconds of a round of each candidate.
    """

    request: EngineRequest
    plain: EngineChoice
    setup: EngineConfig
    budget: Budget
    form: GroupedModel | None
    measurement: Measurement
    changed: bool = field(default=False, init=False)
    predicted: dict[EngineCandidate, float] = field(default_factory=dict, init=False)

    def time_groups(self, groups: list[int]) -> None:
        """Compare groups of clients in worker processes, then the best of them in half as many workers."""
        if self.plain.engine != "processes":
            return
        self._in_processes(groups, self.plain.workers)
        half = self.plain.workers // 2
        if self.request.workers is None and half > 1 and self.predicted:
            # Fewer workers can be faster if cores share units or wait for the same memory.
            best = min(self.predicted, key=lambda candidate: self.predicted[candidate])
            self._in_processes([best.clients_per_group], half)

    def time_inline(self, groups: list[int]) -> None:
        """Compare ``inline``, if the request allows it and it can be the fastest."""
        budget = self.budget
        if self.plain.engine == "inline":
            seconds = timing.min_seconds(self._workloads(groups), time.perf_counter)
            self._predict("inline", 1, seconds)
            return
        # With all threads, a round takes at best the time of one thread divided by the number of threads.
        at_best = budget.cohort * budget.steps * self.measurement.alone / num_cores()
        fastest = min(self.predicted.values(), default=math.inf)
        if self.request.engine != "auto" or at_best > INLINE_MARGIN * fastest:
            return
        if self.measurement.inline is None:
            seconds = timing.min_seconds(self._workloads([1]), time.perf_counter)
            self.store(inline=seconds[1])
        assert self.measurement.inline is not None
        self._predict("inline", 1, {1: self.measurement.inline})

    def fastest(self) -> EngineChoice:
        """Return the choice with the shortest predicted round that beats the default by its margin."""
        plain, predicted = self.plain, self.predicted
        workers = plain.workers if plain.engine == "processes" else 1
        default = EngineCandidate(plain.engine, workers, plain.clients_per_group)
        if default not in predicted:  # there is nothing to compare with
            return plain
        allowed = {
            candidate: seconds
            for candidate, seconds in predicted.items()
            if seconds < predicted[default] * (MARGIN if candidate.engine == plain.engine else INLINE_MARGIN)
        }
        chosen = min(allowed, key=lambda candidate: allowed[candidate], default=default)
        table = {candidate.label(plain.workers): round(seconds, 6) for candidate, seconds in predicted.items()}
        return EngineChoice(chosen.engine, chosen.workers, chosen.clients_per_group, "measured", table, plain.asked)

    def _workloads(self, groups: list[int]) -> dict[int, Any]:
        steps = self.measurement.steps
        return {k: timing.steps_workload(self.setup, self.form, k, steps) for k in groups}

    def _in_processes(self, groups: list[int], workers: int) -> None:
        keys = {k: f"{workers}x{k}" for k in groups}
        if any(key not in self.measurement.processes for key in keys.values()):
            seconds = timing.time_in_processes(self.setup, self.form, groups, self.measurement.steps, workers)
            self.store(processes={**self.measurement.processes, **{keys[k]: s for k, s in seconds.items()}})
        known = self.measurement.processes
        self._predict("processes", workers, {k: known[key] for k, key in keys.items() if key in known})

    def store(self, **values: Any) -> None:
        """Set fields of the measurement, which is then written to the calibration file."""
        self.measurement = self.measurement.model_copy(update=values)
        self.changed = True

    def _predict(self, engine: str, workers: int, seconds: Mapping[int, float]) -> None:
        """Predict the seconds of a round from the seconds of each group size."""
        budget, alone, steps = self.budget, self.measurement.alone, self.measurement.steps
        for k, taken in seconds.items():
            step = taken / steps
            if k > 1:  # a batch of another size is trained one client at a time
                step = budget.full_share * step + (1 - budget.full_share) * k * alone
            turns = math.ceil(math.ceil(budget.cohort / k) / workers)
            self.predicted[EngineCandidate(engine, workers, k)] = turns * budget.steps * step


def _seconds_alone(setup: EngineConfig) -> float:
    """Measure the CPU seconds of one local step of one client."""
    with num_threads(1):
        return timing.min_seconds({1: timing.steps_workload(setup, None, 1, 1)}, time.process_time)[1]


def _local_work(setup: EngineConfig) -> tuple[float, float]:
    """Return the mean number of local steps of a client, and the share of steps with a full batch."""
    training, clients = setup.training, setup.federation.clients
    every = math.ceil(len(clients) / timing.MAX_INSPECTED)
    sizes = {k: clients[k].num_samples for k in range(0, len(clients), every)}
    cuts = [training.cuts(size) for size in sizes.values() if size]
    count = [training.steps(size, client) for client, size in sizes.items() if size]
    full_shares = [sum(c.stop - c.start == training.batch_size for c in cut) / max(1, len(cut)) for cut in cuts]
    total = max(1, sum(count))
    return total / max(1, len(count)), sum(w * c for w, c in zip(full_shares, count, strict=True)) / total


def _group_sizes(request: EngineRequest, plain: EngineChoice, setup: EngineConfig, budget: Budget) -> list[int]:
    """Return the group sizes to compare; sizes that give all workers equal work, the default first."""
    if isinstance(request.clients_per_group, int):
        return [plain.clients_per_group]
    if budget.full_share <= MIN_FULL_SHARE:
        return [1]
    spec, cohort, workers = setup.spec, budget.cohort, plain.workers
    values = 6 * spec.size + 4 * setup.training.batch_size * spec.widest
    limit = min(cohort, MAX_GROUP_BYTES // (values * spec.dtype.itemsize))
    even = {math.ceil(cohort / (workers * turns)) for turns in range(1, cohort + 1)}
    fitting = sorted(k for k in even if 1 < k <= min(limit, max(GROUP_SIZES)))
    chosen = {min(fitting, key=lambda k: abs(k - wanted)) for wanted in GROUP_SIZES} if fitting else set()
    return [1, *sorted(chosen)]
