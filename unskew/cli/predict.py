"""``unskew predict``: labels and probabilities of new rows or images from a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.options import AsJson, Client, TrustCode, console_for, print_json
from unskew.errors import ConfigError
from unskew.files import place, write_atomic

FORMATS = (".csv", ".jsonl")
SHOWN = 20


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="A .csv, .jsonl or .parquet file, an image, or a folder of images.", parser=place
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=place, metavar="PATH", help="Write all predictions to this .csv or .jsonl file."),
    ] = None,
    client: Client = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Predict labels and probabilities, or numbers, for new rows, images or texts with a trained model."""
    if out is not None and out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out.name} must end in {' or '.join(FORMATS)}.")
    from unskew.cli.progress import waiting
    from unskew.serving.load import load
    from unskew.serving.rows import read_rows

    with waiting("predict"):
        predictor = load(run, client=client, trust_code=trust_code)
        read = read_rows(rows, predictor.inputs)
        probabilities = predictor.outputs(read.x)
    for one in read.unknown:
        print(f"unskew: {one}", file=sys.stderr)
    labels = predictor.labels(probabilities)
    columns, numbers = predictor.class_names, predictor.numbers
    categories = any(one.kind == "category" for one in predictor.inputs.columns)
    strange: dict[int | str, list[str]] = {}
    for one in read.unknown:
        for row in one.rows:
            strange.setdefault(row, []).append(one.column)
    lines: list[dict[str, Any]] = [
        {
            "row": name,
            **({} if numbers else {"label": label}),
            **dict(zip(columns if numbers else columns_of(columns), map(float, row), strict=True)),
            **({"unknown": strange.get(name, [])} if categories else {}),
        }
        for name, label, row in zip(read.names, labels, probabilities, strict=True)
    ]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, as_text(lines, out.suffix.lower()).encode())
    if as_json:
        print_json(lines)
        return
    console = console_for()
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for title in ("row", *(columns if numbers else ("label", "probability"))):
        table.add_column(title)
    several = predictor.inputs.task == "multilabel"
    for line, row in list(zip(lines, probabilities, strict=True))[:SHOWN]:
        if numbers:
            table.add_row(Text(str(line["row"])), *(f"{value:.6g}" for value in row))
            continue
        shown = ", ".join(line["label"]) if several else str(line["label"])
        table.add_row(Text(str(line["row"])), Text(shown or "-"), "" if several else f"{row.max():.3f}")
    console.print(table)
    more = f"{len(lines) - SHOWN} more. " if len(lines) > SHOWN else ""
    where = f"All are in {out}." if out is not None else "--out FILE writes all of them, with every probability."
    console.print(f"{more}{where}", markup=False, highlight=False, soft_wrap=True)


def columns_of(names: list[str]) -> list[str]:
    """A column for the probability of each class."""
    return [f"p_{name}" for name in names]


def as_text(lines: list[dict[str, Any]], kind: str) -> str:
    """The predictions as JSON lines or CSV; in CSV several labels or columns are divided by |."""
    if kind == ".jsonl":
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({k: "|".join(v) if isinstance(v, list) else v for k, v in line.items()})
    return text.getvalue()
