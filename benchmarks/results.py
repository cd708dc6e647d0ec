"""Write the tables of ``docs/results/`` from the outcomes in ``results/runs``: ``python -m benchmarks.results``.

A page says where a table stands with ``<!-- table: PRESET SCALE -->`` ... ``<!-- end -->``; ``[rows a; b]`` after the scale
chooses rows. What lies between is replaced; the sentences around it are written by hand. ``--check`` only tells whether a
page is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from unskew.reproduction.preset import load_preset
from unskew.reproduction.report import entries, lines, markdown
from unskew.reproduction.sweep import Sweep

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(<!-- table: (?P<preset>\S+) (?P<scale>\w+)(?: \[rows (?P<rows>[^\]]+)\])? -->\n).*?(<!-- end -->)", re.S
)
GENERATION = re.compile(r"(<!-- generation -->\n).*?(<!-- end -->)", re.S)
MOST_SEEDS = 20


def tables(preset: str, scale: str, rows: list[str] | None = None) -> str:
    """The tables of a preset from the outcomes that are kept."""
    chosen = load_preset(preset)
    sweep = Sweep(chosen, scale, ROOT / "runs", ROOT / "results" / "runs", {}, rows)
    found = list(sweep.found(range(MOST_SEEDS)))
    if not found:
        return "*No run of this table has been made yet.*\n"
    text = []
    for title, header, body in lines(chosen, entries(chosen, found)):
        text += [f"**{title}**", "", markdown(header, body), ""]
    return "\n" + "\n".join(text)


def generation() -> str:
    """What generation costs beside training."""
    found = json.loads((ROOT / "results" / "generation-cpu.json").read_text())
    m, training = found["machine"], found["training"]
    from benchmarks.generation import PAPER_TRAINING

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

    def table(match: re.Match[str]) -> str:
        rows = [r.strip() for r in match["rows"].split(";")] if match["rows"] else None
        return f"{match[1]}{tables(match['preset'], match['scale'], rows)}{match[5]}"

    page = BLOCK.sub(table, page)
    return GENERATION.sub(lambda match: f"{match[1]}{generation()}{match[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    args = parser.parse_args()
    stale = []
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if before != after:
            stale.append(page.name)
            if not args.check:
                page.write_text(after, encoding="utf-8")
                print(f"wrote {page}")
    if stale and args.check:
        sys.exit(f"Out of date: {', '.join(stale)}; run python -m benchmarks.results.")


if __name__ == "__main__":
    main()
