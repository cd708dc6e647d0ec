"""Stored outcomes of finished runs: small JSON files, identified by the run's configuration, not by folder or time."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from unskew.comparison.folder_name import folder_name
from unskew.config.experiment import Experiment
from unskew.errors import DataError
from unskew.filesystem import make_subfolder, parse_json, read_file, write_atomic
from unskew.runs.resume import RESUMABLE

ELSEWHERE = {*RESUMABLE, "data_path", "server_data_path", "start_from"} - {"rounds"}
"""Fields that do not change the numbers of a run."""
ALWAYS = {"": {"data", "method", "seed", "rounds"}, "network": {"drop", "delay", "delay_per"}}
"""Fields that are included even if they have their defaults: of every run, and of sections. Hashes depend on them."""
CURVES = (
    *("accuracy", "perplexity", "local_", "consensus/", "generalization/", "gradients/"),
    *("coefficients/", "surrogate/", "updates/"),
)
"""Prefixes of metrics that are stored for every evaluated round."""
DIGITS, LONGEST = 8, 80
"""Digits of the hash in a file name, and maximum length of its readable parts."""
Outcome = dict[str, Any]
Files = dict[str, list[Path]]
"""Outcome files by the first digits of their hashes."""


def run_identity(config: Experiment, parent: Experiment | None = None) -> dict[str, Any]:
    """Return the identity of a run: fields that change its numbers, and the run that it starts from.

    Args:
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
    """
    fields = {name: value for name, value in config.model_dump(mode="json").items() if name not in ELSEWHERE}
    run = _differing(fields, _defaults(type(config)))
    return run if parent is None else {**run, "begins_with": run_identity(parent)}


def _differing(values: dict[str, Any], defaults: Any, section: str = "") -> dict[str, Any]:
    """Return values that are not defaults, also in sections, so that new fields do not change old identities."""
    run = {}
    for name, value in values.items():
        if name not in defaults or value != defaults[name] or name in ALWAYS.get(section, ()):
            default = defaults.get(name)
            nested = isinstance(value, dict) and isinstance(default, dict)
            run[name] = _differing(value, default, name) if nested else value
    return run


@functools.cache
def _defaults(kind: type[Experiment]) -> dict[str, Any]:
    # The learning rate at the time of the first stored outcomes, which do not contain it.
    return {**kind().model_dump(mode="json"), "lr": 0.01}


def identity_hash(run: dict[str, Any]) -> str:
    """Return the hash of a run's identity."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


def experiment_hash(config: Experiment, parent: Experiment | None = None) -> str:
    """Return the hash of a run's identity, computed from its configuration.

    Args:
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
    """
    return identity_hash(run_identity(config, parent))


def store_outcome(
    folder: Path, config: Experiment, parent: Experiment | None, history: list[dict[str, Any]], summary: dict[str, Any]
) -> Path:
    """Write the outcome of a finished run into ``folder``.

    Args:
        folder: Folder of the outcomes.
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
        history: Metrics of each round.
        summary: Summary of the run.
    """
    scored = [row for row in history if row["accuracy"] is not None]
    sent = [row["bytes_up"] + row["bytes_down"] for row in scored]
    curve = {"round": [row["round"] for row in scored], "bytes": sent, **_curves(scored)}
    return write_outcome(folder, run_identity(config, parent), {"summary": summary, "curve": curve})


def outcome_path(run: dict[str, Any]) -> Path:
    """Return the path of an outcome, from its data, method, partition and seed. The hash at the end identifies it.

    >>> outcome_path({"data": "digits", "method": "fedprox:mu=0.1", "partition": "classes:2", "seed": 3}).as_posix()
    'digits/fedprox-mu=0.1/classes-2-seed3-b42ddabb.json'
    """
    if "benchmark" in run:
        what = f"{_readable(run['method'])}-trials{run['trials']}"
        return Path(_readable(run["federation"])) / f"{what}-{identity_hash(run)[:DIGITS]}.json"
    if "study" in run:
        folder, what = Path("studies") / _readable(run["study"]), run["part"]
    else:
        folder = Path(_readable(run["data"])) / _readable(run["method"])
        what = run.get("partition", _defaults(Experiment)["partition"])
    return folder / f"{_readable(what)}-seed{run['seed']}-{identity_hash(run)[:DIGITS]}.json"


def _readable(text: str) -> str:
    """Shorten a part of a file name to its start and its end, because compositions differ in both."""
    name = folder_name(text).strip(".")
    half = LONGEST // 2 - 1
    return name if len(name) <= LONGEST else f"{name[:half]}..{name[-half:]}"


def write_outcome(folder: Path, run: dict[str, Any], result: dict[str, Any], indent: int | None = 1) -> Path:
    """Write the result of a run to ``folder``, in a file whose name ends with the hash of the run's identity.

    Args:
        folder: Folder of the outcomes.
        run: Identity of the run.
        result: Result of the run.
        indent: Indentation of the JSON file.
    """
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    inside = outcome_path(run)
    path = make_subfolder(folder, *inside.parts[:-1]) / inside.name
    write_atomic(path, (json.dumps({"run": run, **result, "made_with": machine}, indent=indent) + "\n").encode())
    return path


def _curves(scored: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return the curves for figures; rounds before a branch may lack metrics that only the branch has."""
    names = [n for n in dict.fromkeys(n for row in scored for n in row) if n.startswith(CURVES)]
    return {n: [None if row.get(n) is None else round(row[n], 5) for row in scored] for n in names}


def outcome_files(folder: Path) -> Files:
    """Return all outcome files below a folder, including files of older versions, named by their hash only."""
    files: Files = {}
    for path in sorted(folder.rglob("*.json")):
        files.setdefault(path.stem.rpartition("-")[2][:DIGITS], []).append(path)
    return files


def stored_outcome(files: Path | Files, config: Experiment, parent: Experiment | None = None) -> Outcome | None:
    """Return the outcome of a run if it is stored, see ``read_outcome``.

    Args:
        files: Folder of the outcomes, or its files.
        config: Configuration of the run.
        parent: Configuration of the run that it starts from, or None.
    """
    return read_outcome(files, run_identity(config, parent))


def read_outcome(files: Path | Files, run: dict[str, Any]) -> Outcome | None:
    """Return the outcome of a run if it is stored, see ``write_outcome``.

    Args:
        files: Folder of the outcomes; when many are read, the result of ``outcome_files``.
        run: Identity of the run.

    Raises:
        DataError: If the file cannot be read.
    """
    key = identity_hash(run)
    for path in (outcome_files(files) if isinstance(files, Path) else files).get(key[:DIGITS], ()):
        try:
            outcome: Outcome = parse_json(read_file(path))
            if identity_hash(outcome["run"]) == key:
                return outcome
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path} is corrupted. Remove it to repeat the run.") from error
    return None
