"""Methods of a report, environment of its runs, and commands to repeat them."""

from __future__ import annotations

import base64
import inspect
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.comparison.compare import weighting_mismatch_note
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS, REFERENCES, check_expression, rule_class, rule_slots
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import RunFiles, is_usable_number
from unskew.reporting.tables import Cell, Table

PICTURES, LARGEST = 4, 200_000
"""Pictures of a method that are shown at most, and bytes of one."""
OWN = "This method is not of unskew's catalogue; its code is not read for a report."


@dataclass(frozen=True)
class MethodFacts:
    """One method of a sum: its name, what it fills and does, its paper, and the head of its file with its formula."""

    name: str
    slots: str
    summary: str
    paper: str
    text: str


def method_facts(spelling: str) -> list[MethodFacts]:
    """The methods of a sum. Only those of the catalogue are looked up: another one's name would run its code."""
    try:
        pieces = check_expression(spelling)
    except ConfigError:  # a method that only Python knows
        return [MethodFacts(spelling, "", OWN, "", "")]
    found = []
    for piece in pieces:
        name = piece.partition(":")[0].strip()
        known = name.lower() if "." not in name else name
        if known not in METHODS and known not in REFERENCES:
            found.append(MethodFacts(name, "", OWN, "", ""))
            continue
        kind = rule_class(known)
        text = inspect.getdoc(sys.modules[kind.__module__]) or ""
        found.append(MethodFacts(known, ", ".join(rule_slots(kind)), kind.summary, kind.paper, text))
    return found


def docstring_paragraphs(text: str) -> list[tuple[str, str]]:
    r"""A docstring as ``("text", ...)`` and ``("formula", ...)``, where a paragraph that ends with ``::`` leads to a formula.

    >>> docstring_paragraphs("With x::\n\n    a <- b\n\nMore.")
    [('text', 'With x:'), ('formula', 'a <- b'), ('text', 'More.')]
    """
    found = []
    for piece in re.split(r"\n\s*\n", text):
        lines = piece.split("\n")
        if lines[0].startswith("    "):
            found.append(("formula", "\n".join(line.removeprefix("    ") for line in lines)))
        else:
            found.append(("text", " ".join(piece.split()).replace("::", ":")))
    return found


def collect_warnings(part: RunGroup) -> list[tuple[str, str]]:
    """Collect the warnings of all runs, each once, with the runs it occurred in."""
    told: dict[str, list[str]] = {}
    for one in part.series:
        for run in one.runs:
            for text in run.warnings:
                told.setdefault(text, []).append(f"{one.label}, seed {run.summary['seed']}")
    found = [("; ".join(runs), text) for text, runs in told.items()]
    uneven = weighting_mismatch_note({one.label: one.runs[0].summary.get("client_weighting") for one in part.ranked})
    unequal = any(len({row["samples"] for row in run.clients}) > 1 for one in part.series for run in one.runs)
    return [("all runs", uneven), *found] if uneven and unequal else found


def versions_and_machines(runs: Sequence[RunFiles]) -> list[tuple[int, dict[str, Any]]]:
    """Versions and machines, each with the number of runs that were made with them."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for run in runs:
        about = {**run.about.get("versions", {}), **run.about.get("machine", {}), "engine": run.summary["engine"]}
        count, _ = found.get(str(about), (0, about))
        found[str(about)] = count + 1, about
    return list(found.values())


def repeat_commands(part: RunGroup) -> list[str]:
    """The commands that repeat the part: one comparison, or each of its runs where they are not of one."""
    series = part.ranked or part.series
    seeds = {tuple(run.summary["seed"] for run in one.runs) for one in series}
    runs = [run for one in series for run in one.runs]
    plain = all(one.label == one.method for one in series) and len(seeds) == 1
    if not plain or len(runs) == 1 or any(run.config.get("start_from") for run in runs):
        return [shlex.join(["unskew", "run", str(run.folder / "config.yaml")]) for run in runs]
    files, which = (
        [str(one.runs[0].folder / "config.yaml") for one in series],
        ["--seeds", ",".join(map(str, *seeds))],
    )
    if same_comparison(one.runs[0].config for one in series):
        words = ["unskew", "compare", *(one.method for one in series), *which, "--config", files[0]]
    else:  # each is a method with fields of its own, as after a tuning
        words = ["unskew", "compare", *files, *which]
    words += [] if len(series) < len(part.series) else ["--no-references"]
    return [shlex.join([*words, *([] if part.language else ["--target", f"{part.target:g}"])])]


def same_comparison(configs: Iterable[dict[str, Any]]) -> bool:
    """Return whether configurations differ only in what a comparison itself varies."""
    own = ("method", "seed", "synthetic")
    first, *others = ({name: value for name, value in config.items() if name not in own} for config in configs)
    return all(other == first for other in others)


def averaging_periods(one: MethodRuns) -> Table | None:
    """Return how often a method averaged each layer in the last round of its first run; None if it does not report it."""
    run = one.runs[0]
    found = run.history[-1].get("fedals_periods")
    if not isinstance(found, list) or not found or not all(map(is_usable_number, found)):
        return None
    steps = run.config.get("local_steps")
    counted = is_usable_number(steps)
    rows = [
        [
            Cell(str(layer), layer),
            Cell(f"{period:g}", period),
            *([Cell(f"{period * steps:g}", period * steps)] if counted else []),
        ]
        for layer, period in enumerate(found, 1)
    ]
    columns = ["layer", "averaged every, rounds", *(["averaged every, local steps"] * counted)]
    return Table(f"periods of {one.label}", f"How often {one.label} averages each layer", columns, rows, 0)


def sample_pictures(one: MethodRuns) -> list[tuple[str, str]]:
    """Pictures of what clients made with a method, of its first run that has some: a title and a data address."""
    for run in one.runs:
        places = [
            ("samples", run.folder / "samples"),
            *([("synthetic", place) for place in synthetic_folders(run)] if generates_data(one) else []),
        ]
        found = [
            (f"{what}, {path.stem}, seed {run.summary['seed']}", address)
            for what, place in places
            for path in sorted(place.glob("client-*.png"))[:PICTURES]
            if (address := _png(path)) is not None
        ]
        if found:
            return found[:PICTURES]
    return []


def generates_data(one: MethodRuns) -> bool:
    """Return whether clients generate data before training; a folder of generated data may belong to another run."""
    return "data" in {slot for fact in method_facts(one.method) for slot in fact.slots.split(", ")}


def synthetic_folders(run: RunFiles) -> list[Path]:
    """Folders with what clients made before training; a comparison keeps them beside its runs."""
    bases = [run.folder / "synthetic", run.folder.parent.parent / "synthetic"]
    named = Path(str(run.summary.get("synthetic", ""))).name.strip(".")
    return [place for base in bases for place in (base, *([base / named] if named else [])) if place.is_dir()]


def _png(path: Path) -> str | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) > LARGEST or not data.startswith(b"\x89PNG"):
        return None
    return "data:image/png;base64," + base64.b64encode(data).decode()
