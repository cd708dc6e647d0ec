"""``unskew predict``: predict labels and probabilities for new rows or images with a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.common import AsJson, Client, TrustCode, console_for, escape_controls, print_json, printed_warnings
from unskew.errors import ConfigError
from unskew.filesystem import check_run, escape_formula, parse_path, write_atomic

FORMATS = (".csv", ".jsonl")
SHOWN = 20


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="A .csv, .jsonl or .parquet file, an image, or a folder of images.", parser=parse_path
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", parser=parse_path, metavar="PATH", help="Write all predictions to this .csv or .jsonl file."
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", help="Columns of INPUT to repeat next to the predictions: patient_id,ward.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold", min=0, max=1, help="Minimum probability to predict the positive one of two classes."
        ),
    ] = None,
    client: Client = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Predict labels and probabilities, or numbers, for new rows, images or texts with a trained model."""
    check_run(run)
    check_output(out, run, rows)
    from unskew.cli.progress import progress_while_waiting
    from unskew.data.spec import parse_names
    from unskew.serving.input_files import file_columns, read_rows
    from unskew.serving.load import load_predictor

    with printed_warnings(), progress_while_waiting("predict"):
        predictor = load_predictor(run, client=client, trust_code=trust_code)
        read = read_rows(rows, predictor.inputs)
        kept_columns = file_columns(read, parse_names(keep or ""), rows)
        outputs = predictor.outputs(read.x)
    for unknown in read.unknown:
        print(f"unskew: {unknown}", file=sys.stderr)
    numbers = predictor.numbers
    titles = predictor.class_names if numbers else probability_names(predictor.inputs.label, predictor.class_names)
    labels = predictor.labels(outputs, threshold)
    strange: dict[int | str, list[str]] = {}
    for unknown in read.unknown:
        for row in unknown.rows:
            strange.setdefault(row, []).append(unknown.column)
    lines: list[dict[str, Any]] = [
        {
            "row": name,
            **{column: values[index] for column, values in kept_columns.items()},
            **({} if numbers else {"label": labels[index]}),
            **{title: float(f"{value:.6g}") for title, value in zip(titles, outputs[index], strict=True)},
            **({"unknown": strange.get(name, [])} if strange else {}),
        }
        for index, name in enumerate(read.names)
    ]
    write_rows(lines, out)
    if as_json:
        print_json(lines)
        return
    console = console_for()
    from rich.table import Table
    from rich.text import Text

    several = predictor.inputs.task == "multilabel"
    binary = not numbers and not several and len(titles) == 2
    positive = predictor.inputs.metrics.positive
    last = titles if numbers else [titles[positive]] if binary else [] if several else ["probability"]
    table = Table(header_style="bold")
    for title in ("row", *kept_columns, *([] if numbers else ["label"]), *last):
        table.add_column(Text(escape_controls(title)))
    for line, values in list(zip(lines, outputs, strict=True))[:SHOWN]:
        cells = [str(line[name]) for name in ("row", *kept_columns)]
        if not numbers:
            cells.append((", ".join(line["label"]) if several else str(line["label"])) or "-")
        shown = [f"{values.max():.3f}"] if last == ["probability"] else [f"{line[title]:.4g}" for title in last]
        table.add_row(*(Text(escape_controls(cell)) for cell in [*cells, *shown]))
    console.print(table)
    if binary and (weights := predictor.inputs.class_weights) and threshold is None:
        limit = weights[1 - positive] / sum(weights)
        console.print(
            f"Because of class_weights, the label is {predictor.class_names[positive]} from a probability of {limit:.3g}; "
            "--threshold sets another limit.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    more = f"{len(lines) - SHOWN} more. " if len(lines) > SHOWN else ""
    where = f"All rows are in {out}." if out is not None else "--out FILE writes all rows, with every probability."
    console.print(f"{more}{where}", markup=False, highlight=False, soft_wrap=True)


def check_output(out: Path | None, run: Path, rows: Path) -> None:
    """Validate the output file of a command.

    Args:
        out: File to write, or None.
        run: Run folder.
        rows: Input file.

    Raises:
        ConfigError: If the file has a suffix other than ``FORMATS``, is the input file, or is in the run folder.
    """
    if out is None:
        return
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out.name} must end in {' or '.join(FORMATS)}.")
    if out.resolve() == rows.resolve() or run.resolve() in out.resolve().parents:
        what = "the input" if out.resolve() == rows.resolve() else "in the run folder, whose files belong to the run"
        raise ConfigError(f"--out {out} is {what}. Choose another file.")


def write_rows(lines: list[dict[str, Any]], out: Path | None) -> None:
    """Write rows to a .csv or .jsonl file.

    Args:
        lines: Rows to write.
        out: File to write; None writes nothing.
    """
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, format_value(lines, out.suffix.lower()).encode())


def probability_names(label: str | None, names: list[str]) -> list[str]:
    """Return a column name for the probability of each class.

    Args:
        label: Name of the label column, or None.
        names: Names of the classes.

    >>> probability_names("sepsis", ["0", "1"]), probability_names(None, ["cat", "dog"])
    (['p(sepsis=0)', 'p(sepsis=1)'], ['p(cat)', 'p(dog)'])
    """
    return [f"p({name})" if label is None else f"p({label}={name})" for name in names]


def format_value(lines: list[dict[str, Any]], kind: str) -> str:
    """Format predictions as JSON lines or CSV.

    In CSV, the items of lists are separated by ``|``, and strings that start like a formula (``=``, ``+``, ``-``,
    ``@``, tab, line break) are prefixed with an apostrophe.

    Args:
        lines: Rows to format.
        kind: ``.csv`` or ``.jsonl``.
    """
    if kind == ".jsonl":
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writerow({name: escape_formula(name) for name in lines[0]})
    for line in lines:
        writer.writerow({k: escape_formula("|".join(v) if isinstance(v, list) else v) for k, v in line.items()})
    return text.getvalue()
