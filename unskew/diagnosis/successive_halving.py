"""Validation of the advice: successive halving of the suggested methods and FedAvg, within a time budget."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.clients import any_held_out
from unskew.diagnosis.advice import Advice
from unskew.errors import ConfigError, short_repr
from unskew.methods.registry import method
from unskew.records.recorder import Callback, Row
from unskew.runs.run import run_experiment
from unskew.tasks.formatting import format_number
from unskew.tasks.primary_metric import WORST, metric_info
from unskew.tasks.registry import objective_metric

BASELINE = "fedavg"
VERDICTS = {True: "confirmed", False: "not confirmed", None: "not decided"}
"""Words for the outcome of a suggestion."""


class TimeBudgetExceededError(Exception):
    """Raised when the time budget is spent."""


class DeadlineCallback(Callback):
    """Callback that ends a run when its time is up.

    Args:
        end: Deadline in seconds of ``time.monotonic``.
    """

    def __init__(self, end: float):
        self.end_at = end

    def check(self) -> None:
        """Raise an error if the deadline has passed.

        Raises:
            TimeBudgetExceededError: If no time is left.
        """
        if time.monotonic() > self.end_at:
            raise TimeBudgetExceededError

    def prepare(self, text: str, done: float, total: float) -> None:
        """Check the deadline during data preparation."""
        self.check()

    def round(self, row: Row) -> None:
        """Check the deadline after a round."""
        self.check()


@dataclass(frozen=True)
class TriedMethod:
    """Outcome of one method.

    Attributes:
        method: Method expression.
        rounds: Number of trained rounds; 0 if the time was up before.
        accuracy: Objective on the test set after these rounds, or the test loss if a method has no objective there.
        baseline: The same metric of FedAvg after the same number of rounds.
        selected: Score that decides which methods continue, higher is better: the objective on held-out samples.
        held: Whether the suggestion is confirmed, because the metric is better than FedAvg's; None if undecided.
        seconds: Training time.
    """

    method: str
    rounds: int
    accuracy: float | None
    baseline: float | None
    selected: float | None
    held: bool | None
    seconds: float


@dataclass(frozen=True)
class AdviceTrial:
    """Outcome of validating the advice, with one seed.

    Attributes:
        tried: Outcomes of the suggested methods, in the order of the advice.
        rungs: Number of methods trained for each number of rounds.
        minutes: Time budget.
        spent: Time used, in minutes.
        figure: Name of the compared metric: the objective, or ``loss``.
    """

    tried: list[TriedMethod]
    rungs: list[tuple[int, int]]
    minutes: float
    spent: float
    figure: str

    def as_json(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line per method, and the number of confirmed suggestions."""
        lines = [
            f"{t.method}: {VERDICTS[t.held]} after {t.rounds} rounds"
            + (
                f" ({self.figure} {format_number(t.accuracy)}, FedAvg {format_number(t.baseline)})"
                if t.held is not None
                else ""
            )
            for t in self.tried
        ]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """Return a sentence on how much of the advice was confirmed."""
        decided = [t for t in self.tried if t.held is not None]
        if not decided:
            return "The time was up before anything could be decided. Use a larger --validate-minutes."
        num_held = sum(bool(t.held) for t in decided)
        return (
            f"{num_held} of the {len(decided)} tested suggestions were confirmed, with one seed and at most "
            f"{max(t.rounds for t in decided)} rounds. For a reliable result, run unskew compare with several seeds and all "
            "rounds. "
            f"{self.spent:.1f} of {self.minutes:g} minutes were used."
        )


def validate_advice(
    advice: Advice, minutes: float, follow: Callable[[str, Experiment], Sequence[Callback]] | None = None
) -> AdviceTrial:
    """Train the suggested methods and FedAvg for few rounds, then the better half for twice as many, and so on.

    Args:
        advice: Advice to validate.
        minutes: Time budget; a run in progress when it is spent ends after its round.
        follow: Creates the callbacks of a run from its method and configuration.

    Raises:
        ConfigError: If ``minutes`` is not a time, or there is nothing to validate or no held-out samples.
    """
    check_minutes(minutes)
    advised = [suggestion.method for suggestion in advice.suggestions if suggestion.method != BASELINE]
    if not advised:
        raise ConfigError("Nothing to validate: no applicable method was recommended.")
    if not advice.setting.config.eval_clients or not any_held_out(advice.setting.federation.clients):
        raise ConfigError(
            "Methods are selected on held-out samples of clients, but there are none. Set holdout and eval_clients above 0."
        )
    began = time.monotonic()
    deadline = DeadlineCallback(began + 60 * minutes)
    alive, last = list(advised), advice.rounds
    rungs = max(1, math.ceil(math.log2(len(advised) + 1)))
    plan = sorted({max(1, last // 2 ** (rungs - 1 - step)) for step in range(rungs)} | {last})
    results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in (BASELINE, *advised)}
    reached: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(prefix="unskew-try-") as scratch:
        try:
            for rounds in plan:
                for name in (BASELINE, *alive):
                    deadline.check()
                    results[name][rounds] = train_to(advice, name, rounds, Path(scratch), deadline, follow)
                reached.append((len(alive), rounds))
                alive.sort(key=lambda name: -holdout_score(results[name][rounds]))
                alive = alive[: math.ceil(len(alive) / 2)]
        except TimeBudgetExceededError:
            pass
    summaries = [summary for runs in results.values() for summary in runs.values()]
    figure = objective_metric(summaries[0]).name if summaries else "loss"
    figure = figure if all(summary.get(figure) is not None for summary in summaries) else "loss"
    tried = [final_outcome(name, results[name], results[BASELINE], figure) for name in advised]
    return AdviceTrial(tried, reached, float(minutes), (time.monotonic() - began) / 60, figure)


def check_minutes(minutes: object) -> None:
    """Validate a number of minutes.

    Args:
        minutes: Value to check.

    Raises:
        ConfigError: If the value is not a positive number.
    """
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < math.inf:
        raise ConfigError(
            f"--validate-minutes {short_repr(minutes, str)} is not valid: it must be a number of minutes above 0."
        )


def train_to(
    advice: Advice,
    name: str,
    rounds: int,
    runs_folder: Path,
    deadline: DeadlineCallback,
    follow: Callable[[str, Experiment], Sequence[Callback]] | None,
) -> dict[str, Any]:
    """Train a method up to a number of rounds, resuming its run if its learning rates allow that; return its summary.

    Args:
        advice: Advice to validate.
        name: Method expression.
        rounds: Number of rounds to reach.
        runs_folder: Folder of the runs.
        deadline: Ends the run when time is up.
        follow: Creates further callbacks.
    """
    setting = advice.setting
    changes = {"method": name, "rounds": rounds, "target": None, "diagnose": (), "early_stopping": None, "keep": "last"}
    # Short runs may be too short for a method that acts only at the end of a run.
    config = setting.config.model_copy(update={**changes, "base_run": rounds < advice.rounds})
    folder = runs_folder / "".join(c if c.isalnum() else "-" for c in name)
    if folder.exists() and config.training.schedule.ends:  # learning rates depend on the number of rounds
        shutil.rmtree(folder)
    callbacks = [deadline, *(follow(name, config) if follow else ())]
    result = run_experiment(
        config,
        federation=setting.federation,
        model=setting.model,
        method=method(name),
        out=folder,
        resume=folder.exists(),
        callbacks=callbacks,
    )
    return result.summary


def holdout_score(summary: dict[str, Any]) -> float:
    """Return the objective on held-out samples, by which methods are selected; higher is better."""
    objective = objective_metric(summary)
    value = summary.get(WORST if objective.name == WORST else f"client_{objective.name}_mean")
    return -math.inf if value is None else objective.rank(float(value))


def final_outcome(
    name: str, runs: dict[int, dict[str, Any]], baseline: dict[int, dict[str, Any]], figure: str
) -> TriedMethod:
    """Return the outcome of a method at the last stage that both the method and FedAvg reached.

    Args:
        name: Method expression.
        runs: Summary of the method by number of rounds.
        baseline: Summary of FedAvg by number of rounds.
        figure: Name of the compared metric.
    """
    rounds = max((r for r in runs if r in baseline), default=0)
    if not rounds:
        return TriedMethod(name, 0, None, None, None, None, 0.0)
    own_score, baseline_score = runs[rounds].get(figure), baseline[rounds].get(figure)
    holds = None
    # A non-finite loss is worse than any other; a method that has not acted yet has the same metric as FedAvg.
    if baseline_score is not None and own_score != baseline_score:
        rank = metric_info(figure, runs[rounds].get("own_metrics")).rank
        holds = own_score is not None and rank(own_score) > rank(baseline_score)
    return TriedMethod(
        name,
        rounds,
        own_score,
        baseline_score,
        holdout_score(runs[rounds]),
        holds,
        float(runs[rounds].get("seconds") or 0.0),
    )
