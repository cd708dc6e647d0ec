"""Terminal tables that compare methods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from unskew.cli.fit_table import ReflowTable, as_text, omit_empty_columns, stacked_below
from unskew.comparison.benefit_text import benefit_title, displayed
from unskew.comparison.cost_to_target import TargetCost
from unskew.comparison.leave_one_out import LeaveOneOut
from unskew.comparison.references import OF_CLIENTS, UNTUNED
from unskew.comparison.references import TITLE as REFERENCES
from unskew.comparison.summary_statistics import CLIENT_MODELS, OVER_CLIENTS, UNSEEN, std_key
from unskew.tasks.formatting import (
    COST,
    F1,
    format_megabytes,
    format_number,
    further_metrics,
    interval_text,
    method_title,
    secondary_metrics,
    target_note,
    unit_text,
    value_text,
)
from unskew.tasks.primary_metric import MetricInfo, metric_info
from unskew.tasks.registry import client_metric, objective_metric

if TYPE_CHECKING:
    from unskew.comparison.comparison_result import Comparison

WORDS = ("model", "over")
"""Columns of words, which are left-aligned."""
NO_GUARANTEE = "epsilon if secret"
"""Title of the column of runs with ``reproducible=true``."""
MOST_CLIENTS = 10
"""Number of clients that the terminal lists."""


def split_expression(spelling: str) -> list[str]:
    """Split a method expression at the positions where lines may break: after ``+``, ``,`` and ``:``.

    >>> split_expression("fedprox:mu=0.1+scaffold")
    ['fedprox:', 'mu=0.1+', 'scaffold']
    """
    return re.findall(r"[^+,:]*[+,:]|[^+,:]+", spelling)


class MethodExpressionCell:
    """Table cell with a method expression, wrapped without breaking names or options."""

    def __init__(self, text: str):
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for part in split_expression(self.text):
            if lines[-1] and len(lines[-1] + part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(lines), no_wrap=True)


class MethodRows(Table):
    """Table with one row per method; metric columns get their full width, and method expressions wrap in the rest."""

    def __init__(self, title: str, methods: Iterable[str], *columns: str, first: str = "method"):
        super().__init__(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        names = [first, *methods]
        self.most = max(map(len, names))
        self.least = max(len(part) for name in names for part in split_expression(name))
        self.add_column(first)
        for name in columns:
            self.add_column(name, justify="left" if name in WORDS else "right")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        omit_empty_columns(self, console)
        self.columns[0].width, self.padding = 0, (0, 1)
        width = super().__rich_measure__(console, options.update(max_width=10_000)).maximum
        for spread in (" ± ", "\n± "):  # headers may break between words, then values before their spread
            if width + self.least <= options.max_width:
                break
            for column in self.columns[1:]:
                column._cells = [
                    cell.replace(" ± ", spread) if isinstance(cell, str) else cell for cell in column.cells
                ]
                lines = [line for cell in column.cells for line in as_text(cell, console).plain.split("\n")]
                column.width = max(map(len, [*lines, *str(column.header).split()]))
            self.padding = (0, 1, 0, 0)
            width = super().__rich_measure__(console, options.update(max_width=10_000)).maximum
        self.columns[0].width = min(self.most, max(self.least, options.max_width - width))
        if width + self.least > options.max_width:
            yield from stacked_below(self, console)
        else:
            yield from super().__rich_console__(console, options)


def cost_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the titles of the columns of costs; simulated seconds are shown if the runs have a virtual clock."""
    return (*COST, "simulated s") if "seconds_simulated" in row else COST


def cost_cells(row: dict[str, Any]) -> list[str]:
    """Format the costs of a method for the columns of ``cost_columns``."""
    cells = [format_megabytes(row["bytes_up"]), format_megabytes(row["bytes_down"]), f"{row['seconds']:.1f}"]
    return [*cells, f"{row['seconds_simulated']:.1f}"] if "seconds_simulated" in row else cells


def mean_std_text(row: dict[str, Any]) -> str:
    """Describe the values in a comparison table, such as ``mean ± std over 3 seeds``."""
    return f"mean ± std over {row['seeds']} seeds" if row["seeds"] > 1 else "1 seed"


def std_text(row: dict[str, Any], name: str) -> float | None:
    """Return the standard deviation of a metric over seeds; None for a single seed.

    Args:
        row: Row of the comparison.
        name: Name of the metric.
    """
    return row.get(std_key(name)) if row["seeds"] > 1 else None


def rounds_title(row: dict[str, Any]) -> str:
    """Return the column title for rounds to the target."""
    return f"rounds to {value_text(objective_metric(row), row['target'])}"


def value_cell(row: dict[str, Any], one: MetricInfo, name: str) -> str:
    """Format a value of a metric with its standard deviation over seeds.

    Args:
        row: Row of the comparison.
        one: Metric.
        name: Key of the metric in the row.
    """
    if not row.get("global_model", True) and row.get(name) is None:
        name = name.replace("client_", OF_CLIENTS, 1)
    return value_text(one, row.get(name), std_text(row, name), sign="")


def rounds_cell(row: dict[str, Any]) -> str:
    """Format rounds to the target, or the number of seeds that reached it; ``-`` without a global model."""
    if row.get(objective_metric(row).name) is None:
        return "-"
    reached = row["rounds_to_target"]
    return f"{reached:.1f}" if reached is not None else f"{row['seeds_reaching_target']} of {row['seeds']} seeds"


def comparison_tables(rows: Sequence[dict[str, Any]], tuned: bool = False) -> list[Table]:
    """Build the table of the methods, and the table of the references if there are any.

    Args:
        rows: Results of each method and reference.
        tuned: Whether all of them were tuned.
    """
    parts = ([row for row in rows if row["reference"] is reference] for reference in (False, True))
    return [comparison_table(part, tuned) for part in parts if part]


def comparison_table(rows: Sequence[dict[str, Any]], tuned: bool = False) -> Table:
    """Build the table that ``unskew compare`` prints: one row per method, means over seeds.

    Args:
        rows: Results of each method.
        tuned: Whether the methods were tuned.
    """
    first, judge = rows[0], objective_metric(rows[0])
    accuracy, own = metric_info("accuracy"), client_metric(first)
    title = f"Test {judge.title}{unit_text(judge)}{' (lower is better)' if judge.lower_is_better else ''}"
    columns = {"last round": (judge, judge.name), "best round": (judge, f"best_{judge.name}")}
    columns |= {"kept model": (judge, f"kept_{judge.name}")} if f"kept_{judge.name}" in first else {}
    unit = " %" if own.percent and not judge.percent else ""
    whose = {f"clients, mean{unit}": "mean", f"worst client{unit}": "worst"}
    columns |= {title: (own, f"client_{own.name}_{what}") for title, what in whose.items()}
    further = {f"{one.title}{' %' if one.percent else ''}": (one, one.name) for one in further_metrics(first)}
    shares = (F1 if first.get("micro_f1") is not None else {}) | {"attack success": "backdoor_success"}
    further |= {title: (accuracy, name) for title, name in shares.items() if name in first}
    private = {"epsilon": "epsilon", NO_GUARANTEE: "epsilon_if_secret"}
    private = {title: name for title, name in private.items() if any(row.get(name) is not None for row in rows)}
    references = REFERENCES if tuned else f"{REFERENCES}\n{UNTUNED}"
    title = references if first.get("reference") else f"{title}, {mean_std_text(first)}"
    if not first.get("reference") and (note := target_note(rows)):
        title = f"{title}\n{note}"
    names = (*columns, rounds_title(first), *further, *private, *cost_columns(first))
    table = MethodRows(title, map(method_title, rows), *names)
    for row in rows:
        table.add_row(
            MethodExpressionCell(method_title(row)),
            *(value_cell(row, *column) for column in columns.values()),
            rounds_cell(row),
            *(value_cell(row, *column) for column in further.values()),
            *("-" if row.get(name) is None else f"{row[name]:.3g}" for name in private.values()),
            *cost_cells(row),
        )
    return table


def reaching_table(rows: Sequence[TargetCost], target: float, objective: MetricInfo | None = None) -> Table:
    """Build the table of costs to reach the target, one row per method.

    ``≥`` marks lower bounds of comparisons with a method that misses the target in a seed.

    Args:
        rows: Costs of each method.
        target: Value to reach.
        objective: Metric of the target; None means accuracy.
    """
    judge = objective or metric_info("accuracy")
    title = f"Rounds and traffic to {value_text(judge, target)} test {judge.title}"
    columns = ["rounds", "speed-up", "over", "MB, all clients", "saving over fedavg, %"]
    timed = any(row.seconds is not None for row in rows)
    columns += ["seconds to target"] if timed else []
    table = MethodRows(title, (row.method for row in rows), *columns)
    for row in rows:
        faster = "-" if row.speed_up is None else f"{'≥' if row.speed_up_at_least else ''}{row.speed_up:.1f}"
        saving = "-" if row.saving is None else f"{'≥' if row.saving_at_least else ''}{100 * row.saving:.1f}"
        rounds = f">{row.limit}" if row.rounds is None else f"{row.rounds:.1f}"
        cells = [rounds, faster, row.against or "", format_megabytes(row.bytes), saving, format_number(row.seconds)]
        table.add_row(MethodExpressionCell(row.method), *cells[: len(columns)])
    return table


def metrics_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """Build the table of ``unskew compare`` for the requested ``metrics``; None without any."""
    metrics = secondary_metrics(rows[0])
    if not metrics:
        return None
    unit = " in %" if all(metric.percent for metric in metrics) else ""
    title = f"Test set{unit}, last round, {mean_std_text(rows[0])}"
    table = MethodRows(title, map(method_title, rows), *(metric.title for metric in metrics))
    for row in rows:
        values = (value_cell(row, metric, metric.name) for metric in metrics)
        table.add_row(MethodExpressionCell(method_title(row)), *values)
    return table


def print_benefit(console: Console, comparison: Comparison) -> None:
    """Print whether it helps, in sentences and tables: the compared models, and the clients that gain least.

    If the seeds have different clients, single clients have no meaning and are listed only in the report.

    Args:
        console: Console to print to.
        comparison: Comparison of methods.
    """
    benefit = comparison.benefit
    if benefit is None:
        return
    for line in comparison.answers():
        console.print(f"{line}\n", markup=False, highlight=False)
    overview, rows = benefit.overview(), benefit.rows() if benefit.same_clients else []
    improved = {row["model"]: benefit.metric.rank(row.get("minus_local") or 0.0) for row in overview}
    without = ["pooled", "interval"]
    if {"personal", "federated"} <= {*improved}:
        without.append(f"{min(('federated', 'personal'), key=improved.__getitem__)}_minus_local")
    few = "Client by client" + (f": the {MOST_CLIENTS} that gain least" if len(rows) > MOST_CLIENTS else "")
    tables = {
        benefit_title(benefit): displayed(benefit, overview),
        few: displayed(benefit, rows[:MOST_CLIENTS], without),
    }
    for heading, entries in tables.items():
        if entries:
            first, *columns = entries[0]
            table = MethodRows(heading, (row[first][0] for row in entries), *columns, first=first)
            for name, *cells in (row.values() for row in entries):
                table.add_row(MethodExpressionCell(name[0]), *(text for text, _ in cells))
            console.print(table)


def leave_one_out_table(result: LeaveOneOut) -> Table:
    """Build the table of models on clients that took no part in their training, next to those with them in training."""
    metric, means = result.metric, result.means()
    title = (
        f"Without and with each client in training: {metric.title} on all, and on the held-out, samples of this client"
    )
    table = ReflowTable(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    columns = ("samples", "without", "95 % interval", "held out", "without", "with", "difference")
    for column in (*(["method"] if len(means) > 1 else []), "client", *columns):
        table.add_column(column, justify="left" if column in ("method", "client") else "right")
    for mean in means:
        own = [row for row in result.rows if row["method"] == mean["method"]]
        for row in (*own, {**mean, "client": "mean"}):
            last = "all_clients" in row
            if last:
                numbers = (row["all_clients"], row["difference_clients"])
                counts = [f"{number} client{'s' if number != 1 else ''}" for number in numbers]
            else:
                counts = [f"{row[key]:,}" for key in ("samples", "num_held_out")]
            all_samples = [value_text(metric, row["all"]), interval_text(metric, row["all_interval"]) or "-"]
            held_out = [value_text(metric, row[key]) for key in ("without", "with", "difference")]
            if ends := interval_text(metric, row.get("difference_interval"), "+"):
                held_out[-1] += f" ({ends})"
            first = [row["method"]] if len(means) > 1 else []
            table.add_row(*first, row["client"], counts[0], *all_samples, counts[1], *held_out, end_section=last)
    return table


def clients_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """Build the table of per-client metrics of ``unskew compare``; None if no method has personal models."""
    judge = client_metric(rows[0])
    scored = judge.name
    if all(row.get(f"{whose}_{scored}_mean") is None for row in rows for whose in ("personal", *UNSEEN)):
        return None
    which = "kept model" if any(f"kept_{objective_metric(row).name}" in row for row in rows) else "last round"
    title = f"{judge.heading}{unit_text(judge)} on the clients' own data, {which}"
    columns = ("model", "mean", "std over clients", "worst decile", "worst client")
    table = MethodRows(title, map(method_title, rows), *columns)
    for row in rows:
        for whose, label in CLIENT_MODELS.items():
            keys = [f"{whose}_{scored}_{name}" for name in OVER_CLIENTS]
            if row.get(keys[0]) is not None:
                values = (value_cell(row, judge, key) for key in keys)
                table.add_row(MethodExpressionCell(method_title(row)), label, *values)
    return table
