"""``unskew predict``: predict labels and probabilities for new rows or images with a trained model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

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
from unskew.errors import ConfigError, free_name
from unskew.filesystem import check_run, escape_formula, parse_path, write_atomic

FORMATS = (".csv", ".jsonl")
SHOWN = 20


def predict(
    run: Path,
    rows: Annotated[Path, typer.Argument(metavar="INPUT", parser=parse_path)],
    out: Path | None = None,
    keep: str | None = None,
    threshold: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    horizons: str | None = None,
    curve: bool = False,
    sets: CsvSets = None,
    client: ClientName = None,
    client_number: ClientNumber = None,
    new_site: NewSite = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Predict labels and probabilities, numbers, or masks, for new rows, images or texts with a trained model.

    Options:
        run: Folder of a finished run.
        rows: A .csv, .jsonl or .parquet file, an image, or a folder of images.
        out: Write all predictions to this .csv or .jsonl file; masks are PNG files in a folder next to it.
        keep: Columns of INPUT to repeat next to the predictions: patient_id,ward.
        threshold: Minimum probability to predict the positive one of two classes.
        horizons: Times until which the risk of a survival model is written: 180,365.
        curve: Write the probability to survive each cut point of a survival model.
    """
    check_run(run)
    check_output(out, run, rows)
    from unskew.cli.progress import progress_while_waiting
    from unskew.expressions import parse_names
    from unskew.serving.input_files import file_columns, read_rows
    from unskew.serving.load import load_predictor

    with printed_warnings(), progress_while_waiting("predict"):
        predictor = load_predictor(run, client=client, client_number=client_number, trust_code=trust_code)
        read = read_rows(rows, predictor.inputs.with_csv(csv_values(sets)), new_site)
        kept_columns = file_columns(read, parse_names(keep or ""), rows)
        outputs = predictor.outputs(read.x)
    for unknown in read.unknown:
        print(f"unskew: {unknown}", file=sys.stderr)
    inputs, task = predictor.inputs, predictor.inputs.objective
    numbers = task.output_kind != "probabilities" or task.pixels
    predicted = task.predicted_columns(outputs, inputs.names, inputs.label, parse_times(horizons), curve)
    titles = [*predicted]
    labels = predictor.labels(outputs, threshold)
    strange: dict[int | str, list[str]] = {}
    for unknown in read.unknown:
        for row in unknown.rows:
            strange.setdefault(row, []).append(unknown.column)
    chosen = {} if numbers else {f"predicted_{inputs.label or 'label'}": labels}
    files = {}
    if task.pixels and out is not None:
        from unskew.serving.mask_files import write_masks

        files = {"mask": write_masks(labels, read, out.with_name(f"{out.stem}-masks"))}
    own: dict[str, Sequence[Any]] = {
        "row": read.names,
        **chosen,
        **files,
        **predicted,
        **({"unknown": [strange.get(name, []) for name in read.names]} if strange else {}),
    }
    names = free_names(own, kept_columns)
    columns = {names["row"]: own["row"], **kept_columns, **{names[name]: values for name, values in own.items()}}
    lines: list[dict[str, Any]] = [
        dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)
    ]
    write_rows(lines, out)
    if as_json:
        print_json(lines)
        return
    console = console_for()
    from rich.text import Text

    from unskew.cli.fit_table import ReflowTable

    binary = inputs.positive_class is not None
    positive = inputs.metrics.positive
    probability = ["probability"] if "one_class" in task.provides else []
    last = titles if numbers else [titles[positive]] if binary else probability
    shown = [names["row"], *kept_columns, *(names[name] for name in chosen)]
    table = ReflowTable(header_style="bold")
    for title in (*shown, *(names.get(title, title) for title in last)):
        table.add_column(Text(escape_controls(title)))
    for line, values in list(zip(lines, outputs, strict=True))[:SHOWN]:
        cells = [text_or_dash(line[name]) for name in shown]
        listed = [line[names[title]] for title in last if title in names]
        cells += [f"{values.max():.3f}"] if last == ["probability"] else [number_or_dash(value) for value in listed]
        table.add_row(*(Text(escape_controls(cell)) for cell in cells))
    console.print(table)
    if binary and (weights := inputs.class_weights) and threshold is None:
        limit = weights[1 - positive] / sum(weights)
        console.print(
            f"Because of class_weights, the label is {inputs.positive_class} from a probability of {limit:.3g}; "
            "--threshold sets another limit.",
            highlight=False,
            soft_wrap=True,
        )
    more = f"{len(lines) - SHOWN} more. " if len(lines) > SHOWN else ""
    every = "and the masks as PNG files" if task.pixels else "with every probability"
    where = f"All rows are in {out}." if out is not None else f"--out FILE writes all rows, {every}."
    console.print(f"{more}{where}", highlight=False, soft_wrap=True)


def parse_times(text: str | None) -> tuple[float, ...]:
    """Return the times of an option (raises ``ConfigError`` if one is not a positive number).

    >>> parse_times("180,365")
    (180.0, 365.0)
    """
    try:
        times = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        times = (0.0,)
    if not all(0 < time < math.inf for time in times):
        raise ConfigError(f"--horizons {text}: write times as positive numbers, such as 180,365.")
    return times


def text_or_dash(value: object) -> str:
    """Return the text of a cell, the items of a list, or ``-`` for None and an empty list."""
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value)


def number_or_dash(value: float | None) -> str:
    """Return a number with four digits, or ``-`` for None."""
    return "-" if value is None else f"{value:.4g}"


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


def free_names(own: Iterable[str], existing: Collection[str]) -> dict[str, str]:
    """Return the names of the columns that a command adds; names of the user's columns get a number.

    Args:
        own: Columns that the command adds.
        existing: Columns of the user, which keep their names.

    >>> free_names(["row", "predicted_cost"], ["cost", "predicted_cost"])
    {'row': 'row', 'predicted_cost': 'predicted_cost_2'}
    """
    names: dict[str, str] = {}
    for name in own:
        names[name] = name if name not in existing else free_name(name, {*existing, *own, *names.values()})
    return names


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
