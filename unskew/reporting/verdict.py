"""Verdict of a group in sentences: whether it helps, the best method, its lead and its significance, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from unskew.comparison.benefit_text import benefit_sentences, sampling_error_text
from unskew.comparison.significance import LEVEL, TINY, paired_p
from unskew.comparison.summary_statistics import (
    Summary,
    incomplete_seeds,
    keeps_best,
    paired_differences,
    rank_means,
    seeds_text,
    usable_values,
)
from unskew.reporting.run_groups import RunGroup
from unskew.tasks.formatting import format_megabytes, interval_text, value_text
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import MetricInfo

Summaries = Mapping[str, Sequence[Summary]]


def verdict(part: RunGroup) -> list[str]:
    """Return whether it helps, the best method by the objective, whether its lead is conclusive, and its cost.

    Reference rows are ignored. The lead is over the second best method, paired by seed. Methods with diverged seeds are
    the best only if all methods have some, and have no lead.
    """
    answers = benefit_sentences(part.comparison.benefit)
    judge = part.objective
    summaries = part.comparison.ranked_final
    means = rank_means(summaries, judge)
    if not means:
        return answers
    best, *others = means
    value = value_text(judge, means[best], sign=" %")
    over = seeds_text(len(usable_values(summaries[best], judge.name)), len(summaries[best]))
    over += sampling_error_text(summaries[best], judge)
    reached = f"{value} {'of the kept model' if keeps_best(summaries[best]) else 'after the last round'}{over}."
    if not others:
        return [*answers, f"{best} reaches a test {judge.title} of {reached}", f"{_cost(best, summaries)}."]
    equal = [label for label in others if _is_equal(summaries[best], summaries[label], judge)]
    rest = [label for label in others if label not in equal]
    which = f"{best} is the best of {len(means)} methods"
    if equal:
        which = f"{', '.join([best, *equal[:-1]])} and {equal[-1]} are equal in every seed"
        which += f" and the best of {len(means)} methods" if rest else ""
    partial = {
        label: incomplete_seeds(own, judge.name)
        for label, own in summaries.items()
        if part.comparison.has_global_model(label)
    }
    lost = ", ".join(f"{label} ({count} of {len(summaries[label])} seeds)" for label, count in partial.items() if count)
    return [
        *answers,
        f"{which}: test {judge.title} {reached}",
        *([f"Ranked last, because seeds diverged or have no value: {lost}."] if lost else []),
        *([_lead(best, rest, judge, summaries)] if rest else []),
        f"{_cost(best, summaries)}; {_cost(others[0], summaries)}.",
    ]


def _is_equal(own: Sequence[Summary], other: Sequence[Summary], judge: MetricInfo) -> bool:
    """Return whether a metric of two methods is the same in every seed."""
    leads = paired_differences(own, other, judge.name)
    return len(leads) == len(own) == len(other) and max(map(abs, leads)) <= TINY


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
    if any(incomplete_seeds(summaries[label], judge.name) for label in (best, second)):
        return "Its lead is not stated, because it or all others lack seeds."
    leads = [sign * lead for lead in paired_differences(summaries[best], summaries[second], judge.name)]
    if not leads:
        return f"It cannot be compared with {second}, the second best: they have no seed in common."
    mean = fmean(leads)
    lead = f"{100 * abs(mean):.1f} points" if judge.percent else f"{abs(mean):.4f}"
    text = f"It is {'ahead of' if mean > 0 else 'behind'} {second}, the second best, by {lead}"
    if abs(mean) <= TINY:
        text = f"Its mean equals that of {second}, the second best"
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
