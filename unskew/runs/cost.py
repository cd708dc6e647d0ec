"""Estimate of the run time of experiments, from training one client in one or two rounds of each method."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.task_options import apply_task_options
from unskew.engines import processes, timing
from unskew.engines.base import EngineConfig
from unskew.engines.cpu import default_torch_modes, num_cores, num_threads, time_limit
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.registry import pick_device
from unskew.errors import ConfigError, short_repr
from unskew.protocol.data_preparation import PreparedData
from unskew.protocol.data_rule import apply_data_rule
from unskew.protocol.rules import Method
from unskew.runs.assembly import RunParts, assemble
from unskew.runs.build_model import ModelLike
from unskew.runs.validation import resolve_run

WORTH = 10.0
"""Methods are measured only if all runs are estimated, from plain local steps, to take at least this many seconds."""
SLOT = 0.25
"""Approximate duration of the measured local steps in seconds."""
ENOUGH = 2.0
"""If the first measured round takes longer than this many seconds, no second round is measured."""
SHARE, LIMIT = 0.02, 10.0
"""Time limit of a method's measurement: this share of the plain estimate, but at least ``LIMIT`` seconds."""


class TooLongError(Exception):
    """The measurement of a method reached its limit."""


@dataclass(frozen=True)
class Cost:
    """Estimated time of the runs of a comparison.

    Attributes:
        seconds: Time of one run of each measured method, in seconds.
        total: Time of all runs in seconds, with the requested number of parallel runs.
        runs: Number of runs.
        notes: Sentences about costs that are not included.
    """

    seconds: dict[str, float]
    total: float
    runs: int
    notes: tuple[str, ...] = ()

    def ratio(self, name: str) -> float:
        """Return the time of a method relative to the first measured one."""
        return self.seconds[name] / next(iter(self.seconds.values()))

    def __str__(self) -> str:
        """Return the estimate as a sentence, and the notes."""
        first = next(iter(self.seconds))
        parts = [
            f"{name} {duration(taken)}" + ("" if name == first else f" ({self.ratio(name):.2g} × {first})")
            for name, taken in self.seconds.items()
        ]
        runs = "1 run" if self.runs == 1 else f"all {self.runs} runs"
        text = f"Estimated time per run: {', '.join(parts)}; {runs}: about {duration(self.total)}."
        return " ".join([text, *self.notes])


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> duration(0.2), duration(25.3), duration(1058), duration(9000)
    ('1 s', '25 s', '18 min', '2.5 h')
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def check_budget(minutes: object) -> None:
    """Validate that a budget of minutes is a positive, finite number (raises ``ConfigError`` otherwise)."""
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < math.inf:
        raise ConfigError(f"A time of {short_repr(minutes)} minutes is not valid; use a number above 0.")


def check_within(cost: Cost | None, minutes: float) -> None:
    """Validate that the estimated time is within a budget.

    Args:
        cost: Estimated cost, or None if it was not measured.
        minutes: Largest duration in minutes.

    Raises:
        ConfigError: If the estimate is above the budget, or there is no estimate.
    """
    if cost is None:
        raise ConfigError(
            "The time of these runs cannot be estimated, for example on a Ray cluster; remove the budget."
        )
    if cost.total <= 60 * minutes:
        return
    dearest = max(cost.seconds, key=lambda name: cost.seconds[name])
    hint = f" (the most expensive is {dearest})" if len(cost.seconds) > 1 else ""
    raise ConfigError(f"{cost} This is above the budget of {minutes:g} min; use fewer methods{hint}, seeds or rounds.")


def estimate(
    runs: Mapping[str, tuple[Experiment, Method, int]],
    federation: Federation,
    model: ModelLike | None,
    at_once: int = 1,
    worth: float = WORTH,
) -> Cost | None:
    """Estimate the time of runs from training one client in one or two rounds of each method.

    The estimate writes no files and does not change the random numbers of the runs.

    Args:
        runs: Maps each method to its configuration, rules and number of runs.
        federation: Data of all clients.
        model: Model that was passed in Python, or None.
        at_once: Number of runs in parallel.
        worth: Methods are measured only if plain training in all runs takes at least this many seconds.

    Returns:
        The estimate; None if the runs are too short to measure, or a Ray cluster trains the clients.
    """
    seconds: dict[str, float] = {}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    notes: list[str] = []
    if load > (os.cpu_count() or 1):
        notes.append(
            f"Other programs keep this machine busy (load {load:.0f}): the runs may take several times as long."
        )
    for name, (config, method, _) in runs.items():
        if config.engine == "ray" or config.ray.address is not None:
            return None
        if any(rule.generates_data for rule in method.data) and config.synthetic is None:
            notes.append(f"The data that {name} generates before training are not included.")
        try:
            estimated, total_seconds = seconds_of_run(
                config, method, federation, model, at_once, 0 if seconds else worth, runs
            )
        except Exception:  # an error in a method or lack of memory: the run itself gives a better message
            notes.append(f"{name} could not be measured and is not included.")
            continue
        if estimated is None:
            return None
        if not total_seconds:
            notes.append(f"{name} takes longer than estimated: its measurement reached the time limit.")
        seconds[name] = estimated
    if not seconds:
        return None
    counts = {name: runs[name][2] for name in seconds}
    total = sum(seconds[name] * count for name, count in counts.items())
    number = sum(counts.values())
    return Cost(seconds, total / min(at_once, number), number, tuple(notes))


@default_torch_modes()
def seconds_of_run(
    config: Experiment,
    method: Method,
    federation: Federation,
    model: ModelLike | None,
    at_once: int,
    worth: float,
    runs: Mapping[str, tuple[Experiment, Method, int]],
) -> tuple[float | None, bool]:
    """Estimate the seconds of one run; None if plain training of all runs takes less than ``worth``.

    Args:
        config: Configuration of the run.
        method: Method of the run.
        federation: Data of all clients.
        model: Model that was passed in Python, or None.
        at_once: Number of runs in parallel.
        worth: Measure only if plain training in all runs takes at least this many seconds.
        runs: Maps each method to its configuration, rules and number of runs.

    Returns:
        The seconds, and whether the measurement was completed; if not, the seconds are a lower bound.
    """
    plain = {"engine": "inline", "diagnose": (), "trackers": (), "early_stopping": None, "keep": "last"}
    config_here = config.model_copy(update={**plain, "save_samples": False, "coefficients": False, "start_from": None})
    original = apply_task_options(federation, config.loss, config.class_weights)
    run = resolve_run(config_here, original, model, method)
    prepared = PreparedData(original, config_here.training)
    for rule in method.data:
        if not rule.generates_data:
            prepared = apply_data_rule(rule, prepared, config.seed)
    device = pick_device(config.device)
    parts = assemble(run, prepared, device)
    cohort = parts.sampler.size
    per_run = max(1, num_cores() // at_once)
    workers = 1
    if config.engine in ("auto", "processes") and device.type == "cpu" and processes.fork_available():
        workers = min(config.workers or per_run, cohort)
    client, steps = typical_client(parts.setup)
    turns = config.rounds * math.ceil(cohort / workers)
    with torch.random.fork_rng(), num_threads(1 if workers > 1 else max(1, torch.get_num_threads() // at_once)):
        alone = timing.min_seconds({1: timing.steps_workload(parts.setup, None, 1, 1)}, time.perf_counter)[1]
        usual = turns * steps * alone * sum(count for _, _, count in runs.values()) / at_once
        if usual < worth:
            return None, True
        few = max(1, min(math.ceil(steps), math.ceil(SLOT / max(alone, 1e-9))))
        limit, idle = max(LIMIT, SHARE * usual), first_active_round(method)
        began = time.perf_counter()
        try:
            with time_limit(limit, TooLongError()):
                begin, train, server = measured_seconds(parts, config.rounds, client, few)
        except Exception:  # the code that the limit interrupts may replace TooLongError by an error of its own
            if time.perf_counter() - began < limit:
                raise
            return limit / 2 * max(1, config.rounds - idle), False
        evaluation = math.inf
        for _ in range(2):  # the first evaluation imports what the metrics need
            began = time.perf_counter()
            parts.evaluator.evaluate_test(*parts.server.selection.evaluated)
            evaluation = min(evaluation, time.perf_counter() - began)
            if evaluation > ENOUGH:
                break
    acting, step = max(0, config.rounds - idle), train / few
    idle = config.rounds - acting
    of_clients = acting * (begin + steps * step) + idle * steps * min(step, alone)
    evaluations = math.ceil(config.rounds / config.eval_every)
    return math.ceil(cohort / workers) * of_clients + acting * server + evaluations * evaluation, True


def first_active_round(method: Method) -> int:
    """Return the first round in which all rules of a method act."""
    return max((getattr(rule, "start_round", 0) for rule in method.rules), default=0)


def typical_client(setup: EngineConfig) -> tuple[int, float]:
    """Find the client whose size is closest to the mean.

    Args:
        setup: Configuration of an engine, with the data of the clients and their budget.

    Returns:
        The client's number, and the mean number of local steps per round.
    """
    clients = setup.federation.clients
    looked_at: Sequence[int] = range(0, len(clients), max(1, len(clients) // timing.MAX_INSPECTED))
    sizes = {k: clients[k].num_samples for k in looked_at if clients[k].num_samples}
    mean = sum(sizes.values()) / len(sizes)
    steps = [setup.training.steps(size, k) for k, size in sizes.items()]
    return min(sizes, key=lambda k: abs(sizes[k] - mean)), sum(steps) / len(steps)


def measured_seconds(parts: RunParts, rounds: int, client: int, steps: int) -> tuple[float, float, float]:
    """Measure one client in the first round and, unless that was slow, in the last one, where all rules are active.

    Args:
        parts: Parts of a run that is used for this measurement only.
        rounds: Number of rounds of the run.
        client: Number of the client.
        steps: Number of local steps to measure.

    Returns:
        Seconds before the client's first step, seconds of its steps, and seconds of the server step.
    """
    server = parts.server
    training = replace(parts.setup.training, local_steps=steps, local_epochs=None, counted=None)
    trainer = LocalTrainer(replace(parts.setup, training=training))
    seconds = (0.0, 0.0, 0.0)
    for t in sorted({0, rounds - 1}):
        began = time.perf_counter()
        updates = []
        if server.setup.rule.steps_without != "clients":
            updates = [trainer.train(server.broadcaster.broadcast(t, client))]
        trained = time.perf_counter()
        metrics = server.aggregator.step(t, updates)
        seconds = metrics["setup_seconds"], metrics["train_seconds"], time.perf_counter() - trained
        if t >= first_active_round(parts.method) and trained - began > ENOUGH:
            break
    return seconds
