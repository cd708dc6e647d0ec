"""Tables of a benchmark: an overview of all federations, and the details of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unskew.benchmark.results import FederationResults, View, diverged
from unskew.benchmark.statistics import Difference, bootstrap_interval, rank_methods
from unskew.comparison.references import is_reference
from unskew.reproduction.study import Line
from unskew.tasks.formatting import points_text, unit_text
from unskew.tasks.primary_metric import MetricInfo

TITLES: dict[View, str] = {"global": "Global model, test data", "clients": "Clients' own data"}
FEWEST = 5
"""Number of federations from which an interval of a mean over federations is shown."""


def mean_and_std(values: Sequence[float], metric: MetricInfo) -> str:
    """Format a mean and a standard deviation.

    Args:
        values: Metric of each seed, in points.
        metric: Metric of the values.

    >>> mean_and_std([70.0, 72.0], MetricInfo("auroc", "AUROC"))
    '71.0 ± 1.4'
    """
    return points_text(metric, statistics.fmean(values), statistics.stdev(values))


def mean_and_interval(mean: float, interval: tuple[float, float], metric: MetricInfo) -> str:
    """Format a mean difference and its interval.

    Args:
        mean: Mean difference in points.
        interval: Lower and upper end in points.
        metric: Metric of the difference.
    """
    low, high = (points_text(metric, end, signed=True) for end in interval)
    return f"{points_text(metric, mean, signed=True)} ({low} to {high})"


def signed(difference: Difference | None, metric: MetricInfo) -> str:
    """Format a difference: in bold if decided, with the interval; a hyphen if there is none.

    Args:
        difference: Difference in points, or None.
        metric: Metric of the difference.
    """
    if difference is None:
        return "-"
    text = mean_and_interval(difference.mean, (difference.low, difference.high), metric)
    return text if difference.verdict == "tie" else f"**{text}**"


def federation_table(results: FederationResults) -> Line:
    """Return the table of one federation: scores, differences, worst client, and cost to the baseline's score.

    Args:
        results: Outcomes of the federation.
    """
    shown = results.values("global"), results.values("clients"), results.values("clients", worst=True)
    own = results.differences("global"), results.differences("clients")
    metric = results.metric
    direction = " (lower is better)" if metric.lower_is_better else ""
    title = f"{metric.title}{unit_text(metric)}{direction}, mean ± std over seeds"
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
        cells = [mean_and_std(values[name], metric) if name in values else "-" for values in shown]
        numbers = [
            "-" if cost is None or cost.rounds is None else f"{cost.rounds:.0f}",
            "-" if cost is None or cost.bytes is None else f"{cost.bytes / 1e6:.3g}",
        ]
        if timed:
            numbers.append("-" if cost is None or cost.seconds is None else f"{cost.seconds:.3g}")
        first, second = (signed(by_name.get(name), metric) for by_name in own)
        rows.append([f"`{name}`", cells[0], first, cells[1], second, cells[2], *numbers, _options(outcome["options"])])
    return title, header, rows


def _options(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def overview_table(results: Sequence[FederationResults], methods: Sequence[str], view: View) -> Line:
    """Return the table of methods over federations: decided wins and losses, mean difference and mean rank.

    If the differences of the federations have different units, their mean and median are left out.

    Args:
        results: Outcomes of the federations.
        methods: Method expressions without the baseline.
        view: Global model or clients.
    """
    differences = [own.differences(view) for own in results]
    ranks = rank_methods(_scores(results, view))
    metric = results[0].metric
    have_same_unit = same_unit(results)
    rows: list[tuple[float, list[str]]] = []
    for name in methods:
        own_differences = [by_name[name] for by_name in differences if name in by_name]
        if not own_differences:
            continue
        verdicts = [difference.verdict for difference in own_differences]
        counts = [verdicts.count(verdict) for verdict in ("better", "tie", "worse")]
        rank = f"{ranks.mean[name]:.1f}" if name in ranks.mean else "-"
        mean_text = median_text = "-"
        if have_same_unit:
            means = [difference.mean for difference in own_differences]
            order = statistics.fmean(means)
            median_text = points_text(metric, statistics.median(means), signed=True)
            mean_text = points_text(metric, order, signed=True)
            if len(means) >= FEWEST:
                mean_text = mean_and_interval(order, bootstrap_interval(means), metric)
        else:
            order = (counts[0] - counts[2]) / len(verdicts)
        cells = [f"`{name}`", str(len(verdicts)), *map(str, counts), mean_text, median_text, rank]
        rows.append((order, cells))
    rows.sort(key=lambda row: -row[0])
    header = ["method", "federations", "better", "tie", "worse", "mean difference (95 %)", "median", "mean rank"]
    return TITLES[view], header, [cells for _, cells in rows]


def same_unit(results: Sequence[FederationResults]) -> bool:
    """Return whether the metrics of all federations are in percent, or are the same metric.

    Args:
        results: Outcomes of the federations.
    """
    return len({"%" if own.metric.percent else own.metric.name for own in results}) == 1


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
                mean_and_std(values[own.baseline], own.metric) if own.baseline in values else "diverged",
                signed(gain, own.metric),
                "-" if best is None else f"`{best}`",
                signed(None if best is None else differences[best], own.metric),
                "-" if pooled is None else mean_and_std(pooled, own.metric),
            ]
        )
    baseline = results[0].baseline
    header = ["federation", "metric", f"{baseline}, tuned", "gain by tuning", "best method", "to tuned", "pooled"]
    return f"{baseline}: what tuning gives", header, rows
