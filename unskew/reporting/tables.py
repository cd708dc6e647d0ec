"""Tables of the report: displayed text of each cell, and the number that it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from unskew.comparison.benefit import Benefit
from unskew.comparison.benefit_text import benefit_title, displayed
from unskew.comparison.references import TITLE as REFERENCES_TITLE
from unskew.comparison.references import is_local, is_reference
from unskew.comparison.significance import LEVEL, are_equal, holm, paired_p
from unskew.comparison.summary_statistics import (
    CLIENT_MODELS,
    OVER_CLIENTS,
    UNSEEN,
    is_usable_number,
    keeps_best,
    mean_or_none,
    mean_std,
    paired_differences,
    pairs_by_seed,
    std_key,
    usable_values,
)
from unskew.records.recorder import first_reaching
from unskew.reporting.chart_data import gini, honest_clients
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import RunFiles
from unskew.tasks.formatting import (
    COST,
    F1,
    format_megabytes,
    format_percent,
    further_metrics,
    interval_text,
    method_title,
    secondary_metrics,
    target_note,
    value_text,
)
from unskew.tasks.formatting import format_number as loss_text
from unskew.tasks.intervals import interval95
from unskew.tasks.primary_metric import MetricInfo, metric_info


@dataclass(frozen=True)
class Cell:
    """Displayed text, sort key and standard deviation of a cell; None if missing."""

    text: str
    value: float | None = None
    std: float | None = None


@dataclass
class Table:
    """A table of the page.

    Attributes:
        name: File name of exported copies.
        caption: Description of the content.
        columns: Column titles.
        rows: Cells of each row.
        words: Number of leading columns that contain text.
        groups: Group of each row, for tables that show one group at a time.
        choice: Label of the menu of groups.
    """

    name: str
    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    words: int = 1
    groups: list[str] = field(default_factory=list)
    choice: str = "against"

    def __post_init__(self) -> None:
        """Omit columns without any value."""
        keep = [k for k, _ in enumerate(self.columns) if not all(row[k].text in ("", "-") for row in self.rows)]
        self.columns = [self.columns[k] for k in keep]
        self.rows = [[row[k] for k in keep] for row in self.rows]


def percent_cell(value: float | None, spread: float | None = None) -> Cell:
    """Format a share in percent.

    Args:
        value: Share from 0 to 1, or None.
        spread: Standard deviation, or None.
    """
    if value is None:
        return Cell("-")
    return Cell(format_percent(value, spread), 100 * value, None if spread is None else 100 * spread)


def metric_cell(one: MetricInfo) -> Callable[..., Cell]:
    """Return a function that formats a metric as a cell."""
    return percent_cell if one.percent else loss_cell


def metric_title(title: str, one: MetricInfo) -> str:
    """Return the title of a column with a metric.

    Args:
        title: Title without unit.
        one: The metric.
    """
    return f"{title}, %" if one.percent else title


def megabytes_cell(value: float | None) -> Cell:
    """Format bytes in MB."""
    return Cell("-") if value is None else Cell(format_megabytes(value), value / 1e6)


def number_cell(value: float | None, digits: int = 1) -> Cell:
    """Format a plain number.

    Args:
        value: Number, or None.
        digits: Digits after the decimal point.
    """
    return Cell("-") if value is None else Cell(f"{value:,.{digits}f}", float(value))


def loss_cell(value: float | None, spread: float | None = None) -> Cell:
    """Format a loss or a perplexity.

    Args:
        value: Loss, or None.
        spread: Standard deviation, or None.
    """
    return Cell(loss_text(value, spread), value, spread)


def cost_cells(row: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of the columns ``COST``, given a summary or a row of a comparison."""
    return [megabytes_cell(row["bytes_up"]), megabytes_cell(row["bytes_down"]), number_cell(row["seconds"])]


def std_note(part: RunGroup) -> str:
    """Return a note on the number of seeds and on standard deviations."""
    most = max(len(method_runs.runs) for method_runs in part.series)
    return f"mean ± standard deviation over {most} seeds" if most > 1 else "1 seed"


def comparison_table(part: RunGroup, references: bool = False) -> Table | None:
    """Build a table with a row per method, or per reference, and the metrics of ``comparison.json``; None without rows.

    Args:
        part: Runs of the group.
        references: Whether to list references instead of methods.
    """
    judge, own = part.objective, part.at_clients
    rows = [row for row in part.comparison.rows() if row["reference"] == references]
    if not rows:
        return None
    several = {title: name for title, name in F1.items() if any(row.get(name) is not None for row in rows)}
    personal = any(row[f"personal_{own.name}_mean"] is not None for row in rows)
    columns: dict[str, Any] = {}
    shown_columns = {"last round": judge.name, "best round": f"best_{judge.name}"}
    shown_columns |= {"kept model": f"kept_{judge.name}"} if f"kept_{judge.name}" in rows[0] else {}
    columns |= {metric_title(title, judge): (metric_cell(judge), name) for title, name in shown_columns.items()}
    columns |= {f"{title}, %": (percent_cell, name) for title, name in several.items()}
    more = secondary_metrics(rows[0])
    columns |= {metric_title(metric.title, metric): (metric_cell(metric), metric.name) for metric in more}
    for name in ("epsilon", "epsilon_if_secret"):
        if any(row.get(name) is not None for row in rows):
            columns[name.replace("_", " ")] = (loss_cell, name)
    if "backdoor_success" in rows[0]:
        columns["attack success, %"] = (percent_cell, "backdoor_success")
    further = [*([metric_info("loss")] if judge.name != "loss" else []), *further_metrics(rows[0])]
    columns |= {metric_title(one.title, one): (metric_cell(one), one.name) for one in further}
    per, write = " %" if own.percent else "", metric_cell(own)
    columns[f"clients, mean{per}"] = (write, f"client_{own.name}_mean")
    columns[metric_title("worst decile", own)] = (write, f"client_{own.name}_worst_decile")
    if personal:
        columns[f"personal, mean{per}"] = (write, f"personal_{own.name}_mean")
        columns[f"personal, worst decile{per}"] = (write, f"personal_{own.name}_worst_decile")
    lines = []
    for row in rows:
        spread = row["seeds"] > 1
        cells = [write(row.get(name), row.get(std_key(name)) if spread else None) for write, name in columns.values()]
        missed = Cell("-" if row[judge.name] is None else f"{row['seeds_reaching_target']} of {row['seeds']} seeds")
        rounds = number_cell(row["rounds_to_target"]) if row["rounds_to_target"] else missed
        lines.append([Cell(method_title(row)), number_cell(row["seeds"], 0), *cells, rounds, *cost_cells(row)])
    titles = ["method", "seeds", *columns, f"rounds to {value_text(judge, part.target, sign=' %')}", *COST]
    if references:
        return Table("references", REFERENCES_TITLE, titles, lines)
    note = target_note(rows)
    return Table("comparison", f"Test {judge.title}, {std_note(part)}{f'. {note}' if note else ''}", titles, lines)


def difference_table(part: RunGroup) -> Table | None:
    """Build a table of differences between methods, paired by seed on the same partition; None for a single method."""
    judge = part.objective
    names = (judge.name, f"best_{judge.name}")
    summaries = part.comparison.ranked_final
    last = "kept model" if keeps_best(chain.from_iterable(summaries.values())) else "last"
    rows, groups = [], []
    for base, others in summaries.items():
        own_rows, tests = [], []
        for label, own in summaries.items():
            if label == base or not pairs_by_seed(own, others):
                continue
            differences = [paired_differences(own, others, name) for name in names]
            own_rows.append([Cell(label), Cell(base), _seeds_cell(*map(len, differences))])
            for values in differences:
                own_rows[-1] += _difference(judge, values)
            tests += differences
        for offset, at in enumerate((5, 8)):  # each column is a family of tests
            p_values = [paired_p(values) for values in tests[offset :: len(names)]]
            corrected = iter(holm([p for p in p_values if p is not None]))
            for row, untested in zip(own_rows, (p is None for p in p_values), strict=True):
                if not untested:
                    p = next(corrected)
                    row[at] = Cell(f"{'yes' if p <= LEVEL else 'no'} (p {p:.3f})", p)
        rows += own_rows
        groups += [base] * len(own_rows)
    if not rows:
        return None
    unit = f"{judge.title}, points" if judge.percent else judge.title
    columns = [f"{when}: {title}" for when in (last, "best") for title in (unit, "95 % interval", "significant?")]
    caption = (
        "Differences to another method, paired by seed, with 95 % intervals of Student's t. Significance is at the 5 % "
        "level, with p-values corrected by Holm's method for the number of methods; differences that are equal in all seeds "
        "cannot be tested"
    )
    return Table("differences", caption, ["method", "minus", "seeds", *columns], rows, 2, groups)


MOST_ROWS = 30
"""Number of clients that a table shows first."""


def benefit_tables(benefit: Benefit) -> tuple[Table, Table]:
    """Build the tables of the compared models and of the clients; the clients with the largest losses are shown first."""
    title = benefit_title(benefit)
    overview, clients = (displayed(benefit, rows) for rows in (benefit.overview(), benefit.rows()))
    rest = len(clients) - MOST_ROWS
    groups = [f"the {MOST_ROWS} that gain least"] * MOST_ROWS + [f"{rest} others"] * rest if rest > 0 else []
    cells = [[[Cell(*entry) for entry in row.values()] for row in rows] for rows in (overview, clients)]
    caption = f"{title}, client by client"
    one_by_one = Table("benefit of clients", caption, [*clients[0]], cells[1], 1, groups, "clients")
    return Table("benefit", title, [*overview[0]], cells[0]), one_by_one


def _seeds_cell(last: int, best: int) -> Cell:
    """Return the number of seeds with a difference of the last round, and that of the best round if it differs."""
    return number_cell(last, 0) if last == best else Cell(f"{last}, best {best}", last)


def _difference(judge: MetricInfo, values: Sequence[float]) -> list[Cell]:
    if not values:
        return [Cell("-")] * 3
    mean, interval, factor = mean_std(values)[0], interval95(values), 100 if judge.percent else 1
    cell = Cell(f"{factor * mean:+.{1 if judge.percent else 4}f}", factor * mean)
    if interval is None:
        return [cell, Cell("needs 2 seeds"), Cell("-")]
    if are_equal(values):
        return [cell, Cell("-"), Cell("equal in all seeds")]
    return [cell, Cell(interval_text(judge, interval, "+")), Cell("-")]


def target_table(part: RunGroup) -> Table | None:
    """Build the table of costs to reach the target; None if no method trains a global model."""
    rows, judge = [], part.objective
    timed = ["simulated seconds" for first in part.ranked[:1] if "seconds_simulated" in first.runs[0].summary]
    for method_runs in part.ranked:
        if not part.comparison.has_global_model(method_runs.label):
            continue
        histories = part.comparison.closed_histories[method_runs.label]
        firsts = (first_reaching(history, part.target, judge) for history in histories)
        reached = [row for row in firsts if row is not None]
        cells = [Cell("")] * (3 + len(timed))
        if len(reached) == len(method_runs.runs):
            rounds, seconds = (mean_std([row[name] for row in reached])[0] for name in ("round", "seconds"))
            sent = mean_std([row["bytes_up"] + row["bytes_down"] for row in reached])[0]
            cells = [number_cell(rounds), megabytes_cell(sent), number_cell(seconds)]
            cells += [number_cell(mean_or_none([row.get("seconds_simulated") for row in reached]))] * len(timed)
        rows.append([Cell(method_runs.label), Cell(f"{len(reached)} of {len(method_runs.runs)}", len(reached)), *cells])
    if not rows:
        return None
    what = f"{value_text(judge, part.target, sign=' %')} test {judge.title}"
    caption = f"Cost of reaching {what} (mean over seeds; blank if a seed never reaches it)"
    columns = ["seeds that reach it", "rounds", "MB, up and down", "seconds", *timed]
    return Table("target", caption, ["method", *columns], rows)


def fairness_table(part: RunGroup) -> Table | None:
    """Build the table of the distribution of the objective over clients, for the global and the personal models."""
    rows, judge = [], part.at_clients
    for method_runs in part.series:
        for whose, label in CLIENT_MODELS.items():
            keys = [f"{whose}_{judge.name}_{what}" for what in OVER_CLIENTS]
            means = [mean_or_none([run.summary.get(key) for run in method_runs.runs]) for key in keys]
            if means[0] is None:
                continue
            unseen, name = whose in UNSEEN, f"personal_{judge.name}" if "personal" in whose else judge.name
            rows_of = [honest_clients(run.clients, unseen) for run in method_runs.runs]
            scored = [usable_values(own, name) for own in rows_of]
            better = mean_or_none([_better(run, judge) for run in method_runs.runs]) if label == "personal" else None
            # R² may be negative, so a share of the total is not defined.
            shares = judge.percent and judge.name != "r2" and not judge.lower_is_better
            gap = mean_or_none([gini(values) for values in scored if values]) if shares else None
            cells = [metric_cell(judge)(value) for value in means]
            label = "own" if is_local(method_runs.method) else label
            rows.append([Cell(method_runs.label), Cell(label), *cells, number_cell(gap, 3), percent_cell(better)])
    if not rows:
        return None
    worst = [metric_title(title, judge) for title in ("worst decile", "worst client")]
    columns = [metric_title("mean", judge), "std over clients", *worst, "Gini", "clients it serves better, %"]
    which = "of the kept model" if keeps_best(run.summary for run in part.runs) else "after the last round"
    caption = f"{judge.heading} over clients {which}, mean over seeds"
    return Table("fairness", caption, ["method", "model", *columns], rows, 2)


def _better(run: RunFiles, judge: MetricInfo) -> float | None:
    """Return the share of clients for which the personal model is better than the global one."""
    personal = f"personal_{judge.name}"
    pairs = [
        (row[personal], row[judge.name])
        for row in honest_clients(run.clients)
        if all(is_usable_number(row.get(name)) for name in (personal, judge.name))
    ]
    return mean_or_none([float(judge.rank(own_value) > judge.rank(everyones)) for own_value, everyones in pairs])


MOST_CLASSES = 20
"""Maximum number of classes of a displayed confusion matrix."""


def confusion_table(one: MethodRuns) -> Table | None:
    """Build the confusion matrix of a method's first run; None if it is missing or too large."""
    matrix = one.runs[0].curves.get("confusion")
    if matrix is None or len(matrix["classes"]) > MOST_CLASSES:
        return None
    names = [str(name) for name in matrix["classes"]]
    rows = [
        [Cell(name), *(number_cell(count, 0) for count in counts)]
        for name, counts in zip(names, matrix["counts"], strict=False)
    ]
    caption = f"Confusion matrix of {one.label}, seed {one.runs[0].summary['seed']}: a row per true class"
    return Table(f"confusion of {one.label}", caption, ["true class", *(f"predicted {name}" for name in names)], rows)


def coefficient_table(content: Mapping[str, Any]) -> Table:
    """Build the table of a run's ``coefficients.json``.

    Args:
        content: Content of the file.
    """
    ratios = [name for row in content["coefficients"][:1] for name in row if "_ratio" in name]
    names, rows = ("coefficient", "standard_error", "z", "p_value", *ratios), []
    for row in content["coefficients"]:
        name, category = row["column"], row["category"]
        title = name if category is None else f"{name}: {category} (against {content['references'][name]})"
        cells = [Cell("-") if row[key] is None else Cell(f"{row[key]:.4g}", row[key]) for key in names]
        rows.append([Cell(title), *cells])
    ratio = "Odds" if "odds_ratio" in ratios else "Hazard"
    caption = f"{ratio} ratios of {content['event']} ({content['events']} of {content['rows']} training rows)"
    return Table("coefficients", caption, ["column", *(name.replace("_", " ") for name in names)], rows)


COSTS: dict[str, tuple[str, Any]] = {
    "seconds": ("seconds of the run", number_cell),
    "seconds_simulated": ("simulated seconds", number_cell),
    "client_seconds": ("seconds per client", lambda value: number_cell(value, 2)),
    "bytes_up": ("MB up", megabytes_cell),
    "bytes_down": ("MB down", megabytes_cell),
    "buffer_bytes_up": ("of these buffers, MB up", megabytes_cell),
    "report_bytes_up": ("only for measurements, MB up", megabytes_cell),
    "server/gflops": ("server, GFLOP per round", lambda value: number_cell(value, 3)),
    "server/bytes": ("server's memory, MB", megabytes_cell),
    "synthetic_seconds": ("image generation, seconds", number_cell),
    "updates_skipped": ("updates skipped", number_cell),
}
"""Metrics of the summary that are costs."""


def cost_table(part: RunGroup) -> Table:
    """Build the table of costs per method, means over seeds; a column is shown if any run has a nonzero value."""
    costs = {
        name: [mean_or_none([_cost(run, name) for run in method_runs.runs]) for method_runs in part.series]
        for name in COSTS
        if any(_cost(run, name) for run in part.runs)
    }
    rows = [
        [Cell(method_runs.label), *(COSTS[name][1](values[index]) for name, values in costs.items())]
        for index, method_runs in enumerate(part.series)
    ]
    caption = "Cost of each method, mean over seeds"
    return Table("costs", caption, ["method", *(COSTS[name][0] for name in costs)], rows)


def _cost(run: RunFiles, name: str) -> float | None:
    value = run.summary.get(name)
    counted = "bytes" not in name or not is_reference(run.summary["method"])
    return value if is_usable_number(value) and counted else None


def runs_table(part: RunGroup) -> Table:
    """Build the table of all runs with the metrics of their ``summary.json``."""
    judge, own = part.objective, part.at_clients
    write, per = metric_cell(judge), " %" if own.percent else ""
    pairs = [(method_runs.label, run, run.summary) for method_runs in part.series for run in method_runs.runs]
    rows = [
        [
            Cell(method_title({"method": label, "seeds": 1, "diverged": bool(s.get("diverged"))})),
            Cell(str(run.folder)),
            number_cell(s["seed"], 0),
            write(s.get(judge.name)),
            write(s.get(f"best_{judge.name}")),
            number_cell(_cost(run, "best_round"), 0),
            loss_cell(s.get("loss")),
            *(metric_cell(own)(s.get(f"client_{own.name}_{what}")) for what in ("mean", "worst_decile", "worst")),
            *cost_cells(s),
        ]
        for label, run, s in pairs
    ]
    columns = [*(metric_title(title, judge) for title in ("last round", "best round")), "best round", "loss"]
    columns += [f"clients, mean{per}", *(metric_title(f"worst {which}", own) for which in ("decile", "client")), *COST]
    return Table("runs", "All runs, as in their summary.json", ["method", "folder", "seed", *columns], rows, 2)
