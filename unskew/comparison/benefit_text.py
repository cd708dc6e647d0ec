"""Sentences and tables that answer whether federated training helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unskew.comparison.benefit import Benefit
from unskew.comparison.significance import Estimate
from unskew.comparison.summary_statistics import interval_of, is_usable_number, mean_or_none, usable_values
from unskew.errors import abbreviate
from unskew.tasks.few_samples import FEWEST
from unskew.tasks.formatting import interval_text, unit_text, value_text
from unskew.tasks.primary_metric import MetricInfo

Entry = tuple[str, float | None]
"""Text of a table cell and the number that it is sorted by."""
COUNTS = ("n", "events", "clients", "gain", "tie", "loss")
"""Columns of numbers that are not metrics."""


def benefit_sentences(benefit: Benefit | None) -> list[str]:
    """Return the answers: federated training and personal models against training alone, and against a constant."""
    if benefit is None:
        return [
            "Whether federated training helps is not known: no client has a value of the objective on held-out samples, for "
            "the federated model and for training alone."
        ]
    labels, lines = benefit.labels, []
    if "local" in labels:
        lines += [_against_local(benefit, model) for model in ("federated", "personal") if model in labels]
    else:
        lines.append(
            "Whether federated training helps is not known, because training alone (local) was not compared. unskew compare "
            "adds it, unless --no-references is set."
        )
    main = benefit.main
    constant, minus = benefit.over_clients("constant"), benefit.over_clients(main, "constant")
    if constant is not None and minus is not None:
        unclear = "not clearly better" if benefit.metric.rank(minus.value) > 0 else "no better"
        better = "better" if benefit.improves(main, "constant") else unclear
        which = labels[main] if main == "federated" else f"A personal model of {labels[main]}"
        value = value_text(benefit.metric, constant.value, sign=" %")
        lines.append(
            f"{which} is {better} than a constant ({labels['constant']}, {value}): "
            f"{_counts(benefit, main, 'constant', 'it')}."
        )
    total = len(benefit.clients) + len(benefit.undefined)
    if benefit.undefined:
        lines.append(
            f"{benefit.metric.heading} is undefined at {len(benefit.undefined)} of {total} clients, which are left out: "
            f"{abbreviate(benefit.undefined)}."
        )
    if benefit.small:
        left_out = len(benefit.averaged) < len(benefit.clients)
        means = "neither tested nor part of the means"
        if not left_out:
            means = "not tested, but part of the means, because fewer than two other clients are left"
        what = "held-out samples" if benefit.metric.name == benefit.scored else "held-out samples or events"
        lines.append(
            f"{len(benefit.small)} of {total} clients have fewer than {FEWEST} {what}, so their metric is mostly chance. It "
            f"is {means}: {abbreviate(benefit.small)}."
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
    tested = any(pair.p is not None for pair in pairs)
    gains, losses = (f" ({decided[kind]} significantly)" if tested else "" for kind in ("gain", "loss"))
    text = f"ahead of {title} at {signs[1]} of {len(pairs)} clients{gains} and behind at {signs[-1]}{losses}"
    text += "" if tested else " (single clients are not tested)"
    mean = benefit.over_clients(model, base)
    if mean is None:
        return text
    unit, direction = " points" if metric.percent else "", "higher" if mean.value >= 0 else "lower"
    clients = f"{mean.clients} clients" if benefit.same_clients else f"the clients of each of {benefit.seeds} seeds"
    text += f"; on average, the {metric.title} is {value_text(metric, abs(mean.value), sign='')}{unit} {direction}"
    text += ", and lower is better" if metric.lower_is_better else ""
    ends = interval_text(metric, mean.interval, "+")
    return f"{text} (95 % interval {ends}, paired over {clients})" if ends else text


def _entry(metric: MetricInfo, estimate: Estimate, sign: str = "") -> Entry:
    """Format an estimate, with a sign if it is a difference and with its interval if it has one."""
    text = value_text(metric, estimate.value, sign="")
    text = f"+{text}" if sign and estimate.value >= 0 else text
    interval = interval_text(metric, estimate.interval, sign)
    return f"{text} ({interval})" if interval else text, 100 * estimate.value if metric.percent else estimate.value


def sampling_error_text(summaries: Sequence[Mapping[str, Any]], metric: MetricInfo) -> str:
    """Describe the sampling error of the test set and the value of a constant, to follow a method's mean over seeds.

    Args:
        summaries: Summaries of the method's runs, with the metrics of the final model.
        metric: Metric on the test set.
    """
    value, constant = (mean_or_none(usable_values(summaries, f"{whose}{metric.name}")) for whose in ("", "constant_"))
    samples = summaries[0].get("test_samples")
    interval = interval_of(summaries, metric.name) if is_usable_number(samples) else None
    ends = interval_text(metric, interval)
    text = f" (95 % interval {ends}, sampling error of {samples:,} test samples)" if ends else ""
    if value is None or constant is None:
        return text
    inside = interval is not None and interval[0] <= constant <= interval[1]
    ahead = metric.rank(value) > metric.rank(constant)
    than = f"{'not clearly' if ahead else 'no'} better than a constant, which scores"
    than = "a constant scores" if ahead and not inside else than
    return f"{text}; {than} {value_text(metric, constant, sign=' %')}"


def benefit_title(benefit: Benefit) -> str:
    """Return the title of the tables: the metric, the evaluated samples and the number of clients."""
    count = f"{len(benefit.clients)} clients" if benefit.same_clients else f"the clients of {benefit.seeds} seeds"
    counts = "n and events are means" if benefit.shows_events else "n is a mean"
    means = f"; {counts} over seeds" if benefit.same_clients and benefit.seeds > 1 else ""
    title = f"{benefit.metric.heading}{unit_text(benefit.metric)} on {benefit.measured_on}"
    return f"{title}, {count}, with 95 % intervals{means}"


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
            if name == "model":
                label = row["method"]
                entry: Entry = (label if label.startswith(value) else f"{label} ({value})", None)
            elif name == "client" or value is None:
                entry = ("-" if value is None else value, None)
            elif name in COUNTS:
                entry = f"{value:.4g}", value
            else:
                sign = "+" if name.endswith("minus_local") else ""
                estimate = Estimate(value, interval_of([row], name) if sign or "interval" not in without else None)
                entry = _entry(benefit.metric, estimate, sign)
            cells[name.replace("_", " ")] = entry
            if (p := f"{name}_p") in row:
                decision = Estimate(value or 0.0, p=row[p]).decision(benefit.metric.lower_is_better)
                text = decision if row[p] is None else f"{decision}, p {row[p]:.3f}"
                cells[f"test of {name.removesuffix('_minus_local')}"] = text, row[p]
        shown.append(cells)
    return shown
