"""``unskew evaluate``: metrics of a trained model on other labeled data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli.common import (
    AsJson,
    CsvSets,
    TrustCode,
    console_for,
    csv_values,
    escape_controls,
    print_json,
    printed_warnings,
)
from unskew.cli.flags import ClientName, ClientNumber, NewSite
from unskew.cli.predict import check_output, write_rows
from unskew.filesystem import check_run, parse_path

if TYPE_CHECKING:
    from rich.table import Table

    from unskew.runs.input_spec import InputSpec


def evaluate(
    run: Path,
    rows: Annotated[Path, typer.Argument(metavar="DATA", parser=parse_path)],
    by: str | None = None,
    out: Path | None = None,
    sets: CsvSets = None,
    client: ClientName = None,
    client_number: ClientNumber = None,
    no_intervals: bool = False,
    new_site: NewSite = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on other labeled data, overall and per site.

    Options:
        run: Folder of a finished run.
        rows: A .csv, .jsonl or .parquet file with labels, a folder with one folder of images per class, or one with the
            folders images and masks.
        by: Column, such as hospital; also compute metrics for each of its values.
        out: Write the metrics to this .csv or .jsonl file.
        no_intervals: Compute no 95 % intervals.
    """
    check_run(run)
    check_output(out, run, rows)
    from unskew.cli.progress import progress_while_waiting
    from unskew.serving.evaluation import evaluate_rows
    from unskew.serving.input_files import read_rows
    from unskew.serving.load import load_predictor

    with printed_warnings(), progress_while_waiting("evaluate"):
        predictor = load_predictor(run, client=client, client_number=client_number, trust_code=trust_code)
        read = read_rows(rows, predictor.inputs.with_csv(csv_values(sets)), new_site)
        scores = evaluate_rows(predictor.outputs(read.x), read, predictor.inputs, rows, by, not no_intervals)
    for unknown in read.unknown:
        print(f"unskew: {unknown}", file=sys.stderr)
    write_rows(scores, out)
    if as_json:
        print_json(scores)
        return
    console_for().print(evaluation_table(scores, by, predictor.inputs))


def evaluation_table(scores: list[dict[str, Any]], by: str | None, inputs: InputSpec) -> Table:
    """Build the table of metrics: a row per metric, or with groups, a row per group.

    Args:
        scores: Metrics of each group, from ``evaluate_rows``.
        by: Column whose values form groups, or None.
        inputs: Input specification of the model.
    """
    from rich.table import Table
    from rich.text import Text

    from unskew.cli.fit_table import ReflowTable
    from unskew.cli.tables import shorten
    from unskew.comparison.summary_statistics import interval_of
    from unskew.tasks.primary_metric import metric_info

    def cell(value: Any) -> Text:
        return Text(escape_controls(shorten(value) if value is None or isinstance(value, float) else str(value)))

    def ends(row: dict[str, Any], name: str) -> str:
        interval = interval_of([row], name) if with_intervals else None
        return "" if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}"

    with_intervals = scores[0] if f"{inputs.objective.scored}_low" in scores[0] else ()
    intervals = {f"{name}{end}" for name in with_intervals for end in ("_low", "_high")}
    names = [name for name in scores[0] if name not in intervals and name not in ("group", "rows")]
    titles = {name: Text(escape_controls(metric_info(name, positive=inputs.positive_class).title)) for name in names}
    titles |= {name: cell(f"rows of {name.partition('/')[2]}") for name in names if name.startswith("support/")}
    if by is None:
        single = Table("", "value", "95 % interval")
        for name in ("rows", *names):
            single.add_row(titles.get(name, cell(name)), cell(scores[0][name]), ends(scores[0], name))
        return single
    table = ReflowTable()
    for title in (cell(by), cell("rows"), *titles.values()):
        table.add_column(title, justify="right" if table.columns else "left")
    for row in scores:
        values = [cell(row[name]).append(f" ({ends(row, name)})" if ends(row, name) else "") for name in names]
        table.add_row(cell(row["group"]), cell(row["rows"]), *values)
    return table


def site_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Build the tables of ``unskew deploy evaluate``: metrics per model and site, and the matrix of sites.

    Args:
        rows: Metrics of each model at each site.
    """
    from unskew.cli.fit_table import table_of
    from unskew.tasks.formatting import interval_text, value_text
    from unskew.tasks.primary_metric import metric_info

    def text(row: dict[str, Any] | None, interval: bool = True) -> str:
        if row is None or row["value"] is None:
            return "-"
        info = metric_info(row["metric"])
        ends = interval_text(info, None if row["low"] is None else (row["low"], row["high"]))
        return f"{value_text(info, row['value'], sign='')}{f' ({ends})' if ends and interval else ''}"

    sites, metrics = (list(dict.fromkeys(row[name] for row in rows)) for name in ("site", "metric"))
    cells = {(row["model"], row.get("trained_at"), row["site"], row["metric"]): row for row in rows}
    infos = [metric_info(name) for name in metrics]
    titles = [info.title + (", %" if info.percent else "") for info in infos]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for site in sites:
            found = [cells.get((model, site if model == "local" else None, site, name)) for name in metrics]
            n = next((str(row["n"]) for row in found if row is not None and row["n"] is not None), "-")
            lines.append([escape_controls(cell) for cell in (model, site, n, *map(text, found))])
    tables: list[Table] = [table_of(("model", "site", "samples", *titles), lines)]
    if any(row.get("trained_at") not in (None, row["site"]) for row in rows):
        models = [("global", "global", None), *((f"local of {site}", "local", site) for site in sites)]
        matrix = [
            [label, *(text(cells.get((model, trainer, site, metrics[0])), interval=False) for site in sites)]
            for label, model, trainer in models
        ]
        title = f"{titles[0]}: each model (rows) on the held-out samples of each site (columns)"
        tables.append(table_of(("model", *sites), matrix, title))
    return tables
