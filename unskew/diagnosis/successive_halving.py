"""Advice put to the test: successive halving of the advised methods beside FedAvg, under a budget of minutes."""

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
from unskew.diagnosis.advice import Advice
from unskew.errors import ConfigError, short_repr
from unskew.methods.registry import method
from unskew.records.recorder import Callback, Row
from unskew.runs.run import run_experiment
from unskew.tasks.primary_metric import WORST, metric_info, objective_metric

CANDIDATES = 7
"""Advised methods that are tried at most."""
BASELINE = "fedavg"
VERDICTS = {True: "held", False: "did not hold", None: "not decided"}
"""Words for the outcome of a suggestion."""


class TimeBudgetExceededError(Exception):
    """The budget is spent."""


class DeadlineCallback(Callback):
    """A callback that ends a run when its time is up.

    Args:
        end: When, as ``time.monotonic`` counts.
    """

    def __init__(self, end: float):
        self.end_at = end

    def check(self) -> None:
        """Go on only while there is time.

        Raises:
            TimeBudgetExceededError: No time is left.
        """
        if time.monotonic() > self.end_at:
            raise TimeBudgetExceededError

    def start(self, config: dict[str, Any], rounds_done: int) -> None:
        """A run begins."""

    def prepare(self, text: str, done: float, total: float) -> None:
        """Something is made before the first round."""
        self.check()

    def round(self, row: Row) -> None:
        """A round is done."""
        self.check()

    def end(self, summary: dict[str, Any]) -> None:
        """A run ends."""


@dataclass(frozen=True)
class TriedMethod:
    """Outcome of one method.

    Attributes:
        method: As it is written.
        rounds: How far it came; 0 if the time was up before.
        accuracy: The objective on the test set there, or the test loss where it is undefined for a method.
        baseline: The same figure of FedAvg after as many rounds.
        selected: Rank by which rungs are decided, higher is better: the objective on what clients hold out.
        held: Whether the advice held: the figure is better than FedAvg's. None where nothing can be said.
        seconds: Of its training.
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
        tried: The advised methods, in the order of the advice.
        rungs: How many methods were trained to how many rounds.
        minutes: The budget; ``spent`` is what was used of it.
        spent: Minutes.
        figure: Name of the metric that is compared: the objective, or ``loss``.
    """

    tried: list[TriedMethod]
    rungs: list[tuple[int, int]]
    minutes: float
    spent: float
    figure: str

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """A line for each method, and how many held."""
        lines = [
            f"{t.method}: {VERDICTS[t.held]} after {t.rounds} rounds"
            + (f" ({self.figure} {t.accuracy:.4f}, FedAvg {t.baseline:.4f})" if t.held is not None else "")
            for t in self.tried
        ]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """Return a sentence on how much of the advice was confirmed."""
        decided = [t for t in self.tried if t.held is not None]
        if not decided:
            return "The time was up before anything could be said; give --validate-minutes more."
        num_held = sum(bool(t.held) for t in decided)
        return (
            f"{num_held} of the {len(decided)} tested suggestions were confirmed, with one seed and at most "
            f"{max(t.rounds for t in decided)} rounds: unskew compare with several seeds and all rounds says more. "
            f"{self.spent:.1f} of {self.minutes:g} minutes were used."
        )


def validate_advice(
    advice: Advice, minutes: float, follow: Callable[[str, Experiment], Sequence[Callback]] | None = None
) -> AdviceTrial:
    """Train the advised methods and FedAvg for few rounds, go on with the better half for twice as many, and so on.

    Args:
        advice: What is tried.
        minutes: Budget of time. A run that is under way when it is spent ends after its round.
        follow: Gives the callbacks of a run from its method and configuration.

    Raises:
        ConfigError: ``minutes`` is not a time, or there is nothing to try.
    """
    check_minutes(minutes)
    advised = [suggestion.method for suggestion in advice.suggestions[:CANDIDATES] if suggestion.method != BASELINE]
    if not advised:
        raise ConfigError("Nothing to validate: no applicable method was recommended.")
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
    """Refuse what is not a time.

    Raises:
        ConfigError: The value is not a positive number.
    """
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < math.inf:
        raise ConfigError(
            f"--validate-minutes {short_repr(minutes, str)} is not valid: it is a number of minutes above 0."
        )


def train_to(
    advice: Advice,
    name: str,
    rounds: int,
    place: Path,
    deadline: DeadlineCallback,
    follow: Callable[[str, Experiment], Sequence[Callback]] | None,
) -> dict[str, Any]:
    """The summary of a method after so many rounds; it goes on where it ended before, if its rates allow that.

    Args:
        advice: Advice that is tested.
        name: Expression of the method.
        rounds: Number of rounds to reach.
        place: Folder of the runs.
        deadline: Ends the run when time is up.
        follow: Creates further callbacks.
    """
    setting = advice.setting
    changes = {"method": name, "rounds": rounds, "target": None, "diagnose": ()}
    # In the first rungs there may be too few rounds for a method that acts at the end of a run.
    config = setting.config.model_copy(update={**changes, "base_run": rounds < advice.rounds})
    folder = place / "".join(c if c.isalnum() else "-" for c in name)
    if folder.exists() and config.training.schedule.ends:  # rates that depend on the number of rounds
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
    """Return what rungs are decided by, the objective on what clients hold out; higher is better."""
    objective = objective_metric(summary)
    held_out = WORST if objective.name == WORST else f"client_{objective.name}_mean"
    for figure in (held_out, objective.name):
        if summary.get(figure) is not None:
            return objective.rank(float(summary[figure]))
    return -math.inf if summary.get("loss") is None else -float(summary["loss"])


def final_outcome(
    name: str, runs: dict[int, dict[str, Any]], baseline: dict[int, dict[str, Any]], figure: str
) -> TriedMethod:
    """Return the outcome of a method at the last stage that both the method and FedAvg reached.

    Args:
        name: Expression of the method.
        runs: Summary of the method by number of rounds.
        baseline: Summary of FedAvg by number of rounds.
        figure: Name of the compared metric.
    """
    rounds = max((r for r in runs if r in baseline), default=0)
    if not rounds:
        return TriedMethod(name, 0, None, None, None, None, 0.0)
    own_score, baseline_score = runs[rounds].get(figure), baseline[rounds].get(figure)
    holds = None
    # A loss that is not finite is worse than any; a method that did nothing yet has FedAvg's own figure.
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
