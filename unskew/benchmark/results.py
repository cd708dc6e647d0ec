"""Results of a benchmark: scores of methods on federations in two views, and the cost to reach the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unskew.benchmark.runner import SuiteRuns, Unit
from unskew.benchmark.statistics import Difference, paired_differences
from unskew.benchmark.suite import BenchmarkFederation
from unskew.comparison.references import is_reference
from unskew.reproduction.outcomes import Outcome
from unskew.tasks.primary_metric import MetricInfo, metric_of

View = Literal["global", "clients"]
"""``global``: the global model on the test data. ``clients``: the mean over clients on their held-out data, of personal
models if the method has them, otherwise of the global model."""


@dataclass(frozen=True)
class Cost:
    """Cost to reach the mean final score of the baseline; each is None if a seed does not reach it.

    Attributes:
        rounds: Mean number of rounds.
        bytes: Mean traffic up and down, over all clients.
        seconds: Mean simulated seconds; also None without a virtual clock.
    """

    rounds: float | None = None
    bytes: float | None = None
    seconds: float | None = None


class FederationResults:
    """Stored outcomes of one federation.

    Args:
        federation: The federation.
        outcomes: Outcome of each tuned method, in the order of the suite.
        untuned: Outcome of each method with its configured options.
        baseline: Method that the others are compared with.
    """

    def __init__(
        self,
        federation: BenchmarkFederation,
        outcomes: Mapping[str, Outcome],
        untuned: Mapping[str, Outcome],
        baseline: str,
    ):
        self.federation = federation
        self.baseline = baseline
        self.not_applicable = {
            name: outcome["not_applicable"] for name, outcome in outcomes.items() if "not_applicable" in outcome
        }
        self.outcomes = {name: outcome for name, outcome in outcomes.items() if "not_applicable" not in outcome}
        self.untuned = {name: outcome for name, outcome in untuned.items() if "not_applicable" not in outcome}

    @property
    def complete(self) -> bool:
        """True if the baseline has an outcome, without which nothing is compared."""
        return self.baseline in self.outcomes

    @property
    def metric(self) -> MetricInfo:
        """Primary metric of the federation."""
        outcome = self.outcomes[self.baseline]
        return metric_of(outcome, outcome["objective"])

    @property
    def points(self) -> float:
        """Factor of metrics in tables: 100 for metrics in percent."""
        return 100.0 if self.metric.percent else 1.0

    def values(self, view: View, worst: bool = False) -> dict[str, list[float]]:
        """Return the metric of each seed, in points, of the methods that have this view.

        Args:
            view: Global model or clients.
            worst: Whether to return the worst client instead of the mean; only for the view ``clients``.
        """
        values = {}
        for name, outcome in self.outcomes.items():
            per_seed = _view(outcome, view, "worst" if worst else "mean", self.points)
            if per_seed is not None:
                values[name] = per_seed
        return values

    def differences(self, view: View, worst: bool = False) -> dict[str, Difference]:
        """Return the paired differences to the baseline in points, without the references.

        Args:
            view: Global model or clients.
            worst: Whether to compare the worst client instead of the mean.
        """
        values = {name: own for name, own in self.values(view, worst).items() if not is_reference(name)}
        if self.baseline not in values:
            return {}
        return paired_differences(values, self.baseline, self.metric.lower_is_better)

    def tuning_gain(self, view: View) -> Difference | None:
        """Return what tuning the baseline alone gives; None without an outcome of the untuned baseline.

        Args:
            view: Global model or clients.
        """
        if self.baseline not in self.untuned:
            return None
        before = _view(self.untuned[self.baseline], view, "mean", self.points)
        after = _view(self.outcomes[self.baseline], view, "mean", self.points)
        if before is None or after is None:
            return None
        both = {"configured": before, "tuned": after}
        return paired_differences(both, "configured", self.metric.lower_is_better)["tuned"]

    def cost(self, name: str) -> Cost:
        """Return the cost of a method to reach the baseline's mean final score.

        Args:
            name: Method expression.
        """
        outcome, rank = self.outcomes[name], self.metric.rank
        finals = [summary.get(outcome["objective"]) for summary in self.outcomes[self.baseline]["summaries"]]
        if None in finals:
            return Cost()
        target = rank(statistics.fmean(finals))
        first = []
        for curve in outcome["curves"]:
            reached = [i for i, value in enumerate(curve) if value is not None and rank(value) >= target]
            if not reached:
                return Cost()
            first.append(reached[0])
        times: Sequence[Sequence[float]] | None = outcome.get("seconds_simulated")
        sent = outcome["bytes"] if isinstance(outcome["bytes"][0], list) else [outcome["bytes"]] * len(first)
        seconds = None if times is None else statistics.fmean(own[i] for own, i in zip(times, first, strict=True))
        return Cost(
            statistics.fmean(outcome["rounds"][i] for i in first),
            statistics.fmean(own[i] for own, i in zip(sent, first, strict=True)),
            seconds,
        )


def _view(outcome: Outcome, view: View, what: str, points: float) -> list[float] | None:
    """Return a metric of each seed in points; None if the outcome does not have it, or a seed diverged."""
    if view == "global":
        if outcome["personal"]:
            return None
        key = outcome["objective"]
    else:
        key = f"{'personal' if outcome['personal'] else 'client'}_{outcome['client_metric']}_{what}"
    values = [summary.get(key) for summary in outcome["summaries"]]
    if any(value is None or summary["diverged"] for value, summary in zip(values, outcome["summaries"], strict=True)):
        return None
    return [points * value for value in values]


def diverged(outcome: Outcome) -> bool:
    """Return whether a seed of an outcome diverged."""
    return any(summary["diverged"] for summary in outcome["summaries"])


def read_results(runs: SuiteRuns) -> list[FederationResults]:
    """Read the stored outcomes of a suite, for the federations on which the baseline was run.

    Args:
        runs: Units of the suite.
    """
    suite, stored = runs.suite, {**runs.with_fewer_trials(), **runs.stored()}
    results = []
    for federation in runs.federations.values():
        names = [*suite.methods, *suite.references]
        units = {name: runs.tuned_unit(federation.name, name) for name in names}
        tuned = {name: stored[unit] for name, unit in units.items() if unit in stored}
        first = {name: Unit(federation.name, name, 1) for name in suite.untuned}
        untuned = {name: stored[unit] for name, unit in first.items() if unit in stored}
        own = FederationResults(federation, tuned, untuned, suite.baseline)
        if own.complete:
            results.append(own)
    return results
