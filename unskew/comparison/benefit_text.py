"""Sentences and tables that answer whether federated training helps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unskew.comparison.benefit import FEWEST, Benefit
from unskew.comparison.significance import Estimate
from unskew.comparison.summary_statistics import is_usable_number
from unskew.tasks.formatting import format_percent, value_text
from unskew.tasks.primary_metric import MetricInfo
from unskew.tasks.regression import Regression

Entry = tuple[str, float | None]
"""Text of a table cell and the number that it is sorted by."""
NAMED = 5
"""Number of clients that a sentence names."""
COMPARED = {"federated": " (global)", "personal": " (personal)"}
"""Models that are compared with training alone, and the suffixes of their methods."""


def benefit_sentences(benefit: Benefit | None) -> list[str]:
    """Return the answers: federated training and personal models against training alone, and against a constant."""
    if benefit is None:
        return []
    labels, lines = benefit.labels, []
    if "local" in labels:
        lines += [_against_local(benefit, model) for model in COMPARED if model in labels]
    else:
        lines.append(
            "Whether federated training helps is not known, because training alone (local) was not compared. unskew compare "
            "adds it, unless --no-references is set."
        )
    constant = benefit.over_clients("constant")
    if constant is not None:
        better = "better" if benefit.improves("federated", "constant") else "no better"
        value = value_text(benefit.metric, constant.value, sign=" %")
        lines.append(
            f"{labels['federated']} is {better} than a constant ({constant_title(benefit)}, {value}): "
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
    text = f"ahead of {title} at {signs[1]} of {len(pairs)} clients, significantly at {decided['gain']}, and behind at "
    text += f"{signs[-1]}, significantly at {decided['loss']}"
    mean = benefit.over_clients(model, base)
    if mean is None:
        return text
    unit = " points" if metric.percent else ""
    clients = f"{mean.clients} clients" if benefit.same_clients else f"the clients of each of {benefit.seeds} seeds"
    text += f"; on average {_entry(metric, mean, '+', False)[0]}{unit}"
    ends = _ends(metric, mean, "+")
    return f"{text} (95 % interval {ends}, paired over {clients})" if ends else text


def constant_title(benefit: Benefit) -> str:
    """Return the description of the constant that a client's models are compared with."""
    if benefit.scored == Regression.scored:
        return "each client's own mean"
    return f"each client's {'most frequent class' if benefit.metric.name == 'accuracy' else 'class shares'}"


def _title(metric: MetricInfo) -> str:
    return f"{metric.title[0].upper()}{metric.title[1:]}"


def _named(labels: Sequence[str]) -> str:
    return ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more" if len(labels) > NAMED else "")


def _ends(metric: MetricInfo, estimate: Estimate, sign: str = "") -> str:
    """Format the interval of an estimate, with signs for differences; empty without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    digits, factor = (1, 100) if metric.percent else (4, 1)
    return f"{factor * estimate.low:{sign}.{digits}f} to {factor * estimate.high:{sign}.{digits}f}"


def _entry(metric: MetricInfo, estimate: Estimate | None, sign: str = "", ends: bool = True) -> Entry:
    """Format an estimate, with a sign if it is a difference and with its interval if it has one."""
    if estimate is None:
        return "-", None
    text = value_text(metric, estimate.value, sign="")
    text = f"+{text}" if sign and estimate.value >= 0 else text
    interval = _ends(metric, estimate, sign) if ends else ""
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
    text, clear = "", True
    # With keep=best, the interval is that of another round.
    if value is not None and low is not None and high is not None and f"kept_{metric.name}" not in summaries[0]:
        samples = f"{summaries[0].get('test_samples', 0):,} test samples"
        text = f" (95 % interval {_ends(metric, Estimate(value, low, high))}, sampling error of {samples})"
        clear = constant is None or not low <= constant <= high
    if value is None or constant is None:
        return text
    clear = clear and metric.rank(value) > metric.rank(constant)
    than = "a constant scores" if clear else "no better than a constant, which scores"
    return f"{text}; {than} {value_text(metric, constant, sign=' %')}"


def benefit_title(benefit: Benefit) -> str:
    """Return the title of the tables: the metric, the evaluated samples and the number of clients."""
    count = f"{len(benefit.clients)} clients" if benefit.same_clients else f"the clients of {benefit.seeds} seeds"
    unit = " in %" if benefit.metric.percent else ""
    return f"{_title(benefit.metric)}{unit} on {benefit.measured_on}, {count}, with 95 % intervals"


def overview_rows(benefit: Benefit) -> list[dict[str, Entry]]:
    """Return a row for each compared model: its mean over clients, and its difference to training alone."""
    metric, rows = benefit.metric, []
    for model, label in benefit.labels.items():
        mean = benefit.over_clients(model)
        title = f"constant: {constant_title(benefit)}" if model == "constant" else f"{label}{COMPARED.get(model, '')}"
        row: dict[str, Entry] = {
            "model": (title, None),
            "clients": (str(mean.clients), mean.clients) if mean else ("0", 0),
        }
        row["mean"] = _entry(metric, mean)
        if metric.name == Regression.scored:
            share = _within_clients(benefit, model)
            row["R² within clients"] = (format_percent(share), share)
        if "local" in benefit.labels:
            minus = None if model == "local" else benefit.over_clients(model, "local")
            row["minus local"], count = _entry(metric, minus, "+"), benefit.decisions(model, "local")
            for decision in ("gain", "tie", "loss"):
                row[decision] = (str(count[decision]), count[decision]) if minus else ("-", None)
        rows.append(row)
    return rows


def _within_clients(benefit: Benefit, model: str) -> float | None:
    """Return R² relative to the clients' own means: 1 minus the ratio of the mean squared errors."""
    pairs = [(client.estimate(model), client.estimate("constant")) for client in benefit.clients]
    known = [(1 - own.value, 1 - constant.value) for own, constant in pairs if own and constant]
    against = sum(constant for _, constant in known)
    return 1 - sum(own for own, _ in known) / against if against > 0 else None


def client_rows(benefit: Benefit, brief: bool = False) -> list[dict[str, Entry]]:
    """Return a row for each client, those with the largest loss against training alone first.

    Args:
        benefit: Comparison client by client.
        brief: Whether to leave out intervals of single models, ``pooled``, and the worse of global and personal models.
    """
    metric, labels, ranked = benefit.metric, benefit.labels, []
    pairs = {model: benefit.at_clients(model, "local") for model in COMPARED if {model, "local"} <= {*labels}}
    if brief and pairs:
        means = {model: benefit.over_clients(model, "local") for model in pairs}
        best = max(pairs, key=lambda model: metric.rank(mean.value) if (mean := means[model]) else -math.inf)
        pairs = {best: pairs[best]}
    events = len({client.events for client in benefit.clients}) > 1
    for position, client in enumerate(benefit.clients):
        row: dict[str, Entry] = {"client": (client.label, None), "n": (f"{client.samples:.4g}", client.samples)}
        if events:
            row["events"] = ("-" if client.events is None else f"{client.events:.4g}", client.events)
        for model in labels:
            if not (brief and model == "pooled"):
                row[model] = _entry(metric, client.estimate(model), ends=not brief)
        for model, own in pairs.items():
            pair = own[position]
            row[f"{model} minus local"] = _entry(metric, pair, "+")
            row[f"test of {model}"] = ("-", None)
            if pair is not None and pair.p is not None:
                row[f"test of {model}"] = (f"{pair.decision(metric.lower_is_better)}, p {pair.p:.3f}", pair.p)
        judged = next((own[position] for own in pairs.values()), client.estimate("federated"))
        ranked.append((metric.rank(judged.value) if judged else 0.0, row))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def plain_rows(rows: Sequence[Mapping[str, Entry]]) -> list[dict[str, Any]]:
    """Return the numbers of a table, and the texts of cells without a number."""
    return [{name: text if number is None else number for name, (text, number) in row.items()} for row in rows]
