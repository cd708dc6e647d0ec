"""Resolution of ``auto``: engine, number of workers, and number of clients that are trained at once."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import torch

from unskew.engines import calibration, costs, processes, timing
from unskew.engines.base import EngineConfig
from unskew.engines.calibration import Measurement
from unskew.engines.cpu import num_cores, num_threads
from unskew.engines.names import BUILT_IN, parse_engine
from unskew.errors import CheckpointError, ConfigError
from unskew.json_models import STRICT, read_model, write_model
from unskew.models.grouped.context import GroupedModel, MappedModel
from unskew.models.user_modules import describe_error

LOG = logging.getLogger("unskew")
FILE = "engine.json"
SHARE = 0.05
"""Largest share of a command's estimated duration, with earlier runs that lacked the same times, that a trial may take."""
REPEATED = 3
"""Minimum number of executions of each workload in a trial."""
LONG_STEP = 50e-3
"""Estimated seconds of a local step from which clients are not grouped: such models keep a core busy by themselves."""
MIN_FULL_SHARE = 0.5
"""Share of full batches below which clients are not grouped."""
GROUP_SIZES = (8, 25)
"""Group sizes to compare; sizes near them that give all workers equal work are used."""
GROUP_SECONDS = 0.15
"""CPU seconds that one run of a workload should take at most."""
MAX_GROUP_BYTES = 1 << 30
"""Approximate memory limit of a group of clients."""
MARGIN = 0.95
"""Groups or fewer workers are used if a run takes at most this share of the default's time."""
UNMEASURED_MARGIN = 0.9
"""The same if one of the two is only estimated."""
UNMAPPABLE = 1e6
"""Seconds of a local step of a group that cannot be mapped, so that it is not tried again."""
INLINE_MARGIN = 0.9
"""``inline`` replaces ``processes`` if it takes at most this share of the time: other programs slow it down more."""

_planned = 1


@contextlib.contextmanager
def planned_runs(number: int) -> Iterator[None]:
    """Context manager in which ``auto`` expects several runs of the same local work, so that measuring pays sooner.

    Args:
        number: Number of runs of a command.
    """
    global _planned
    before, _planned = _planned, max(_planned, number)
    try:
        yield
    finally:
        _planned = before


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class EngineChoice:
    """Resolved way to train the clients of a run.

    Attributes:
        engine: Name of the engine, not ``auto``.
        workers: Number of worker processes of ``processes``.
        clients_per_group: Number of clients that are trained at once.
        decided: ``given`` by the user, by a ``rule``, or ``measured``.
        threads: Number of threads of ``inline``; None for PyTorch's.
        trial: Predicted seconds of a round for each measured candidate.
        asked: The user's request, for a run that is resumed.
    """

    engine: str
    workers: Annotated[int, pydantic.Field(ge=0, le=4096)]
    clients_per_group: Annotated[int, pydantic.Field(ge=1, le=1024)] = 1
    threads: Annotated[int, pydantic.Field(ge=1, le=4096)] | None = None
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
        clients_per_group: Number of clients that are trained at once, or ``auto``.
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
        return EngineChoice(
            "ray" if cluster else request.engine,
            request.workers or 0,
            _group_asked_for(request, setup, cohort),
            decided="given",
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
        threads = kept_choice.threads and min(kept_choice.threads, num_cores())
        return replace(kept_choice, workers=min(kept_choice.workers, workers), threads=threads)
    if setup.device.type != "cpu":
        if request.clients_per_group not in ("auto", 1):
            raise ConfigError("clients_per_group needs device=cpu; on another device, use engine=vectorized.")
        by_rule = "inline" if setup.spec.others else engine_by_rule(setup.device.type, 1)
        engine = by_rule if request.engine == "auto" else request.engine
        return EngineChoice(engine, 1, asked=request.identity)
    engine = engine_by_rule("cpu", workers) if request.engine == "auto" else request.engine
    group = _group_asked_for(request, setup, cohort)
    decided: Literal["rule", "given"] = "rule" if "auto" in request.identity else "given"
    plain = EngineChoice(engine, workers, group, decided=decided, asked=request.identity)
    open_ended = request.engine == "auto" or (request.engine == "processes" and request.clients_per_group == "auto")
    choice = plain
    if open_ended and not resume and not setup.spec.others:  # others are neither grouped nor measured
        try:
            choice = _measure(request, plain, setup, Budget(cohort, rounds, *_local_work(setup)))
        except Exception as error:  # the run itself reports what is wrong with a step
            LOG.info("Engines could not be compared (%s), so %s is used.", describe_error(error), plain.engine)
    if folder is not None:
        write_model(folder / FILE, choice)
    return choice


def _group_asked_for(request: EngineRequest, setup: EngineConfig, cohort: int) -> int:
    """Return the number of clients per group that the user gave, at most the cohort; 1 with ``auto``."""
    if not isinstance(request.clients_per_group, int):
        return 1
    group = min(request.clients_per_group, cohort)
    if group > 1 and setup.trains_alone and not setup.spec.others:  # with others, the engine raises an error
        setup.warn(
            f"clients_per_group={request.clients_per_group} has no effect, because with this model or method clients are "
            "trained one at a time."
        )
        return 1
    return group


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
    """Return the candidate that is the fastest by stored times, by new ones if the runs are long enough, or by estimates."""
    inputs = str(setup.federation.clients[timing.largest_client(setup)].x.dtype)
    key = calibration.calibration_key(setup, round(budget.steps), plain.workers, inputs)
    groups, form = _group_sizes(request, plain, setup, budget), None
    if groups != [1]:
        form = setup.group_form(check=False)
        if form is None and plain.clients_per_group > 1:
            return plain
        groups = groups if form is not None else [1]
    stored = calibration.read_entries().get(key, Measurement())
    trial = Trial(request, plain, setup, budget, form, stored)
    trial.compare(groups)
    if trial.measurement != stored:
        calibration.save_measurement(key, trial.measurement)
    return trial.fastest()


@dataclass
class Trial:
    """Comparison of candidates by measured, stored and estimated times.

    Attributes:
        request: The user's request.
        plain: Default choice.
        setup: Configuration of the engine.
        budget: Local work of the run.
        form: Form of several clients, if groups are compared.
        measurement: Times that are known already.
        predicted: Predicted seconds of a round of each candidate.
        measured: Candidates whose times were measured.
    """

    request: EngineRequest
    plain: EngineChoice
    setup: EngineConfig
    budget: Budget
    form: MappedModel | None
    measurement: Measurement
    predicted: dict[EngineCandidate, float] = field(default_factory=dict, init=False)
    measured: set[EngineCandidate] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.alone = costs.step_seconds(self.setup.spec, self.setup.training.batch_size)
        self.threads = costs.threads_of(self.alone, num_cores())
        self.workers = self.plain.workers if self.plain.engine == "processes" else 0
        self.waited = False
        self._compares_half = self.request.workers is None and self.workers >= 4

    def compare(self, groups: list[int]) -> None:
        """Predict the time of groups of clients, then of the best of them in half as many workers, and of ``inline``."""
        self._add(self.workers, groups)
        half = self.workers // 2
        if self._compares_half and self.predicted.keys() <= self.measured:
            # Fewer workers can be faster if cores share units or wait for the same memory.
            best = min(self.predicted, key=lambda candidate: self.predicted[candidate])
            self._add(half, [best.clients_per_group])
        if self.workers and self.request.engine == "auto" and self.request.clients_per_group in ("auto", 1):
            # With several threads, a step takes at best the time of one thread divided by their number.
            alone = self.measurement.steps.get(f"{self.workers}x1", self.alone)
            at_best = self._total(EngineCandidate("inline", 1, 1), self._round(0, 1, alone / self.threads))
            fastest = min(self._total(*item) for item in self.predicted.items())
            if at_best <= INLINE_MARGIN * fastest and (self.threads == 1 or self._speedup > 1.0):
                for workers in (self.workers, 0):  # measured times are not compared with estimated ones
                    self._add(workers, [1])

    def fastest(self) -> EngineChoice:
        """Return the choice with the shortest predicted run that beats the default by its margin."""
        default = next(iter(self.predicted))
        total = {candidate: self._total(candidate, seconds) for candidate, seconds in self.predicted.items()}

        def margin(candidate: EngineCandidate) -> float:
            if candidate.engine != default.engine:
                return INLINE_MARGIN
            return MARGIN if {default, candidate} <= self.measured else UNMEASURED_MARGIN

        allowed = [each for each in total if total[each] < total[default] * margin(each)]
        chosen = min(allowed, key=lambda candidate: total[candidate], default=default)
        table = {each.label(self.plain.workers): round(self.predicted[each], 6) for each in self.measured}
        threads = self.threads if self.request.engine == "auto" and chosen.engine == "inline" else None
        decided: Literal["rule", "measured"] = "measured" if table else "rule"
        return EngineChoice(*chosen, threads, decided, table, self.plain.asked)

    def _add(self, workers: int, groups: list[int]) -> None:
        """Predict the times of groups; 0 workers are this process. What is missing is measured if that is worth it."""
        keys = {k: f"{workers}x{k}" for k in groups}
        alternatives = len(groups) > 1 or bool(self.predicted) or self._compares_half
        if alternatives and any(key not in self.measurement.steps for key in keys.values()):
            self._time(workers, groups)
        known = {key: seconds for key, seconds in self.measurement.steps.items() if seconds < UNMAPPABLE}
        # Estimates are on the scale of this machine if one of the times is known.
        scale = next((known[key] / self._estimate(workers, k) for k, key in keys.items() if key in known), 1.0)
        alone = known.get(f"{workers}x1", scale * self._estimate(workers, 1))
        for k, key in keys.items():
            if k == 1:
                step = alone
            elif key in known or isinstance(self.form, GroupedModel):
                step = known.get(key, scale * self._estimate(workers, k))
                # A batch of another size is trained one client at a time.
                step = self.budget.full_share * step + (1 - self.budget.full_share) * k * alone
            elif k == groups[0]:  # given by the user, and it cannot be mapped or was not timed
                step = k * alone
            else:  # groups with mapped operators are not estimated
                continue
            candidate = EngineCandidate("processes" if workers else "inline", workers or 1, k)
            self.predicted[candidate] = self._round(workers, k, step)
            if key in known:
                self.measured.add(candidate)

    def _time(self, workers: int, groups: list[int]) -> None:
        """Measure groups, if the runs are long enough; otherwise their time is remembered for later runs."""
        budget = self.budget
        run = (
            self._total(*next(iter(self.predicted.items())))
            if self.predicted
            else budget.rounds * self._round(workers, 1, self._estimate(workers, 1))
        )
        waited = _planned * run + self.measurement.unmeasured
        once = sum(k * self.alone for k in groups)
        steps = int((SHARE * waited - costs.START) / (REPEATED * once))
        if steps < 1:
            if not self.waited:
                self.store(unmeasured=self.measurement.unmeasured + run)
            self.waited = True
            return
        unmappable: list[int] = []
        if max(groups) > 1 and not timing.can_be_mapped(self.setup, self.form):
            unmappable, groups = [k for k in groups if k > 1], [1]
        steps = max(1, min(steps, round(budget.steps), int(GROUP_SECONDS / (max(groups) * self.alone))))
        if workers:
            seconds = timing.time_in_processes(self.setup, self.form, groups, steps, workers)
        else:
            with num_threads(self.threads if self.request.engine == "auto" else torch.get_num_threads()):
                workloads = {k: timing.steps_workload(self.setup, self.form, k, steps) for k in groups}
                seconds = timing.min_seconds(workloads, time.perf_counter)
        times = {f"{workers}x{k}": taken / steps for k, taken in seconds.items()}
        times |= {f"{workers}x{k}": UNMAPPABLE for k in unmappable}
        self.store(steps={**self.measurement.steps, **times}, unmeasured=0.0)

    def store(self, **values: Any) -> None:
        """Set fields of the measurement, which is then written to the calibration file."""
        self.measurement = self.measurement.model_copy(update=values)

    def _estimate(self, workers: int, k: int) -> float:
        """Return the estimated seconds of a local step of a group, in a worker or, with threads, in this process."""
        seconds = costs.step_seconds(self.setup.spec, self.setup.training.batch_size, k)
        if workers:
            return seconds * (costs.CROWDED if workers > 1 and self.alone >= LONG_STEP else 1.0)
        return seconds / self._speedup

    @cached_property
    def _speedup(self) -> float:
        return costs.speedup(self.alone, self.threads)

    def _round(self, workers: int, k: int, step: float) -> float:
        """Return the seconds of a round from those of a local step of a group."""
        return costs.round_seconds(workers, k, self.budget.cohort, self.budget.steps, step)

    def _total(self, candidate: EngineCandidate, seconds: float) -> float:
        """Return the seconds of a run from those of a round."""
        return self.budget.rounds * seconds + (costs.START if candidate.engine == "processes" else 0.0)


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
    if budget.full_share <= MIN_FULL_SHARE or costs.step_seconds(setup.spec, setup.training.batch_size) >= LONG_STEP:
        return [1]
    spec, cohort, workers = setup.spec, budget.cohort, plain.workers
    values = 6 * spec.size + 4 * setup.training.batch_size * spec.widest
    limit = min(cohort, MAX_GROUP_BYTES // (values * spec.dtype.itemsize))
    even = {math.ceil(cohort / (workers * turns)) for turns in range(1, cohort + 1)}
    fitting = sorted(k for k in even if 1 < k <= min(limit, max(GROUP_SIZES)))
    chosen = {min(fitting, key=lambda k: abs(k - wanted)) for wanted in GROUP_SIZES} if fitting else set()
    return [1, *sorted(chosen)]
