"""Write the tables of ``docs/results/`` from the outcomes in ``results/runs``: ``python -m benchmarks.results``.

A page says where a table stands with ``<!-- table: PRESET SCALE -->`` ... ``<!-- end -->``; What lies
between is replaced; the sentences around it are written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.generation import PAPER_TRAINING
from unskew.reproduction.preset import load_preset
from unskew.reproduction.report import entries, lines, markdown
from unskew.reproduction.study import StudyRuns, load_study, study_names
from unskew.reproduction.sweep import Sweep

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- table: (\S+) (\w+) -->\n).*?(<!-- end -->)", re.S)
GENERATION = re.compile(r"(<!-- generation -->\n).*?(<!-- end -->)", re.S)
MOST_SEEDS = 20


def tables(preset: str, scale: str) -> str:
    """The tables of a preset from the outcomes that are kept."""
    if preset in study_names():
        runs = StudyRuns(load_study(preset), scale, ROOT / "results" / "runs")
        known = runs.found(range(MOST_SEEDS))  # may turn to the study of other data
        return _as_text(runs.study.lines(known))
    chosen = load_preset(preset)
    sweep = Sweep(chosen, scale, ROOT / "runs", ROOT / "results" / "runs", {})
    found = list(sweep.found(range(MOST_SEEDS)))
    return _as_text(lines(chosen, entries(chosen, found)) if found else [])


def _as_text(known: list[tuple[str, list[str], list[list[str]]]]) -> str:
    """Tables as markdown."""
    if not known:
        return "*No run of this table has been made yet.*\n"
    text = []
    for title, header, body in known:
        text += [f"**{title}**", "", markdown(header, body), ""]
    return "\n" + "\n".join(text)


def generation() -> str:
    """What generation costs beside training."""
    found = json.loads((ROOT / "results" / "generation-cpu.json").read_text())
    m, training = found["machine"], found["training"]
    header = [
        "N",
        "one client, s",
        "of its training",
        "four at once (`vectorized`), s each",
        "paper, s",
        "of its training",
    ]
    body = [
        [
            str(r["n"]),
            f"{r['inline']:.2f}",
            f"{r['inline'] / training:.1%}",
            "" if r["vectorized"] is None else f"{r['vectorized']:.2f}",
            f"{r['paper']:.2f}",
            f"{r['paper'] / PAPER_TRAINING:.1%}",
        ]
        for r in found["rows"]
    ]
    where = (
        f"One thread of {m['cpu']} ({m['cores']} cores), torch {m['torch']}; local training of {found['steps']} steps"
    )
    return f"\n{where} of 64: {training:.1f} s (the paper's GPU: {PAPER_TRAINING} s).\n\n{markdown(header, body)}\n\n"


def filled(page: str) -> str:
    """The page with every table renewed."""

    page = BLOCK.sub(lambda match: f"{match[1]}{tables(match[2], match[3])}{match[4]}", page)
    return GENERATION.sub(lambda match: f"{match[1]}{generation()}{match[2]}", page)


def main() -> None:
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if before != after:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
