"""Tables and numbers of benchmarks within documents, from the stored outcomes; ``speed.result_pages`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from unskew.benchmark.results import FederationResults, View, diverged, read_results
from unskew.benchmark.runner import SuiteRuns
from unskew.benchmark.statistics import Difference, paired_differences
from unskew.benchmark.suite import load_suite
from unskew.benchmark.tables import mean_and_std
from unskew.comparison.references import is_reference
from unskew.reproduction.tables import markdown


class BenchmarkMarks:
    """Texts of the marks that ``speed.result_pages`` describes, from the outcomes of benchmarks.

    Args:
        folder: Folder of the outcomes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._suites: dict[str, list[FederationResults]] = {}

    def by_name(self) -> dict[str, Callable[..., str]]:
        """Return the function of each mark."""
        marks = (self.gains, self.differences, self.decided, self.above, self.tuning, self.budgets)
        return {mark.__name__: mark for mark in (*marks, self.difference, self.interval, self.mean)}

    def results_of(self, suite: str) -> list[FederationResults]:
        """Return the results of a suite's federations.

        Args:
            suite: Name of the suite.
        """
        if suite not in self._suites:
            self._suites[suite] = read_results(SuiteRuns(*load_suite(suite), self.folder))
        return self._suites[suite]

    def federation(self, suite: str, name: str) -> FederationResults:
        """Return the results of a federation.

        Args:
            suite: Name of the suite.
            name: Name of the federation.

        Raises:
            KeyError: If the suite does not have the federation, or its baseline has not been run.
        """
        return {own.federation.name: own for own in self.results_of(suite)}[name]

    def gains(self, suite: str, view: View, *methods: str) -> str:
        """Return the table of the differences of methods to the baseline over the federations of a suite.

        Args:
            suite: Name of the suite.
            view: Global model or clients.
            *methods: Methods to list, on the federations on which the first one has been run. If the first one ends with a
                colon, it is a further method with which each is compared.
        """
        other, methods = (methods[0][:-1], methods[1:]) if methods[0].endswith(":") else ("", methods)
        own = [each.differences(view) for each in self.results_of(suite) if methods[0] in each.outcomes]
        body = []
        for name in methods:
            found = [each[name] for each in own if name in each]
            means, verdicts = [one.mean for one in found], [one.verdict for one in found]
            middle = [f"{of(means):+.1f}" if means else "" for of in (statistics.median, statistics.fmean)]
            counts = [len(means), sum(mean > 0 for mean in means), verdicts.count("better"), verdicts.count("worse")]
            row = [f"`{name}`", *map(str, counts[:2]), *middle, *map(str, counts[2:])]
            if other:
                both = [each for each in own if {name, other} <= each.keys()]
                above = sum(each[name].mean > each[other].mean for each in both)
                row.append("" if name == other else f"{above} of {len(both)}")
            body.append(row)
        header = ["method", "federations", "above FedAvg", "median", "mean", "decided gains", "decided losses"]
        header += [f"above `{other}`"] if other else []
        return f"\n\n{markdown(header, body)}\n\n"

    def differences(self, suite: str, view: View, *methods: str) -> str:
        """Return the table of the differences of methods to the baseline on each federation of a suite.

        Args:
            suite: Name of the suite.
            view: Global model or clients.
            *methods: Methods and references to list.
        """
        results = self.results_of(suite)
        percent = ", %" if all(own.metric.percent for own in results) else ""
        baseline = results[0].baseline
        body = [[f"tuned `{baseline}`{percent}", *(_mean_and_std(own, view, baseline) for own in results)]]
        body.append(["gain by tuning", *(_cell(own.tuning_gain(view)) for own in results)])
        for name in methods:
            cells = []
            for own in results:
                difference = _difference(own, view, name)
                failed = difference is None and name in own.outcomes and diverged(own.outcomes[name])
                cells.append("diverged" if failed else _cell(difference, tested=not is_reference(name)))
            body.append([f"`{name}`", *cells])
        return f"\n\n{markdown(['', *(own.federation.name for own in results)], body)}\n\n"

    def decided(self, suite: str, kind: str) -> str:
        """Return a sentence on how many differences of the global models to the baseline are decided.

        Args:
            suite: Name of the suite.
            kind: Kind of federations, ``natural`` or ``controlled``.
        """
        results = [each for each in self.results_of(suite) if each.federation.kind == kind]
        verdicts = [difference.verdict for each in results for difference in each.differences("global").values()]
        gains, losses = verdicts.count("better"), verdicts.count("worse")
        return f"{len(verdicts)} differences, of which {gains} are decided gains and {losses} decided losses"

    def above(self, suite: str, kind: str, view: View, method: str) -> str:
        """Return on how many federations a method is above the baseline, with the median and the decided differences.

        Args:
            suite: Name of the suite.
            kind: Kind of federations, ``natural`` or ``controlled``.
            view: Global model or clients.
            method: Name of the method, or of a reference, whose differences are not tested.
        """
        results = [each for each in self.results_of(suite) if each.federation.kind == kind]
        found = [difference for each in results if (difference := _difference(each, view, method)) is not None]
        return _counted(found, tested=not is_reference(method))

    def tuning(self, suite: str, kind: str, view: View) -> str:
        """Return on how many federations tuning the baseline gains, with the median, the mean and the decided differences.

        Args:
            suite: Name of the suite.
            kind: Kind of federations, ``natural`` or ``controlled``.
            view: Global model or clients.
        """
        results = [each for each in self.results_of(suite) if each.federation.kind == kind]
        return _counted([gain for each in results if (gain := each.tuning_gain(view)) is not None], mean=True)

    def budgets(self, suite: str) -> str:
        """Return what larger budgets of tuning changed, for the methods that were also run with the common one.

        Args:
            suite: Name of the suite.
        """
        runs = SuiteRuns(*load_suite(suite), self.folder)
        large = runs.stored()
        means, same = [], 0
        for unit, small in runs.with_fewer_trials(repeated=True).items():
            pair = {"fewer": small, "more": large[unit]}
            own = FederationResults(runs.federations[unit.federation], pair, {}, "fewer")
            if len(own.outcomes) == 2:
                difference = own.differences("clients" if small["personal"] else "global").get("more")
                if difference is not None:
                    means.append(difference.mean)
                    same += small["options"] == large[unit]["options"]
        return (
            f"{len(means)} units were run with both budgets; the larger one changed the result by "
            f"{statistics.median(means):+.1f} points (median) and {statistics.fmean(means):+.2f} (mean), and chose the same "
            f"options in {same} of them"
        )

    def difference(self, suite: str, view: View, federation: str, method: str, other: str = "") -> str:
        """Return the mean difference of a method to the baseline on a federation, in points; "none" if a seed diverged.

        Args:
            suite: Name of the suite.
            view: Global model or clients.
            federation: Name of the federation.
            method: Name of the method or reference.
            other: Method to compare with instead of the baseline.
        """
        found = _difference(self.federation(suite, federation), view, method, other)
        return "none" if found is None else f"{found.mean:+.1f}"

    def interval(self, suite: str, view: View, federation: str, method: str) -> str:
        """Return the 95 % interval of the difference of a method to the baseline on a federation, in points.

        Args:
            suite: Name of the suite.
            view: Global model or clients.
            federation: Name of the federation.
            method: Name of the method.
        """
        difference = self.federation(suite, federation).differences(view)[method]
        return f"{difference.low:+.1f} to {difference.high:+.1f}"

    def mean(self, suite: str, view: View, federation: str, method: str) -> str:
        """Return the mean and standard deviation of a method's metric over seeds, in points.

        Args:
            suite: Name of the suite.
            view: Global model or clients.
            federation: Name of the federation.
            method: Name of the method or reference.
        """
        return _mean_and_std(self.federation(suite, federation), view, method)


def _difference(results: FederationResults, view: View, method: str, other: str = "") -> Difference | None:
    """Return the difference of a method or reference to another one or the baseline; None without a value of either."""
    other = other or results.baseline
    if other == results.baseline and not is_reference(method):
        return results.differences(view).get(method)
    values = {name: own for name, own in results.values(view).items() if name in (method, other)}
    return paired_differences(values, other, results.metric.lower_is_better)[method] if len(values) == 2 else None


def _mean_and_std(results: FederationResults, view: View, method: str) -> str:
    values = results.values(view).get(method)
    return "diverged" if values is None else mean_and_std(values, results.metric)


def _cell(difference: Difference | None, tested: bool = True) -> str:
    """Format a mean difference, in bold if it is decided."""
    if difference is None:
        return ""
    text = f"{difference.mean:+.1f}"
    return f"**{text}**" if tested and difference.verdict != "tie" else text


def _counted(differences: Sequence[Difference], tested: bool = True, mean: bool = False) -> str:
    """Return how many differences are above 0, with their median, and the decided ones."""
    means = [difference.mean for difference in differences]
    notes = [f"median {statistics.median(means):+.1f}", *([f"mean {statistics.fmean(means):+.1f}"] if mean else [])]
    verdicts = [difference.verdict for difference in differences] if tested else []
    for number, name, ending in ((verdicts.count("better"), "gain", "s"), (verdicts.count("worse"), "loss", "es")):
        if number:
            notes.append(f"{number} decided {name}{ending if number > 1 else ''}")
    return f"{sum(value > 0 for value in means)} of {len(means)} ({', '.join(notes)})"
