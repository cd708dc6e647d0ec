"""Verdict of a group in three sentences: the best method, its lead and its significance, and its cost."""

from __future__ import annotations

from unskew.comparison.summary_statistics import is_usable_number, mean_std
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.tables import can_be_paired
from unskew.tasks.formatting import format_megabytes, value_text
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import MetricInfo, metric_info


def verdict(part: RunGroup) -> list[str]:
    """Return the best method by the objective after the last round, whether its lead is conclusive, and its cost.

    Reference rows are ignored. The lead is over the second best method, paired by seed.
    """
    judge = metric_info("loss") if part.language else part.objective
    name, low = judge.name, judge.lower_is_better
    means = {
        method_runs.label: mean_std(_values(method_runs, name))[0]
        for method_runs in part.ranked
        if _values(method_runs, name)
    }
    ranked = sorted(
        (method_runs for method_runs in part.ranked if method_runs.label in means),
        key=lambda method_runs: means[method_runs.label],
        reverse=not low,
    )
    if not ranked:
        return []
    best, others = ranked[0], ranked[1:]
    what, value = f"test {judge.title}", value_text(judge, means[best.label], sign=" %")
    over = f", mean over {len(best.runs)} seeds" if len(best.runs) > 1 else ""
    if not others:
        return [f"{best.label} reaches a {what} of {value} after the last round{over}.", f"{_cost(best)}."]
    return [
        f"{best.label} is the best of {len(ranked)} methods: {what} {value} after the last round{over}.",
        _lead(best, others[0], judge),
        f"{_cost(best)}; {_cost(others[0])}.",
    ]


def _values(one: MethodRuns, name: str) -> list[float]:
    return [run.summary[name] for run in one.runs if is_usable_number(run.summary.get(name))]


def _lead(best: MethodRuns, second: MethodRuns, judge: MetricInfo) -> str:
    """Return the lead of the best method over the second, and whether it is conclusive."""
    name, factor = judge.name, judge.rank(100.0 if judge.percent else 1.0)
    pairs = [(a.summary, b.summary) for a in best.runs for b in second.runs if can_be_paired(a, b)]
    leads = [
        factor * (a[name] - b[name])
        for a, b in pairs
        if is_usable_number(a.get(name)) and is_usable_number(b.get(name))
    ]
    if not leads:
        return f"It cannot be compared with {second.label}, the second best: they have no seed in common."
    digits, unit = (1, " points") if judge.percent else (4, "")
    text = f"It is ahead of {second.label}, the second best, by {mean_std(leads)[0]:.{digits}f}{unit}"
    interval = interval95(leads)
    if interval is None:
        return f"{text}; one seed cannot show whether that is more than chance."
    lead_text = f"{text} (95 % interval {interval[0]:+.{digits}f} to {interval[1]:+.{digits}f}, paired by seed)"
    if interval[0] > 0:
        return f"{lead_text}: conclusive."
    return f"{lead_text}: inconclusive, because the interval includes zero. More seeds narrow it."


def _cost(one: MethodRuns) -> str:
    """Return traffic and time of a method, means over seeds."""
    sent = mean_std([run.summary["bytes_up"] + run.summary["bytes_down"] for run in one.runs])[0]
    seconds = mean_std([run.summary["seconds"] for run in one.runs])[0]
    return f"{one.label} sent {format_megabytes(sent)} MB and took {seconds:,.1f} s per run"
