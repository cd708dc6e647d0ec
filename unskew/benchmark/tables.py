"""Tables of a benchmark: an overview of all federations, and the details of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unskew.benchmark.results import FederationResults, View, diverged
from unskew.benchmark.statistics import Difference, bootstrap_interval, rank_methods
from unskew.comparison.references import is_reference
from unskew.reproduction.study import Line

TITLES: dict[View, str] = {"global": "Global model, test data", "clients": "Clients' own data"}
FEWEST = 5
"""Number of federations from which an interval of a mean over federations is shown."""


def mean_and_std(values: Sequence[float]) -> str:
    """Format a mean and a standard deviation.

    >>> mean_and_std([70.0, 72.0])
    '71.0 ± 1.4'
    """
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def signed(difference: Difference | None) -> str:
    """Format a difference: in bold if decided, with the interval; a hyphen if there is none."""
    if difference is None:
        return "-"
    text = f"{difference.mean:+.1f} ({difference.low:+.1f} to {difference.high:+.1f})"
    return text if difference.verdict == "tie" else f"**{text}**"


def federation_table(results: FederationResults) -> Line:
    """Return the table of one federation: scores, differences, worst client, and cost to the baseline's score.

    Args:
        results: Outcomes of the federation.
    """
    shown = results.values("global"), results.values("clients"), results.values("clients", worst=True)
    own = results.differences("global"), results.differences("clients")
    title = f"{results.metric.title}{' in %' if results.metric.percent else ''}, mean ± std over seeds"
    header = [
        "method",
        "test",
        "to baseline",
        "clients, mean",
        "to baseline",
        "worst client",
        "rounds",
        "MB",
        "options",
    ]
    timed = any("seconds_simulated" in outcome for outcome in results.outcomes.values())
    if timed:
        header.insert(-1, "simulated s")
    rows = []
    for name, outcome in results.outcomes.items():
        if diverged(outcome):
            rows.append([f"`{name}`", "diverged", *["-"] * (len(header) - 3), _options(outcome["options"])])
            continue
        cost = results.cost(name) if not is_reference(name) and not outcome["personal"] else None
        cells = [mean_and_std(values[name]) if name in values else "-" for values in shown]
        numbers = [
            "-" if cost is None or cost.rounds is None else f"{cost.rounds:.0f}",
            "-" if cost is None or cost.bytes is None else f"{cost.bytes / 1e6:.3g}",
        ]
        if timed:
            numbers.append("-" if cost is None or cost.seconds is None else f"{cost.seconds:.3g}")
        first, second = signed(own[0].get(name)), signed(own[1].get(name))
        rows.append([f"`{name}`", cells[0], first, cells[1], second, cells[2], *numbers, _options(outcome["options"])])
    return title, header, rows


def _options(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def overview_table(results: Sequence[FederationResults], methods: Sequence[str], view: View) -> Line:
    """Return the table of methods over federations: decided wins and losses, mean difference and mean rank.

    Args:
        results: Outcomes of the federations.
        methods: Method expressions without the baseline.
        view: Global model or clients.
    """
    differences = [own.differences(view) for own in results]
    ranks = rank_methods(_scores(results, view))
    rows = []
    for name in methods:
        own_differences = [by_name[name] for by_name in differences if name in by_name]
        if not own_differences:
            continue
        verdicts = [difference.verdict for difference in own_differences]
        means = [difference.mean for difference in own_differences]
        mean = f"{statistics.fmean(means):+.1f}"
        if len(means) >= FEWEST:
            low, high = bootstrap_interval(means)
            mean += f" ({low:+.1f} to {high:+.1f})"
        counts = [str(verdicts.count(verdict)) for verdict in ("better", "tie", "worse")]
        rank = f"{ranks.mean[name]:.1f}" if name in ranks.mean else "-"
        rows.append([f"`{name}`", str(len(means)), *counts, mean, f"{statistics.median(means):+.1f}", rank])
    rows.sort(key=lambda row: -float(row[5].split(" ")[0]))
    header = ["method", "federations", "better", "tie", "worse", "mean difference (95 %)", "median", "mean rank"]
    return TITLES[view], header, rows


def _scores(results: Sequence[FederationResults], view: View) -> list[dict[str, float]]:
    """Return the mean score of each method on each federation, without references; higher is better."""
    scores = []
    for own in results:
        sign = -1 if own.metric.lower_is_better else 1
        values = {name: values for name, values in own.values(view).items() if not is_reference(name)}
        scores.append({name: sign * statistics.fmean(value) for name, value in values.items()})
    return scores


def ranks_note(results: Sequence[FederationResults], view: View) -> str:
    """Return a sentence about the ranks: the number of methods, Friedman's test and the critical difference.

    Args:
        results: Outcomes of the federations.
        view: Global model or clients.
    """
    ranks = rank_methods(_scores(results, view))
    if ranks.p is None or ranks.critical is None:
        return "Ranks need at least three methods that ran on all of at least two federations."
    baseline = results[0].baseline
    baseline_rank = f" {baseline} has mean rank {ranks.mean[baseline]:.1f}." if baseline in ranks.mean else ""
    return (
        f"Mean ranks are those of the {len(ranks.mean)} methods that ran on all {ranks.federations} federations. "
        f"Friedman's test: p = {ranks.p:.2g}. Mean ranks that differ by less than {ranks.critical:.1f} are not "
        f"distinguished (Nemenyi, 5 %).{baseline_rank}"
    )


def tuning_table(results: Sequence[FederationResults]) -> Line:
    """Return what tuning the baseline alone gives, and the best method if one is better than the tuned baseline.

    Args:
        results: Outcomes of the federations.
    """
    rows = []
    for own in results:
        gain = own.tuning_gain("global")
        values = own.values("global")
        differences = own.differences("global")
        better = [name for name, difference in differences.items() if difference.mean > 0]
        best = max(better, key=lambda name: differences[name].mean, default=None)
        pooled = next((values[name] for name in values if is_reference(name)), None)
        rows.append(
            [
                own.federation.name,
                own.metric.title,
                mean_and_std(values[own.baseline]) if own.baseline in values else "diverged",
                signed(gain),
                "-" if best is None else f"`{best}`",
                signed(None if best is None else differences[best]),
                "-" if pooled is None else mean_and_std(pooled),
            ]
        )
    baseline = results[0].baseline
    header = ["federation", "metric", f"{baseline}, tuned", "gain by tuning", "best method", "to tuned", "pooled"]
    return f"{baseline}: what tuning gives", header, rows
