"""Verdict of a group in sentences: whether it helps, the best method, its lead and its significance, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from unskew.comparison.benefit_text import benefit_sentences, sampling_error_text
from unskew.comparison.significance import LEVEL, paired_p
from unskew.comparison.summary_statistics import paired_differences, usable_values
from unskew.reporting.run_groups import RunGroup
from unskew.tasks.formatting import format_megabytes, interval_text, value_text
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import MetricInfo

Summaries = Mapping[str, Sequence[Mapping[str, Any]]]


def verdict(part: RunGroup) -> list[str]:
    """Return whether it helps, the best method by the objective, whether its lead is conclusive, and its cost.

    Reference rows are ignored. The lead is over the second best method, paired by seed.
    """
    answers = benefit_sentences(part.comparison.benefit)
    judge = part.objective
    summaries = part.comparison.ranked
    means = {label: fmean(values) for label, own in summaries.items() if (values := usable_values(own, judge.name))}
    ranked = sorted(means, key=lambda label: judge.rank(means[label]), reverse=True)
    if not ranked:
        return answers
    best, others = ranked[0], ranked[1:]
    what, value = f"test {judge.title}", value_text(judge, means[best], sign=" %")
    seeds = len(summaries[best])
    over = f", mean over {seeds} seeds" if seeds > 1 else ""
    over += sampling_error_text(summaries[best], judge)
    if not others:
        text = f"{best} reaches a {what} of {value} after the last round{over}."
        return [*answers, text, f"{_cost(best, summaries)}."]
    return [
        *answers,
        f"{best} is the best of {len(ranked)} methods: {what} {value} after the last round{over}.",
        _lead(best, others, judge, summaries),
        f"{_cost(best, summaries)}; {_cost(others[0], summaries)}.",
    ]


def _lead(best: str, others: Sequence[str], judge: MetricInfo, summaries: Summaries) -> str:
    """Return the lead of the best method over the second, and whether it is conclusive.

    The best was chosen among all methods, so its p-value is multiplied by the number of others (Bonferroni).

    Args:
        best: Best method.
        others: Other methods, the second best first.
        judge: Metric of the comparison.
        summaries: Summaries of each method.
    """
    second, sign = others[0], judge.rank(1.0)
    leads = [sign * lead for lead in paired_differences(summaries[best], summaries[second], judge.name)]
    if not leads:
        return f"It cannot be compared with {second}, the second best: they have no seed in common."
    lead = f"{100 * fmean(leads):.1f} points" if judge.percent else f"{fmean(leads):.4f}"
    text = f"It is ahead of {second}, the second best, by {lead}"
    interval = interval95(leads)
    if interval is None:
        return f"{text}; one seed cannot show whether that is more than chance."
    p = paired_p(leads)
    if p is None:
        return f"{text}; all {len(leads)} seeds differ by the same amount, which cannot show whether it is more than chance."
    text += f" (95 % interval {interval_text(judge, interval, '+')}, paired by seed"
    p = min(1.0, len(others) * p)
    text += f"; p {p:.3f}, corrected for {len(others)} comparisons)" if len(others) > 1 else f"; p {p:.3f})"
    if interval[0] > 0 and p <= LEVEL:
        return f"{text}: conclusive for these samples, which all seeds share."
    return f"{text}: inconclusive. More seeds narrow the interval."


def _cost(method: str, summaries: Summaries) -> str:
    """Return traffic and time of a method, means over seeds."""
    sent = fmean(own["bytes_up"] + own["bytes_down"] for own in summaries[method])
    seconds = fmean(own["seconds"] for own in summaries[method])
    return f"{method} sent {format_megabytes(sent)} MB and took {seconds:,.1f} s per run"
