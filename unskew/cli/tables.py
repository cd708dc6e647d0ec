"""Terminal tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from unskew.attacks.registry import divergence_remedy
from unskew.cli.fit_table import ReflowTable, table_of
from unskew.comparison.references import records_of_clients
from unskew.comparison.summary_statistics import interval_of
from unskew.data.readers.column_roles import describe_roles
from unskew.tasks.formatting import (
    F1,
    format_megabytes,
    format_percent,
    further_metrics,
    missing_text,
    secondary_metrics,
    value_text,
)
from unskew.tasks.metrics import METRICS
from unskew.tasks.primary_metric import metric_of, primary_metric_name
from unskew.tasks.registry import client_metric, objective_metric

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.measurements.site_differences import SiteDifferences


def clients_text(summary: dict[str, Any], whose: str) -> str:
    """Format the statistics over clients as one line.

    Args:
        summary: Summary of the run.
        whose: Prefix of the metrics, ``client`` or ``personal``.
    """
    judge = client_metric(summary)
    scored = judge.name
    mean, std, decile, worst = (
        value_text(judge, summary[f"{whose}_{scored}_{name}"]) for name in ("mean", "std", "worst_decile", "worst")
    )
    name = summary.get(f"{whose}_{scored}_worst_name")
    named = "" if name is None else f" ({name})"
    over = undefined_text(summary, whose, scored)
    return f"mean {mean}{over}, std {std}, worst decile {decile}, worst client {worst}{named}"


def interval_suffix(summary: Mapping[str, Any], key: str) -> str:
    """Return the 95 % interval of a test metric, to follow its value; empty if it is not known.

    Args:
        summary: Summary of the run.
        key: Key of the metric.
    """
    interval, judge = interval_of([summary], key), metric_of(summary, key.removeprefix("kept_"))
    if interval is None:
        return ""
    return f", 95 % interval {value_text(judge, interval[0], sign='')} to {value_text(judge, interval[1])}"


def undefined_text(summary: Mapping[str, Any], whose: str, metric: str) -> str:
    """Return over how many clients a mean is taken if the metric is undefined for some; empty otherwise.

    Args:
        summary: Summary of the run.
        whose: Prefix of the metrics, ``client`` or ``personal``.
        metric: Name of the metric.

    >>> summary = {"clients_evaluated": 24, "client_auprc_undefined": 2, "client_auprc_undefined_names": ["Chile", "Peru"]}
    >>> undefined_text(summary, "client", "auprc")
    ' over 22 of 24 clients (undefined for 2 without all classes: Chile, Peru)'
    """
    count, names = summary.get(f"{whose}_{metric}_undefined", 0), summary.get(f"{whose}_{metric}_undefined_names", [])
    if not count:
        return ""
    total = summary["unseen_evaluated" if whose.startswith("unseen") else "clients_evaluated"]
    which = ", ".join(map(str, names)) + (", ..." if len(names) < count else "")
    why = " without all classes" if metric in METRICS else ""
    return f" over {total - count} of {total} clients (undefined for {count}{why}: {which})"


def format_count(count: int, what: str) -> str:
    """Format a count with its noun.

    Args:
        count: Count.
        what: Noun in the singular.

    >>> format_count(1, "round"), format_count(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


EVALUATED = {
    "client": "per client",
    "personal": "personal models",
    "unseen": "unseen clients",
    "unseen_personal": "unseen clients, personal models",
}
"""Titles of the statistics over clients."""


def summary_table(summary: dict[str, Any]) -> Table:
    """Build the table that ``unskew run`` prints at the end; without a global model, it has metrics of clients only."""
    with_global = summary.get("global_model", True)
    summary = summary if with_global else records_of_clients((), summary, ())[1]
    table = Table(show_header=False, title=str(summary["method"]), title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    clients_per_group = (
        f", {summary['clients_per_group']} clients per group" if summary.get("clients_per_group", 1) > 1 else ""
    )
    loss = "diverged" if summary["loss"] is None else f"{summary['loss']:.4f}"
    judge, shown, scored = objective_metric(summary), client_metric(summary), primary_metric_name(summary)
    kept_score = summary.get(f"kept_{judge.name}")
    details = [f"loss {loss}"] if judge.name != "loss" or summary["loss"] is None else []
    details += [f"{one.title} {value_text(one, summary[one.name])}" for one in further_metrics(summary)]
    more = f"  ({', '.join(details)})" if details else ""
    score, best = value_text(judge, summary[judge.name]), value_text(judge, summary[f"best_{judge.name}"])
    lines = []
    if with_global:
        lines.append((f"test {judge.title}, last round", f"{score}{interval_suffix(summary, judge.name)}{more}"))
        lines.append((f"test {judge.title}, best round", f"{best}  (round {summary['best_round']})"))
    if kept_score is not None:
        text = f"{value_text(judge, kept_score)}{interval_suffix(summary, f'kept_{judge.name}')}"
        lines.append((f"test {judge.title}, kept model", f"{text}  (round {summary['kept_round']})"))
    for whose, label in EVALUATED.items():
        if f"{whose}_{scored}_mean" in summary:
            evaluated_on = summary["unseen_evaluated_on" if whose.startswith("unseen") else "clients_evaluated_on"]
            if summary[f"{whose}_{scored}_mean"] is not None:
                lines.append((f"{label}, on {evaluated_on}", f"{shown.title}: {clients_text(summary, whose)}"))
            elif with_global:
                lines.append((label, f"evaluated on {evaluated_on}"))
    if "backdoor_success" in summary:
        lines.append(("attack success", f"{format_percent(summary['backdoor_success'])}%"))
    lines.append(("data", f"{summary['data']}, {summary['clients']} clients, {summary['partition']}"))
    if summary["partition_hash"]:
        lines.append(("partition hash", str(summary["partition_hash"])))
    sent, received = (format_megabytes(summary[f"bytes_{way}"]) for way in ("up", "down"))
    seconds, rounds = f"{summary['seconds']:.1f} s", format_count(summary["rounds"], "round")
    sizes = " / ".join(f"{size:,}" for size in summary.get("model_parameters", [summary["parameters"]]))
    lines += [
        ("model", f"{summary['model']}, {sizes} parameters, buffers: {summary['buffers']}"),
        ("traffic", f"{sent} MB up, {received} MB down"),
        ("time", f"{seconds} for {rounds}, engine {summary['engine']}{clients_per_group}"),
    ]
    if "seconds_simulated" in summary:
        lines.append(("simulated time", f"{summary['seconds_simulated']:.1f} s"))
    if summary.get("micro_f1") is not None:
        lines[2:2] = [
            (when, ", ".join(f"{title} {format_percent(summary[best + name])}%" for title, name in F1.items()))
            for when, best in (("test F1, last round", ""), ("test F1, best of each", "best_"))
        ]
    if with_global and (metrics := secondary_metrics(summary)):
        values = ", ".join(f"{metric.title} {value_text(metric, summary[metric.name])}" for metric in metrics)
        lines.insert(2, ("test set, last round", values))
    if summary.get("target") is not None:
        reached = summary["rounds_to_target"]
        title = f"rounds to {value_text(judge, summary['target'])}"
        lines.insert(2, (title, "not reached" if reached is None else str(reached)))
    if "synthetic_images" in summary:
        images = f"{summary['synthetic_images']:,} images, generated in {summary['synthetic_seconds']:.1f} s"
        epochs = f"; local epochs {summary['local_epochs']}" if "local_epochs" in summary else ""
        lines.append(("synthetic data", images + epochs))
    if "attackers" in summary:
        lines.append(("attack", f"{summary['attack']} by {len(summary['attackers'])} of {summary['clients']} clients"))
    if "privacy" in summary:
        lines.append(("privacy", summary["privacy"]))
    if summary["updates_skipped"]:
        lines.append(("skipped", f"{summary['updates_skipped']} updates that were not finite"))
    if "retries" in summary:
        lines.append(("trained again", f"{summary['retries']:,} clients whose worker or node died"))
    if summary.get("diverged"):
        lines.insert(0, ("diverged", f"yes: the model is not usable. {divergence_remedy(summary.get('attack'))}"))
    for name, value in lines:
        table.add_row(name, value)
    return table


CLASSES_SHOWN = 20
SHIFTS_SHOWN = 3


def sites_table(sites: SiteDifferences, most: int) -> Table:
    """Build the table of the clients' rows, outcomes, missing values and largest shifts.

    Args:
        sites: Differences between the clients.
        most: Maximum number of clients in the table; the others are summarized in a row.
    """
    rows, pooled = sites.rows, sites.pooled
    same = len({row.get("outcome") for row in (*rows, pooled)}) == 1
    table = ReflowTable(title="Clients next to all of them together", title_justify="left")
    outcome = pooled.get("outcome", "")
    outcome += ", mean ± std" if "mean" in pooled else ""
    times = list(dict.fromkeys(time for row in (*rows, pooled) for time in row.get("survival") or ()))
    further = ["events", *(f"S({time})" for time in times)] if times else []
    for name in ("client", "rows", outcome if same else "most frequent", *further, "missing", "largest shifts"):
        table.add_column(name, justify="left" if name in ("client", "largest shifts") else "right", overflow="fold")

    def outcome_cell(row: dict[str, Any]) -> str:
        if "mean" in row:
            return f"{row['mean']:.4g} ± {row['std']:.3g}"
        named = "" if same else f"{row['outcome'].partition(' = ')[2]}: "
        return f"{named}{row['share']:.1%}" if "share" in row else ""

    def add(name: str, row: dict[str, Any], last: str) -> None:
        missing = "" if row["missing"] is None else f"{row['missing']:.1%}"
        table.add_row(name, f"{row['rows']:,}", outcome_cell(row), *time_cells(row), missing, last)

    def time_cells(row: dict[str, Any]) -> list[str]:
        known = row.get("survival") or {}
        events = row.get("events")
        cells = ["" if known.get(time) is None else f"{known[time]:.1%}" for time in times]
        return ["" if events is None else f"{events:,}", *cells] if times else []

    for row in rows[:most]:
        add(row["client"], row, ", ".join(f"{name} {value:+.2f}" for name, value in row["shifts"][:SHIFTS_SHOWN]))
    if rest := rows[most:]:
        ends = {}
        for key in (name for name in ("share", "mean", "missing") if pooled.get(name) is not None):
            values = [row[key] for row in rest]
            ends[key] = " to ".join(f"{v:.4g}" if key == "mean" else f"{v:.1%}" for v in (min(values), max(values)))
        outcomes = ends.get("mean", ends.get("share", "") if same else "")
        table.add_row(
            f"{len(rest)} others",
            f"{sum(row['rows'] for row in rest):,}",
            outcomes,
            *[""] * len(further),
            ends.get("missing", ""),
            "",
        )
    add("all", pooled, "")
    table.caption = (
        "Shift: standardized mean difference of a number, total variation distance of categories and classes."
    )
    if times:
        table.caption += f" S: Kaplan-Meier survival. {log_rank_text(sites.test)}"
    return table


def log_rank_text(test: Mapping[str, Any] | None) -> str:
    """Return a log-rank test as a sentence; empty without one.

    Args:
        test: Test as plain values.
    """
    if test is None:
        return ""
    kind = "Log-rank test between all, conservative" if test["conservative"] else "Log-rank test between all"
    return f"{kind}: chi-square {test['statistic']:.2f}, {test['df']} df, p {test['p']:.2g}."


def partition_table(
    counts: np.ndarray,
    class_names: Sequence[str],
    most: int = 20,
    sizes: np.ndarray | None = None,
    client_names: Sequence[str] = (),
) -> Table:
    """Build the table of the label distribution across clients.

    Args:
        counts: Samples per client and class, ``[K, C]``.
        class_names: Names of the classes.
        most: Maximum number of clients in the table.
        sizes: Samples per client, ``[K]``, for multi-label data; None means the sums of ``counts``.
        client_names: Names of the clients.
    """
    sizes = counts.sum(1) if sizes is None else sizes
    classes = [str(n) for n in class_names]
    table = ReflowTable(title="Training samples per client and class", title_justify="left")
    table.add_column("client", justify="right")
    if client_names:
        table.add_column("name")
    for name in ("total", *(classes[:CLASSES_SHOWN] if classes != ["samples"] else ())):
        table.add_column(name, justify="right")
    shortened = [f"{CLASSES_SHOWN} of {len(classes)} classes are shown"] if len(classes) > CLASSES_SHOWN else []
    for client, row in enumerate(counts[:most]):
        cells = [str(int(n)) if n else "·" for n in (row[:CLASSES_SHOWN] if classes != ["samples"] else ())]
        named = [client_names[client]] if client_names else []
        table.add_row(str(client), *named, str(int(sizes[client])), *cells)
    if len(counts) > most:
        shortened.append(f"{most} of {len(counts)} clients are shown, --clients-shown {len(counts)} shows all")
    if shortened:
        table.caption = "; ".join(shortened) + "; --json has all numbers"
    return table


def columns_table(columns: Mapping[str, str]) -> Table:
    """Build the table of the roles of a table's columns."""
    return table_of(("column", "role"), describe_roles(columns), "Columns of the table")


def methods_table(methods: Sequence[dict[str, Any]]) -> Table:
    """Build the table of ``unskew methods``."""
    rows = []
    for row in methods:
        options = ", ".join(f"{k}={v}" for k, v in row["options"].items())
        paper = f"{row['paper']} [{row['package']}]" if "package" in row else row["paper"]
        rows.append((row["name"], ", ".join(row["slots"]), row["needs"], row["summary"], options, paper))
    return table_of(("method", "slot", "server needs", "what it does", "options", "paper"), rows)


def print_method(console: Console, row: Mapping[str, Any], conflicts: Mapping[str, Sequence[str]]) -> None:
    """Print the description of one method: what it is, its options, and the methods that it conflicts with.

    Args:
        console: Console to print to.
        row: Description of the method, see ``unskew.methods.descriptions.describe_method``.
        conflicts: Names of the methods that it conflicts with, by reason.
    """
    reads = {"sum": "sums of updates", "individual": "single updates"}[row["needs"]]
    details = f"slots: {', '.join(row['slots'])}; the server reads {reads}; tasks: {', '.join(row['tasks'])}"
    delays = "supported" if row["delays"] else "not supported"
    console.print(f"{row['name']}: {row['summary']} ({row['paper']})\n{details}; delays: {delays}", highlight=False)
    options = [(name, str(value), row["meanings"][name].replace("``", "")) for name, value in row["options"].items()]
    console.print(table_of(("option", "default", "meaning"), options) if options else "It has no options.")
    for reason, names in conflicts.items():
        console.print(f"Not with {', '.join(names)}: {reason}", highlight=False)
    if not conflicts:
        console.print("It can be combined with all other methods.")


def models_table(models: Sequence[dict[str, Any]]) -> Table:
    """Build the table of ``unskew models``."""
    words = {True: "yes", False: "no", None: "-"}
    rows = [(row["name"], row["description"], words[row["groupable"]], row["reference"]) for row in models]
    return table_of(("model", "what it is", "groupable", "reference"), rows)


def layers_table(model: str, layers: Sequence[dict[str, Any]]) -> Table:
    """Build the table of ``unskew models MODEL``.

    Args:
        model: Name of the model.
        layers: Rows of the table.
    """
    table = Table(title=f"{model}: layers in order of depth", title_justify="left", show_footer=True)
    total = sum(row["parameters"] for row in layers)
    body = sum(row["parameters"] for row in layers if row["part"] == "body")
    buffers = f"{sum(row['buffers'] for row in layers):,}"
    sizes = {"parameters": f"{total:,}", "buffers": buffers, "part": f"body {body:,}, head {total - body:,}"}
    for name in ("", "layer", "with", "parameters", "buffers", "part"):
        right = name in ("", "parameters", "buffers")
        # Users write patterns for layer names, so names are wrapped and never truncated.
        table.add_column(name, footer=sizes.get(name, ""), justify="right" if right else "left", overflow="fold")
    for row in layers:
        values = (f"{row['parameters']:,}", f"{row['buffers']:,}")
        table.add_row(str(row["layer"]), row["name"], ", ".join(row["with"]), *values, row["part"])
    return table


QUANTITIES = {
    "zeta2": "dissimilarity of the clients' gradients, ζ²",
    "gradient2": "squared norm of the mean gradient",
    "sigma2_mean": "noise of a client's gradient, σ², mean",
    "sigma2_max": "noise of a client's gradient, σ², largest",
    "sigma2_avg": "noise on the pooled data of all clients, σ²_avg",
    "L_max": "smoothness of a client's loss, L_max",
    "L_avg": "smoothness of the mean loss, L_avg",
    "delta2": "distance of real and synthetic mean gradients, δ²",
    "sigma2_synthetic": "noise on the pooled synthetic data, σ̃²_avg",
    "L_synthetic": "smoothness on the synthetic data, L̃_avg",
    "epsilon": "accuracy ε of the prediction",
}
LABELS = {
    "label_distance_mean": "distance of client label distributions from the global one (total variation), mean",
    "label_distance_max": "distance of client label distributions from the global one, largest",
    "label_distance_chance": "distance expected by chance, mean",
    "feature_skew": "share of the input variance within a class that is between clients",
    "label_entropy_gap": "divergence of client label distributions from the global one, nats, mean",
    "label_between": "share of the label's variance that is between clients, without chance",
    "label_unexplained": "the same after a linear model of the inputs",
    "effective_classes": "effective number of classes of a client, mean",
    "effective_clients": "effective number of clients",
}


def shorten(value: float | None) -> str:
    """Format a number with four significant digits.

    >>> shorten(12345.678), shorten(0.00012345), shorten(None), shorten(float("nan")), shorten(float("inf"))
    ('1.235e+04', '0.0001234', '-', '-', 'diverged')
    """
    return missing_text(value) if value is None or not math.isfinite(value) else f"{value:.4g}"


def heterogeneity_tables(report: dict[str, Any]) -> list[Table]:
    """Build the tables of ``unskew diagnose``: label skew, quantities of each model, and shares of synthetic data.

    Args:
        report: Result of ``Report.as_json``.
    """
    style: dict[str, Any] = {"title_justify": "left", "box": SIMPLE_HEAD, "pad_edge": False}
    labels = Table("", "", title="Labels and sizes", show_header=False, **style)
    for name, label in LABELS.items():
        labels.add_row(label, shorten(report[name]))
    quantities = Table("", *(m["model"] for m in report["models"]), title="At the model", **style)
    for name, label in QUANTITIES.items():
        values = [m.get(name) for m in report["models"]]
        if any(value is not None for value in values):
            quantities.add_row(label, *map(shorten, values))
    tables = [labels, quantities]
    for m in report["models"]:
        title = (
            f"With a share p of synthetic data, {m['model']}: measured, and the bound of Lemma 1; "
            f"synthetic: {report['synthetic']}"
        )
        table = Table("p", "ζ̂²", "≤", "σ̂²", "≤", "L", "≤", "rounds", "rounds by bounds", title=title, **style)
        for row in m["shares"]:
            pairs = [shorten(row[name + end]) for name in ("zeta2", "sigma2", "L", "rounds") for end in ("", "_bound")]
            table.add_row(f"{row['p']:g}", *pairs)
        if m["shares"]:
            tables.append(table)
    return tables
