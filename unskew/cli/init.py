"""``unskew init``: write a first configuration for the user's data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from unskew.cli.common import CsvSets, console_for, csv_values
from unskew.errors import ConfigError
from unskew.filesystem import write_atomic


def init(
    data: Annotated[str | None, typer.Argument()] = None,
    label: str | None = None,
    clients: str | None = None,
    image: str | None = None,
    sets: CsvSets = None,
    out: Path = Path("experiment.yaml"),
) -> None:
    """Inspect your data, write a commented experiment.yaml for them, and print the next commands.

    Options:
        data: A .csv, .jsonl, .parquet or .npz file, a folder of images, or one with the folders images and masks, or a
            data source; digits by default.
        label: Label column of a table, if it is not detected; time and event for survival: days,event.
        clients: Column that names the clients, if it is not detected.
        image: Column with images or paths of image files, if it is not detected.
        out: File to write; it must not exist yet.
    """
    from unskew.data.sources.registry import SOURCES

    data_exist = data is None or Path(data).expanduser().exists() or data.partition(":")[0] in SOURCES
    if out.exists() and data_exist:  # if the data do not exist, report that first
        raise ConfigError(f"{out} already exists. Choose another name with --out, or remove the file.")
    if not out.parent.is_dir():
        raise ConfigError(f"The folder {out.parent} for {out.name} does not exist.")
    from unskew.cli.progress import progress_while_waiting
    from unskew.config.inference.infer import infer_config

    with progress_while_waiting("init"):
        inferred = infer_config(data, label, clients=clients, image=image, csv=csv_values(sets))
    write_atomic(out, inferred.text(shlex.join(["unskew", *sys.argv[1:]])).encode())
    console = console_for()
    for line in inferred.seen:
        console.print(line, highlight=False, soft_wrap=True)
    name = shlex.quote(str(out))
    console.print(f"Wrote {out}. Review it, and then run, for example:", highlight=False, soft_wrap=True)
    for command in (f"unskew partition {name}", f"unskew diagnose {name} --no-curvature", f"unskew run {name}"):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
