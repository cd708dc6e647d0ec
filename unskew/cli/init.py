"""``unskew init``: a first configuration for one's own data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from unskew.cli.common import console_for
from unskew.errors import ConfigError
from unskew.filesystem import parse_path, write_atomic


def init(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A .csv, .jsonl, .parquet or .npz file, a folder of images, or a data source; digits without."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Label column of a table, if it is not detected.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", parser=parse_path, metavar="PATH", help="The file that is written; it must be new.")
    ] = Path("experiment.yaml"),
) -> None:
    """Write a commented experiment.yaml for your own data, after looking at them, and say what to do next."""
    from unskew.data.sources.registry import SOURCES

    there = data is None or Path(data).expanduser().exists() or data.partition(":")[0] in SOURCES
    if out.exists() and there:  # else what is wrong with the data is told first
        raise ConfigError(f"{out} is already there; choose another name with --out, or remove it.")
    if not out.parent.is_dir():
        raise ConfigError(f"There is no folder {out.parent} to write {out.name} into.")
    from unskew.cli.progress import progress_while_waiting
    from unskew.config.infer import infer_config

    with progress_while_waiting("init"):
        inferred = infer_config(data, label)
    write_atomic(out, inferred.text(shlex.join(["unskew", *sys.argv[1:]])).encode())
    console = console_for()
    for line in inferred.seen:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    name = shlex.quote(str(out))
    console.print(f"{out} is written. Look at it; then, for example:", markup=False, highlight=False, soft_wrap=True)
    for command in (
        f"unskew partition {name}",
        f"unskew diagnose {name} --no-curvature",
        f"unskew run {name}",
    ):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
