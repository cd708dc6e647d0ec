"""``unskew evaluate``: metrics of a trained model on other labeled data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from unskew.cli.common import AsJson, TrustCode, console_for, escape_controls, print_json, printed_warnings
from unskew.cli.flags import ClientName, ClientNumber
from unskew.cli.predict import check_output, write_rows
from unskew.filesystem import check_run, parse_path


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A .csv, .jsonl or .parquet file with labels, or a folder with one folder of images per class.",
            parser=parse_path,
        ),
    ],
    by: Annotated[
        str | None, typer.Option("--by", help="Column, such as hospital; also compute metrics for each of its values.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=parse_path, metavar="PATH", help="Write the metrics to this .csv or .jsonl file."),
    ] = None,
    client: ClientName = None,
    client_number: ClientNumber = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on other labeled data, overall and per site."""
    check_run(run)
    check_output(out, run, rows)
    from unskew.cli.fit_table import ReflowTable
    from unskew.cli.progress import progress_while_waiting
    from unskew.cli.tables import shorten
    from unskew.serving.evaluation import evaluate_rows
    from unskew.serving.input_files import read_rows
    from unskew.serving.load import load_predictor

    with printed_warnings(), progress_while_waiting("evaluate"):
        predictor = load_predictor(run, client=client, client_number=client_number, trust_code=trust_code)
        read = read_rows(rows, predictor.inputs)
        scores = evaluate_rows(predictor.outputs(read.x), read, predictor.inputs, rows, by)
    for unknown in read.unknown:
        print(f"unskew: {unknown}", file=sys.stderr)
    write_rows(scores, out)
    if as_json:
        print_json(scores)
        return
    from rich.text import Text

    table = ReflowTable()
    for name in scores[0]:
        table.add_column(
            Text(by or "rows of" if name == "group" else name), justify="left" if name == "group" else "right"
        )
    for row in scores:
        cells = (shorten(v) if v is None or isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*(Text(escape_controls(cell)) for cell in cells))
    console_for().print(table)
