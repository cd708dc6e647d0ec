"""Reader of run folders for reports; their content is external input and is validated here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unskew.comparison.client_records import read_clients
from unskew.comparison.leave_one_out import FOLDER as LEAVE_ONE_OUT
from unskew.comparison.references import records_of_clients, trains_global_model
from unskew.comparison.summary_statistics import check_summary, is_usable_number
from unskew.config.loader import load_yaml
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import check_plain
from unskew.json_models import read_model
from unskew.progress import report_progress
from unskew.records.recorder import strip_warning_prefix
from unskew.records.result import read_about, read_history, read_summary

MOST_RUNS = 500
CURVES = {"roc", "pr", "calibration"}
MOST_POINTS = 1000
"""Largest number of points of a curve in ``curves.json``."""
DEEPEST = 4
"""Maximum depth of subfolders in which runs are searched."""
PER_ROUND = ("round", "bytes_up", "bytes_down", "seconds")


@dataclass(frozen=True)
class RunFiles:
    """Contents of the folder of a finished run.

    Attributes:
        folder: Path of the folder.
        config: All fields of the run's configuration.
        summary: Content of ``summary.json``.
        history: Metrics of each round.
        clients: Content of ``clients.jsonl``; empty for folders of earlier versions.
        about: Versions, machine and class names; empty for folders of earlier versions.
        warnings: Warnings of the run.
        curves: Content of ``curves.json``; empty if the run has none.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    about: dict[str, Any]
    warnings: list[str]
    curves: dict[str, Any] = field(default_factory=dict)


def read_runs(folders: Iterable[Path]) -> tuple[list[RunFiles], list[str]]:
    """Read every finished run in or below the folders, each once, and return notes on omitted runs.

    Args:
        folders: Run folders, or folders that contain some.

    Raises:
        ConfigError: If a folder does not exist or contains no finished run, or there are too many runs.
        CheckpointError: If a file of a run is corrupted.
    """
    run_of: dict[Path, Path] = {}
    notes: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise ConfigError(
                f"{folder} {what}. Name run folders, folders of comparisons, or folders that contain them."
            )
        begun = run_folders(folder)
        finished = [path for path in begun if (path / "summary.json").is_file()]
        if not finished:
            remedy = f" {begun[0]} is not finished; continue with: unskew resume {begun[0]}" if begun else ""
            raise ConfigError(
                f"{folder} contains no finished run: a run folder has config.yaml, metrics.jsonl and summary.json.{remedy}"
            )
        notes += [f"{path} is not finished and is left out." for path in begun if path not in finished]
        run_of |= {path.resolve(): path for path in finished}
    if len(run_of) > MOST_RUNS:
        raise ConfigError(
            f"These folders contain {len(run_of)} runs, but a report shows at most {MOST_RUNS}. Name fewer."
        )
    runs: list[RunFiles] = []
    for path in run_of.values():
        report_progress("runs read", len(runs), len(run_of))
        runs.append(read_run(path))
    return runs, notes


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders, sorted by name: ``folder`` itself, or those below it."""
    folders = []
    for directory, inner, files in os.walk(folder):
        inner.sort()
        inner[:] = [name for name in inner if name != LEAVE_ONE_OUT]  # each has another federation
        if "config.yaml" in files:
            folders.append(Path(directory))
        if "config.yaml" in files or len(Path(directory).relative_to(folder).parts) >= DEEPEST:
            inner.clear()
    return folders


def read_run(folder: Path) -> RunFiles:
    """Read one run folder.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: If the configuration of the run cannot be read.
        CheckpointError: If another file is missing or corrupted.
    """
    check_plain(folder)
    summary = read_summary(folder)
    check_summary(summary, folder / "summary.json")
    history = read_history(folder)
    path = folder / "metrics.jsonl"
    if not history or not all(is_usable_number(row.get(name)) for row in history for name in PER_ROUND):
        raise CheckpointError(f"{path} is corrupted: it lacks rounds, or their traffic or times.")
    config = load_yaml(folder / "config.yaml")
    if not all(isinstance(name, str) for name in config):
        raise ConfigError(f"{folder / 'config.yaml'} is not the configuration of a run.")
    about = read_about(folder)
    path = folder / "warnings.txt"
    try:
        warnings = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    clients = read_clients(folder / "clients.jsonl")
    trains_global = trains_global_model(summary["method"])
    if not trains_global:
        history, summary, clients = records_of_clients(history, summary, clients)
    texts = list(dict.fromkeys(filter(None, map(strip_warning_prefix, warnings))))
    curves = read_curves(folder / "curves.json") if trains_global else {}
    return RunFiles(folder, config, summary, history, clients, about, texts, curves)


def read_curves(path: Path) -> dict[str, Any]:
    """Read ``curves.json``; empty if it does not exist.

    Args:
        path: File to read.

    Raises:
        CheckpointError: If the file is corrupted.
    """
    curves = read_model(path, dict[str, Any]) if path.is_file() else {}
    damaged = CheckpointError(f"{path} is corrupted. Remove it to write the report without it.")
    over_time, risks = curves.get("km", []), curves.get("risk_calibration", {})
    if not isinstance(over_time, list) or not isinstance(risks, dict):
        raise damaged
    named = all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in over_time)
    plain = [*(curves[kind] for kind in CURVES & set(curves)), *risks.values()]
    shown = all(is_curve(entry, "xy") for entry in plain)
    if not named or not shown or not all(is_curve(entry, ("x", "y", "predicted")) for entry in over_time):
        raise damaged
    matrix = curves.get("confusion", {"counts": [], "classes": []})
    names, rows = (matrix.get(name) for name in ("classes", "counts")) if isinstance(matrix, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(rows, list) or len(rows) != len(names):
        raise damaged
    if not all(isinstance(row, list) and len(row) == len(rows) and all(map(is_usable_number, row)) for row in rows):
        raise damaged
    kept = (*sorted(CURVES), "confusion", "km", "risk_calibration")
    return {name: curves[name] for name in kept if name in curves}


def is_curve(entry: Any, ways: Sequence[str]) -> bool:
    """Return whether an entry of ``curves.json`` has lists of numbers of the same length.

    Args:
        entry: Entry of the file.
        ways: Names of the lists.
    """
    points = [entry.get(way) for way in ways] if isinstance(entry, dict) else [None]
    lists = [point for point in points if isinstance(point, list) and len(point) <= MOST_POINTS]
    if len(lists) < len(points):
        return False
    return len({len(point) for point in lists}) == 1 and all(
        is_usable_number(value) for point in lists for value in point
    )
