"""What is kept of a finished run: a small JSON file, found again by what the run was and not by where or when it ran."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.errors import DataError
from unskew.files import write_atomic
from unskew.runs.continuation import RESUMABLE

ELSEWHERE = {*RESUMABLE, "data_path", "server_path", "start_from"} - {"rounds"}
"""Fields that say how a run is carried out, not what it is."""
CURVES = (
    *("accuracy", "perplexity", "local_", "consensus/", "generalization/", "gradients/"),
    *("coefficients/", "surrogate/"),
)
"""What is kept of every evaluated round: figures that begin so."""
Outcome = dict[str, Any]


def run_identity(config: Experiment, parent: Experiment | None = None) -> dict[str, Any]:
    """What a run is: its configuration without what does not change the numbers, and the run it begins from."""
    fields = {k: v for k, v in config.model_dump(mode="json").items() if k not in ELSEWHERE}
    defaults = Experiment().model_dump(mode="json")
    # A field that is added later with a neutral default must not make every older result another run.
    told = {k: v for k, v in fields.items() if v != defaults.get(k) or k in ("data", "method", "seed", "rounds")}
    return told if parent is None else {**told, "begins_with": run_identity(parent)}


def name_of(run: dict[str, Any]) -> str:
    """A name for what a run is, from all that it is."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


def key_of(config: Experiment, parent: Experiment | None = None) -> str:
    """A name for what a run is."""
    return name_of(run_identity(config, parent))


def keep(
    folder: Path, config: Experiment, parent: Experiment | None, history: list[dict[str, Any]], summary: dict[str, Any]
) -> Path:
    """Write the outcome of a finished run into ``folder``."""
    scored = [row for row in history if row["accuracy"] is not None]
    sent = [row["bytes_up"] + row["bytes_down"] for row in scored]
    curve = {"round": [row["round"] for row in scored], "bytes": sent, **_curves(scored)}
    return write_outcome(folder, run_identity(config, parent), {"summary": summary, "curve": curve})


def write_outcome(folder: Path, run: dict[str, Any], found: dict[str, Any], indent: int | None = 1) -> Path:
    """Write what was found in a run into ``folder``, under the name of what the run is."""
    made = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    path = folder / f"{name_of(run)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps({"run": run, **found, "made_with": made}, indent=indent) + "\n").encode())
    return path


def _curves(scored: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """What figures show over rounds; rounds before a branch may lack what only the branch measured."""
    names = [n for n in dict.fromkeys(n for row in scored for n in row) if n.startswith(CURVES)]
    return {n: [None if row.get(n) is None else round(row[n], 5) for row in scored] for n in names}


def kept(folder: Path, config: Experiment, parent: Experiment | None = None) -> Outcome | None:
    """The outcome of a run if it is there.

    Raises:
        DataError: Its file cannot be read.
    """
    return read_outcome(folder, run_identity(config, parent))


def read_outcome(folder: Path, run: dict[str, Any]) -> Outcome | None:
    """What was found in a run if it is there; see ``write_outcome``.

    Raises:
        DataError: Its file cannot be read.
    """
    path = folder / f"{name_of(run)}.json"
    if not path.is_file():
        return None
    try:
        outcome: Outcome = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON; remove it, and the run is made again.") from error
    return outcome
