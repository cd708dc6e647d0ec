"""Sentences and tables that answer whether federated training helps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unskew.comparison.significance import Difference, Estimate
from unskew.comparison.summary_statistics import is_usable_number
from unskew.tasks.formatting import format_percent, value_text
from unskew.tasks.intervals import Interval
from unskew.tasks.primary_metric import MetricInfo
from unskew.tasks.regression import Regression

if TYPE_CHECKING:
    from unskew.comparison.benefit import Benefit, ClientValues

Entry = tuple[str, float | None]
"""Text of a table cell and the number that it is sorted by."""
FEWEST = 10
"""Number of held-out samples, or of events, below which a client's metric is mostly chance."""
NAMED = 5
"""Number of clients that a sentence names."""
ADD_LOCAL = (
    "Whether federated training helps is not known, because training alone (local) was not compared. Leave out "
    "--no-references to add it."
)
NO_TESTS = "single clients are not tested, because their metric has no interval"


def benefit_sentences(benefit: Benefit) -> list[str]:
    """Return the answers: federated training and personal models against training alone, and against a constant."""
    lines = []
    if "local" in benefit.labels:
        lines.append(_against_local(benefit, "federated", "Federated training", "helps"))
        if "personal" in benefit.labels:
            lines.append(_against_local(benefit, "personal", "Personal models", "help"))
    else:
        lines.append(ADD_LOCAL)
    if "constant" in benefit.labels:
        lines.append(_against_constant(benefit))
    if benefit.undefined:
        total = len(benefit.clients) + len(benefit.undefined)
        lines.append(
            f"{_title(benefit.metric)} is undefined at {len(benefit.undefined)} of {total} clients, which are left out: "
            f"{_named(benefit.undefined)}."
        )
    small = [client.label for client in benefit.clients if benefit.is_small(client)]
    if small:
        what = f"{FEWEST} held-out samples" if benefit.metric.name == benefit.scored else f"{FEWEST} samples or events"
        lines.append(
            f"{len(small)} of {len(benefit.clients)} clients have fewer than {what}, so their metric is mostly chance: "
            f"{_named(small)}."
        )
    return [line for line in lines if line]


def _against_local(benefit: Benefit, model: str, title: str, helps: str) -> str:
    mean = benefit.over_clients(model, "local")
    if mean is None:
        return ""
    count = benefit.candidates[model]
    label = f"{benefit.labels[model]}, the best of {count} methods," if count > 1 else benefit.labels[model]
    verb = "is" if helps == "helps" else "are"
    answer = {
        None: f"It is undecided whether {title[0].lower()}{title[1:]} {helps}",
        True: f"{title} {helps}",
        False: f"{title} {'does' if verb == 'is' else 'do'} not help",
    }[_sign(mean[1], benefit.metric.lower_is_better)]
    return f"{answer}: {label} {verb} {_counts(benefit, model, 'local', 'training alone')}."


def _against_constant(benefit: Benefit) -> str:
    mean, value = benefit.over_clients("federated", "constant"), benefit.over_clients("constant")
    if mean is None or value is None:
        return ""
    better = "better" if _sign(mean[1], benefit.metric.lower_is_better) else "no better"
    constant = f"a constant ({constant_title(benefit)}, {value_text(benefit.metric, value[0], sign=' %')})"
    label = benefit.labels["federated"]
    return f"{label} is {better} than {constant}: {_counts(benefit, 'federated', 'constant', 'it')}."


def constant_title(benefit: Benefit) -> str:
    """Return the description of the constant that a client's models are compared with."""
    if benefit.scored == Regression.scored:
        return "each client's own mean"
    return "each client's most frequent class" if benefit.metric.name == "accuracy" else "each client's class shares"


def _sign(interval: Interval, lower_is_better: bool) -> bool | None:
    """Return whether a difference is an improvement; None if its interval includes zero or is missing."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return None
    return (interval[0] > 0) != lower_is_better


def _counts(benefit: Benefit, model: str, base: str, title: str) -> str:
    """Return at how many clients a model is better, worse and not significantly different, and the mean difference."""
    mean = benefit.over_clients(model, base)
    assert mean is not None
    decided = [pair.decision(benefit.metric.lower_is_better) for pair in benefit.differences(model, base) if pair]
    gain, lose, tie = (decided.count(decision) for decision in ("gain", "lose", "tie"))  # type: ignore[arg-type]
    text = (
        f"better than {title} at {gain} of {len(decided)} clients, worse at {lose}, no significant difference at {tie}"
    )
    if None in decided:
        signs = [pair.value for pair in benefit.differences(model, base) if pair]
        better = sum(benefit.metric.rank(value) > 0 for value in signs)
        text = (
            f"higher than {title} at {better} of {len(signs)} clients"
            if not benefit.metric.lower_is_better
            else (f"lower than {title} at {better} of {len(signs)} clients")
        )
        text += f" ({NO_TESTS})"
    interval = (
        "" if mean[1] is None else f" (95 % interval {interval_text(benefit.metric, mean[1])}, {_paired(benefit)})"
    )
    return f"{text}; on average {difference_text(benefit.metric, mean[0])}{interval}"


def _paired(benefit: Benefit) -> str:
    if benefit.same_clients:
        return f"paired over {len(benefit.clients)} clients"
    return f"paired over the clients of each of {benefit.seeds} seeds"


def _title(metric: MetricInfo) -> str:
    return f"{metric.title[0].upper()}{metric.title[1:]}"


def _named(labels: Sequence[str]) -> str:
    rest = len(labels) - NAMED
    return ", ".join(labels[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def difference_text(metric: MetricInfo, value: float) -> str:
    """Format a difference with its sign: in points for percentages, otherwise as a number.

    Args:
        metric: Metric of the difference.
        value: Difference.
    """
    return f"{100 * value:+.1f} points" if metric.percent else f"{value:+.4f}"


def interval_text(metric: MetricInfo, interval: Interval, sign: str = "+") -> str:
    """Format an interval; ``-`` without one.

    Args:
        metric: Metric of the interval.
        interval: Ends of the interval, or None.
        sign: ``+`` writes signs, for differences.
    """
    if interval is None:
        return "-"
    digits, factor = (1, 100) if metric.percent else (4, 1)
    return " to ".join(f"{factor * end:{sign}.{digits}f}" for end in interval)


def test_set_text(summaries: Sequence[Mapping[str, Any]], metric: MetricInfo) -> str:
    """Describe the sampling error of the test set and the value of a constant, to follow a method's mean over seeds.

    Args:
        summaries: Summaries of the method's runs.
        metric: Metric on the test set.
    """
    keys = (metric.name, f"{metric.name}_low", f"{metric.name}_high", f"constant_{metric.name}")
    columns = [[s[key] for s in summaries if is_usable_number(s.get(key))] for key in keys]
    value, low, high, constant = (sum(column) / len(column) if column else None for column in columns)
    text = ""
    known = None not in (low, high) and not any(f"kept_{metric.name}" in s for s in summaries)
    if known:  # with keep=best it is the interval of another round
        samples = f"{summaries[0]['test_samples']:,} test samples"
        text = f" (95 % interval {interval_text(metric, (low, high), '')}, sampling error of {samples})"
    if value is None or constant is None:
        return text
    above = metric.rank(value) > metric.rank(constant)
    clear = above and not (known and low <= constant <= high)
    than = "a constant scores" if clear else "no better than a constant, which scores"
    return f"{text}; {than} {value_text(metric, constant, sign=' %')}"


def benefit_title(benefit: Benefit) -> str:
    """Return the title of the tables: the metric, the evaluated samples and the number of clients."""
    count = f"{len(benefit.clients)} clients" if benefit.same_clients else f"the clients of {benefit.seeds} seeds"
    unit = " in %" if benefit.metric.percent else ""
    return f"Does it help? {_title(benefit.metric)}{unit} on {benefit.measured_on}, {count}"


def benefit_notes(benefit: Benefit) -> list[str]:
    """Return notes on the tables: what the intervals cover, and what a client's R² is relative to."""
    notes = [
        "Means weigh every client equally; their intervals are Student's t over clients"
        + ("." if benefit.same_clients else ", with as many clients as a seed has, because seeds share their samples."),
        "The interval of one client covers the sampling of its held-out samples, not the randomness of training. "
        "Differences at one client are tested as if both models were tested on different samples, which is cautious, and "
        "p-values are corrected for the number of clients by Holm's method.",
    ]
    if benefit.metric.name == Regression.scored:
        notes.append(
            "A client's R² divides its squared error by the variance of all clients' targets, so a constant can be far "
            "above 0. Relative to the clients' own means, the constant is 0."
        )
    return notes


def overview_rows(benefit: Benefit) -> list[dict[str, Entry]]:
    """Return a row for each compared model: its mean over clients, and its difference to training alone."""
    metric, rows = benefit.metric, []
    names = {"federated": "global", "personal": "personal"}
    for model, label in benefit.labels.items():
        mean = benefit.over_clients(model)
        if mean is None:
            continue
        title = f"constant: {constant_title(benefit)}" if model == "constant" else label
        row: dict[str, Entry] = {"model": (f"{title} ({names[model]})" if model in names else title, None)}
        row["clients"] = (str(mean[2]), mean[2])
        row["mean"] = _number(metric, mean[0])
        row["95 % interval"] = (interval_text(metric, mean[1], ""), None if mean[1] is None else mean[1][0])
        if metric.name == Regression.scored:
            share = _relative([client for client in benefit.clients if client.estimate("constant")], model)
            row["relative to own means"] = ("-" if share is None else format_percent(share), share)
        minus = benefit.over_clients(model, "local") if model != "local" and "local" in benefit.labels else None
        if "local" in benefit.labels:
            decided = [pair.decision(metric.lower_is_better) for pair in benefit.differences(model, "local") if pair]
            ends = ("-", None) if minus is None else (interval_text(metric, minus[1]), minus[0])
            row["minus local"] = ("-", None) if minus is None else _signed(metric, minus[0])
            row["its 95 % interval"] = ends
            for title, decision in (("gain", "gain"), ("tie", "tie"), ("lose", "lose")):
                untested = minus is None or None in decided
                count = decided.count(decision)  # type: ignore[arg-type]
                row[title] = ("-", None) if untested else (str(count), count)
        rows.append(row)
    return rows


def client_rows(benefit: Benefit) -> list[dict[str, Entry]]:
    """Return a row for each client, those with the largest loss against training alone first."""
    metric = benefit.metric
    compared = [model for model in ("federated", "personal") if model in benefit.labels and "local" in benefit.labels]
    pairs = {model: benefit.differences(model, "local") for model in compared}
    events = len({client.events for client in benefit.clients}) > 1
    ranked = []
    for position, client in enumerate(benefit.clients):
        row: dict[str, Entry] = {"client": (client.label, None), "n": (f"{client.samples:.4g}", client.samples)}
        if events:
            row["events"] = ("-" if client.events is None else f"{client.events:.4g}", client.events)
        for model in benefit.labels:
            row[model] = _estimate(metric, client.estimate(model))
        for model in compared:
            row |= _difference(metric, f"{model} minus local", pairs[model][position])
        first = pairs["federated"][position] if compared else None
        own = client.estimate("federated")
        ranked.append((metric.rank(first.value if first else own.value if own else 0.0), row))
    ranked.sort(key=lambda pair: pair[0])
    return [row for _, row in ranked]


def _number(metric: MetricInfo, value: float) -> Entry:
    return value_text(metric, value, sign=""), 100 * value if metric.percent else value


def _signed(metric: MetricInfo, value: float) -> Entry:
    return difference_text(metric, value).removesuffix(" points"), 100 * value if metric.percent else value


def _estimate(metric: MetricInfo, estimate: Estimate | None) -> Entry:
    if estimate is None:
        return "-", None
    text, number = _number(metric, estimate.value)
    if estimate.low is None or estimate.high is None:
        return text, number
    return f"{text} ({interval_text(metric, (estimate.low, estimate.high), '')})", number


def _difference(metric: MetricInfo, title: str, pair: Difference | None) -> dict[str, Entry]:
    if pair is None:
        return {title: ("-", None), f"{title}: p": ("-", None)}
    text, number = _signed(metric, pair.value)
    if pair.low is not None and pair.high is not None:
        text += f" ({interval_text(metric, (pair.low, pair.high))})"
    decision = "-" if pair.p is None else f"{pair.p:.3f}, {pair.decision(metric.lower_is_better)}"
    return {title: (text, number), f"{title}: p": (decision, pair.p)}


def _relative(clients: Iterable[ClientValues], model: str) -> float | None:
    """Return R² relative to the clients' own means: 1 minus the ratio of the mean squared errors."""
    errors = [
        (1 - own.value, 1 - constant.value)
        for client in clients
        if (own := client.estimate(model)) and (constant := client.estimate("constant"))
    ]
    against = sum(constant for _, constant in errors)
    return 1 - sum(own for own, _ in errors) / against if against > 0 else None
