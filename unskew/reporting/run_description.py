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

from unskew.comparison.comparison_result import weighting_notes
from unskew.comparison.summary_statistics import is_usable_number
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS, REFERENCES, check_expression, rule_class
from unskew.privacy.composition import composition_note
from unskew.records.recorder import privacy_sentences
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import RunFiles
from unskew.reporting.tables import Cell, Table

PICTURES, LARGEST = 4, 200_000
"""Maximum number of images shown per method, and maximum bytes of one image."""
OWN = "This method is not part of unskew's registry, and reports do not read its code."


@dataclass(frozen=True)
class MethodDetails:
    """Description of one method of a composition: name, slots, summary, paper, and the docstring of its module."""

    name: str
    slots: str
    summary: str
    paper: str
    text: str


def method_details(spelling: str) -> list[MethodDetails]:
    """Return the methods of a composition; only registered methods are looked up, because others would execute code."""
    try:
        parts = check_expression(spelling)
    except ConfigError:  # a method defined in Python
        return [MethodDetails(spelling, "", OWN, "", "")]
    from unskew.protocol.method import class_slots

    details = []
    for part in parts:
        name = part.partition(":")[0].strip()
        known = name.lower() if "." not in name else name
        if known not in METHODS and known not in REFERENCES:
            details.append(MethodDetails(name, "", OWN, "", ""))
            continue
        kind = rule_class(known)
        text = inspect.getdoc(sys.modules[kind.__module__]) or ""
        details.append(MethodDetails(known, ", ".join(class_slots(kind)), kind.summary, kind.paper, text))
    return details


def docstring_paragraphs(text: str) -> list[tuple[str, str]]:
    r"""Split a docstring into ``("text", ...)`` and ``("formula", ...)``; a formula follows a paragraph ending in ``::``.

    >>> docstring_paragraphs("With x::\n\n    a <- b\n\nMore.")
    [('text', 'With x:'), ('formula', 'a <- b'), ('text', 'More.')]
    """
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        if lines[0].startswith("    "):
            paragraphs.append(("formula", "\n".join(line.removeprefix("    ") for line in lines)))
        else:
            paragraphs.append(("text", " ".join(paragraph.split()).replace("::", ":")))
    return paragraphs


def collect_warnings(part: RunGroup) -> list[tuple[str, str]]:
    """Collect warnings, guarantees and attackers of all runs, each once, with the runs in which it occurred."""
    messages: dict[str, list[str]] = {}
    for method_runs in part.series:
        for run in method_runs.runs:
            for text in [*run.warnings, *trust_notes(run)]:
                messages.setdefault(text, []).append(f"{method_runs.label}, seed {run.summary['seed']}")
    entries = [("; ".join(runs), text) for text, runs in messages.items()]
    together = composition_note(run.summary for run in part.runs)
    of_all = [*weighting_notes(part.comparison), *([] if together is None else [together])]
    return [*(("all runs", text) for text in of_all), *entries]


def trust_notes(run: RunFiles) -> list[str]:
    """Return sentences on the privacy guarantee and the attackers of a run."""
    notes = [f"Privacy: {sentence}" for sentence in privacy_sentences(run.summary)]
    attackers, attack = run.summary.get("attackers"), run.config.get("attack")
    if isinstance(attackers, list) and isinstance(attack, dict):
        shown = ", ".join(str(client) for client in attackers[:20]) + (" and others" if len(attackers) > 20 else "")
        notes.append(f"Attack: {attack.get('kind')} by clients {shown}.")
    return notes


def versions_and_machines(runs: Sequence[RunFiles]) -> list[tuple[int, dict[str, Any]]]:
    """Return versions and machines, each with the number of its runs."""
    machines: dict[str, tuple[int, dict[str, Any]]] = {}
    for run in runs:
        about = {**run.about.get("versions", {}), **run.about.get("machine", {}), "engine": run.summary["engine"]}
        count, _ = machines.get(str(about), (0, about))
        machines[str(about)] = count + 1, about
    return list(machines.values())


def repeat_commands(part: RunGroup) -> list[str]:
    """Return commands that repeat the group: one comparison, or each of its runs if they do not form one."""
    series = part.ranked or part.series
    seeds = {tuple(run.summary["seed"] for run in method_runs.runs) for method_runs in series}
    runs = [run for method_runs in series for run in method_runs.runs]
    plain = all(method_runs.label == method_runs.method for method_runs in series) and len(seeds) == 1
    if not plain or len(runs) == 1 or any(run.config.get("start_from") for run in runs):
        return [shlex.join(["unskew", "run", str(run.folder / "config.yaml")]) for run in runs]
    files = [str(method_runs.runs[0].folder / "config.yaml") for method_runs in series]
    which = ["--seeds", ",".join(map(str, *seeds))]
    if same_comparison(method_runs.runs[0].config for method_runs in series):
        words = ["unskew", "compare", *(method_runs.method for method_runs in series), *which, "--config", files[0]]
    else:  # each method has its own fields, as after tuning
        words = ["unskew", "compare", *files, *which]
    words += [] if len(series) < len(part.series) else ["--no-references"]
    short = f"{part.target:g}"
    return [shlex.join([*words, "--target", short if float(short) == part.target else repr(part.target)])]


def same_comparison(configs: Iterable[dict[str, Any]]) -> bool:
    """Return whether configurations differ only in fields that a comparison varies."""
    own = ("method", "seed", "synthetic")
    first, *others = ({name: value for name, value in config.items() if name not in own} for config in configs)
    return all(other == first for other in others)


def averaging_periods(one: MethodRuns) -> Table | None:
    """Return how often a method averaged each layer in its first run's last round; None if not reported."""
    run = one.runs[0]
    periods = run.history[-1].get("fedals_periods")
    if not isinstance(periods, list) or not periods or not all(map(is_usable_number, periods)):
        return None
    steps = run.config.get("local_steps")
    factors = [1, *([steps] if is_usable_number(steps) else [])]
    rows = [
        [Cell(str(layer), layer), *(Cell(f"{period * factor:g}", period * factor) for factor in factors)]
        for layer, period in enumerate(periods, 1)
    ]
    columns = ["layer", "averaged every, rounds", "averaged every, local steps"][: 1 + len(factors)]
    return Table(f"periods of {one.label}", f"How often {one.label} averages each layer", columns, rows, 0)


def sample_pictures(one: MethodRuns) -> list[tuple[str, str]]:
    """Return images that clients generated in the first run that has some: titles and data URIs."""
    for run in one.runs:
        folders = [
            ("samples", run.folder / "samples"),
            *([("synthetic", folder) for folder in synthetic_folders(run)] if generates_data(one) else []),
        ]
        pictures = [
            (f"{what}, {path.stem}, seed {run.summary['seed']}", address)
            for what, folder in folders
            for path in sorted(folder.glob("client-*.png"))[:PICTURES]
            if (address := _png(path)) is not None
        ]
        if pictures:
            return pictures[:PICTURES]
    return []


def generates_data(one: MethodRuns) -> bool:
    """Return whether clients generate data before training; a folder of generated data may belong to another run."""
    return "data" in {slot for fact in method_details(one.method) for slot in fact.slots.split(", ")}


def synthetic_folders(run: RunFiles) -> list[Path]:
    """Return the folders of data generated before training; a comparison stores them next to its runs."""
    bases = [run.folder / "synthetic", run.folder.parent.parent / "synthetic"]
    named = Path(str(run.summary.get("synthetic", ""))).name.strip(".")
    return [folder for base in bases for folder in (base, *([base / named] if named else [])) if folder.is_dir()]


def _png(path: Path) -> str | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) > LARGEST or not data.startswith(b"\x89PNG"):
        return None
    return "data:image/png;base64," + base64.b64encode(data).decode()
