"""Sentences and tables that answer whether federated training helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unskew.comparison.benefit import FEWEST, Benefit
from unskew.comparison.significance import Estimate
from unskew.comparison.summary_statistics import is_usable_number
from unskew.tasks.formatting import value_text
from unskew.tasks.primary_metric import MetricInfo

Entry = tuple[str, float | None]
"""Text of a table cell and the number that it is sorted by."""
NAMED = 5
"""Number of clients that a sentence names."""
COUNTS = ("n", "events", "clients", "gain", "tie", "loss")
"""Columns of numbers that are not metrics."""


def benefit_sentences(benefit: Benefit | None) -> list[str]:
    """Return the answers: federated training and personal models against training alone, and against a constant."""
    if benefit is None:
        return []
    labels, lines = benefit.labels, []
    if "local" in labels:
        lines += [_against_local(benefit, model) for model in ("federated", "personal") if model in labels]
    else:
        lines.append(
            "Whether federated training helps is not known, because training alone (local) was not compared. unskew compare "
            "adds it, unless --no-references is set."
        )
    constant, minus = benefit.over_clients("constant"), benefit.over_clients("federated", "constant")
    if constant is not None and minus is not None:
        above = benefit.metric.rank(minus.value) > 0
        better = (
            "better" if benefit.improves("federated", "constant") else "not clearly better" if above else "no better"
        )
        value = value_text(benefit.metric, constant.value, sign=" %")
        lines.append(
            f"{labels['federated']} is {better} than a constant ({labels['constant']}, {value}): "
            f"{_counts(benefit, 'federated', 'constant', 'it')}."
        )
    total = len(benefit.clients) + len(benefit.undefined)
    if benefit.undefined:
        title = _title(benefit.metric)
        lines.append(
            f"{title} is undefined at {len(benefit.undefined)} of {total} clients, which are left out: "
            f"{_named(benefit.undefined)}."
        )
    if benefit.small:
        what = "held-out samples" if benefit.metric.name == benefit.scored else "held-out samples or events"
        lines.append(
            f"{len(benefit.small)} of {total} clients have fewer than {FEWEST} {what}, so their metric is mostly chance and "
            f"not tested: {_named(benefit.small)}."
        )
    return lines


def _against_local(benefit: Benefit, model: str) -> str:
    """Return whether a model helps, and the numbers behind it."""
    title, helps, does, are = {
        "federated": ("federated training", "helps", "does", "is"),
        "personal": ("personal models", "help", "do", "are"),
    }[model]
    if not benefit.clients:
        return f"It is not known whether {title} {helps}."
    answer = {
        True: f"{title.capitalize()} {helps}",
        False: f"{title.capitalize()} {does} not help",
        None: f"It is undecided whether {title} {helps}",
    }[benefit.improves(model, "local")]
    count = benefit.candidates[model]
    best = f", the best of {count} methods," if count > 1 else ""
    whose = "" if model == "federated" else "those of "
    return f"{answer}: {whose}{benefit.labels[model]}{best} {are} {_counts(benefit, model, 'local', 'training alone')}."


def _counts(benefit: Benefit, model: str, base: str, title: str) -> str:
    """Return at how many clients a model is ahead and behind, and the mean difference."""
    metric, pairs = benefit.metric, [pair for pair in benefit.at_clients(model, base) if pair is not None]
    decided = benefit.decisions(model, base)
    signs = Counter(np.sign(metric.rank(pair.value)) for pair in pairs)
    text = f"ahead of {title} at {signs[1]} of {len(pairs)} clients ({decided['gain']} significantly) and behind at "
    text += f"{signs[-1]} ({decided['loss']} significantly)"
    mean = benefit.over_clients(model, base)
    if mean is None:
        return text
    unit = " points" if metric.percent else ""
    clients = f"{mean.clients} clients" if benefit.same_clients else f"the clients of each of {benefit.seeds} seeds"
    text += f"; on average {_entry(metric, mean, '+', False)[0]}{unit}"
    ends = interval_text(metric, mean.low, mean.high, "+")
    return f"{text} (95 % interval {ends}, paired over {clients})" if ends else text


def _title(metric: MetricInfo) -> str:
    return f"{metric.title[0].upper()}{metric.title[1:]}"


def _named(labels: Sequence[str]) -> str:
    return ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more" if len(labels) > NAMED else "")


def interval_text(metric: MetricInfo, low: float | None, high: float | None, sign: str = "") -> str:
    """Format an interval; empty without one.

    Args:
        metric: Metric of the interval.
        low: Lower end, or None.
        high: Upper end, or None.
        sign: ``+`` writes signs, for differences.
    """
    if low is None or high is None:
        return ""
    digits, factor = (1, 100) if metric.percent else (4, 1)
    return f"{factor * low:{sign}.{digits}f} to {factor * high:{sign}.{digits}f}"


def _entry(metric: MetricInfo, estimate: Estimate | None, sign: str = "", ends: bool = True) -> Entry:
    """Format an estimate, with a sign if it is a difference and with its interval if it has one."""
    if estimate is None:
        return "-", None
    text = value_text(metric, estimate.value, sign="")
    text = f"+{text}" if sign and estimate.value >= 0 else text
    interval = interval_text(metric, estimate.low, estimate.high, sign) if ends else ""
    return f"{text} ({interval})" if interval else text, 100 * estimate.value if metric.percent else estimate.value


def test_set_text(summaries: Sequence[Mapping[str, Any]], metric: MetricInfo) -> str:
    """Describe the sampling error of the test set and the value of a constant, to follow a method's mean over seeds.

    Args:
        summaries: Summaries of the method's runs.
        metric: Metric on the test set.
    """
    keys = (metric.name, f"{metric.name}_low", f"{metric.name}_high", f"constant_{metric.name}")
    columns = [[s[key] for s in summaries if is_usable_number(s.get(key))] for key in keys]
    value, low, high, constant = (sum(column) / len(column) if column else None for column in columns)
    samples = summaries[0].get("test_samples")
    if f"kept_{metric.name}" in summaries[0] or not is_usable_number(samples):
        low = high = None  # with keep=best, the interval is that of another round
    ends = interval_text(metric, low, high)
    text = f" (95 % interval {ends}, sampling error of {samples:,} test samples)" if ends else ""
    if value is None or constant is None:
        return text
    inside = low is not None and high is not None and low <= constant <= high
    clear = metric.rank(value) > metric.rank(constant) and not inside
    than = "a constant scores" if clear else "no better than a constant, which scores"
    return f"{text}; {than} {value_text(metric, constant, sign=' %')}"


def benefit_title(benefit: Benefit) -> str:
    """Return the title of the tables: the metric, the evaluated samples and the number of clients."""
    count = f"{len(benefit.clients)} clients" if benefit.same_clients else f"the clients of {benefit.seeds} seeds"
    unit = " in %" if benefit.metric.percent else ""
    return f"{_title(benefit.metric)}{unit} on {benefit.measured_on}, {count}, with 95 % intervals"


def displayed(
    benefit: Benefit, rows: Sequence[Mapping[str, Any]], without: Sequence[str] = ()
) -> list[dict[str, Entry]]:
    """Format the rows of ``Benefit.overview`` or ``Benefit.rows``, with intervals and tests next to their values.

    Args:
        benefit: Comparison client by client.
        rows: Rows to format.
        without: Names of columns to leave out; for ``interval``, the intervals of single models.
    """
    shown = []
    for row in rows:
        cells: dict[str, Entry] = {}
        for name, value in row.items():
            if name in without or name.endswith(("_low", "_high", "_p", "method")):
                continue
            difference, estimate = (
                name.endswith("minus_local"),
                Estimate(value, row.get(f"{name}_low"), row.get(f"{name}_high")),
            )
            if name == "model":
                label = row["method"]
                entry: Entry = (label if label.startswith(value) else f"{label} ({value})", None)
            elif name == "client" or value is None:
                entry = ("-" if value is None else value, None)
            elif name in COUNTS:
                entry = f"{value:.4g}", value
            else:
                ends = difference or "interval" not in without
                entry = _entry(benefit.metric, estimate, "+" if difference else "", ends)
            cells[name.replace("_", " ")] = entry
            if (p := f"{name}_p") in row:
                decision = Estimate(value or 0.0, p=row[p]).decision(benefit.metric.lower_is_better)
                text = decision if row[p] is None else f"{decision}, p {row[p]:.3f}"
                cells[f"test of {name.removesuffix('_minus_local')}"] = text, row[p]
        shown.append(cells)
    return shown
