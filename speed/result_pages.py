"""Generator of tables and numbers in documents, and of ``results/INDEX.md``: ``python -m speed.result_pages``.

Run it in the repository; it reads the stored outcomes. The text between two marks of a page is replaced, and the text around
them is written by hand. The first mark is one of these, and the second one ``<!-- end -->``.

Papers, generation and advice::

    <!-- table: PRESET SCALE -->                tables of a preset
    <!-- generation -->                         table of the costs of generation
    <!-- score: VIEW NAME -->                   score of the advice, from its evidence

Benchmarks (``speed.benchmark_marks``)::

    <!-- gains: SUITE VIEW METHOD METHOD -->         table of the gains of methods over the federations; with OTHER: in
                                                     front of the methods, also on how many federations each is above OTHER
    <!-- differences: SUITE VIEW METHOD METHOD -->   table of the differences of methods on each federation of a suite
    <!-- decided: SUITE KIND -->                     number of decided differences of global models
    <!-- above: SUITE KIND VIEW METHOD -->           on how many federations a method is above the baseline
    <!-- tuning: SUITE KIND VIEW -->                 on how many federations tuning the baseline gains
    <!-- budgets: SUITE -->                          effect of larger budgets of tuning
    <!-- difference: SUITE VIEW FEDERATION METHOD -->  difference of a method on a federation; after it OTHER: to that method
    <!-- interval: SUITE VIEW FEDERATION METHOD -->  its interval
    <!-- mean: SUITE VIEW FEDERATION METHOD -->      mean and standard deviation of a method

The name of a mark is that of a method, which gets its words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from speed.benchmark_marks import BenchmarkMarks
from unskew.filesystem import write_atomic
from unskew.reproduction.outcomes import EARLIER, StoredOutcome, experiment_hash, identity_hash, stored_outcomes
from unskew.reproduction.preset import load_preset, preset_names
from unskew.reproduction.settings import settings_note
from unskew.reproduction.study import Line, StudyRuns, load_study, study_names
from unskew.reproduction.sweep import Sweep
from unskew.reproduction.tables import footnotes, markdown, table_entries, table_lines

TABLE = re.compile(r"<!-- table: (\S+) (\w+) -->\n")
Rows = dict[tuple[str, str], dict[int, str]]
"""Identity hashes of a table's outcomes by column and row, and then by seed."""


class Pages:
    """Pages generated from the outcomes in a repository.

    Args:
        root: Root folder of the repository.
    """

    def __init__(self, root: Path):
        self.results, self.runs = root / "results", root / "results" / "runs"
        self.evidence = root / "unskew" / "diagnosis" / "evidence.json"
        own = (self.table, self.generation, self.score)
        self.marks = {mark.__name__: mark for mark in own} | BenchmarkMarks(self.results / "benchmark").by_name()
        self.pattern = re.compile(
            rf"(<!-- ({'|'.join(self.marks)})(?:: ([^>]+?))? -->)(?:(?!<!--).)*(<!-- end -->)", re.S
        )
        self.paths = [*sorted((root / "docs" / "results").glob("*.md")), *(root / "docs").glob("advice.md")]
        stored = stored_outcomes(self.runs)
        self.outcomes = {key: outcome for key, outcome in stored.items() if not key.startswith(EARLIER)}
        self.seeds = sorted({stored.outcome["run"]["seed"] for stored in self.outcomes.values()})

    def stale(self) -> dict[Path, str]:
        """Return the files that do not match the outcomes, with their correct content."""
        texts = {path: self.filled(path.read_text(encoding="utf-8")) for path in self.paths}
        texts[self.results / "INDEX.md"] = self.index()
        return {p: text for p, text in texts.items() if not p.is_file() or p.read_text(encoding="utf-8") != text}

    def filled(self, page: str) -> str:
        """Return the page with all tables regenerated; of two first marks in a row, the first one is left alone."""
        return self.pattern.sub(lambda mark: f"{mark[1]}{self.marks[mark[2]](*(mark[3] or '').split())}{mark[4]}", page)

    @cached_property
    def _scores(self) -> dict[str, dict[str, float]]:
        scores: dict[str, dict[str, float]] = json.loads(self.evidence.read_text(encoding="utf-8"))["scores"]
        return scores

    def score(self, view: str, name: str) -> str:
        """Return a score of the advice: a number of federations, or a share of them in percent.

        Args:
            view: ``global`` or ``clients``.
            name: Name of the score in the evidence.
        """
        value = self._scores[view][name]
        return f"{value:.0f}" if name == "federations" else f"{100 * value:.0f} %"

    def table(self, name: str, scale: str) -> str:
        """Return the tables of a preset.

        Args:
            name: Name of the preset.
            scale: Scale of the preset.
        """
        if name in study_names():
            study = StudyRuns(load_study(name), scale, self.runs)
            by_part = study.found(self.seeds)  # may switch to the settings without the data
            return _as_text(study.study.lines(by_part), study.note())
        preset = load_preset(name)
        outcomes = list(self._sweep(name, scale).found(self.seeds))
        note = settings_note(preset, scale, (cell for cell, _ in outcomes))
        return _as_text(
            table_lines(preset, table_entries(preset, outcomes), whole=bool(outcomes)),
            note,
            footnotes(outcomes),
        )

    def _sweep(self, name: str, scale: str) -> Sweep:
        return Sweep(load_preset(name), scale, Path("runs"), self.runs, {})

    def generation(self) -> str:
        """Return the table of generation costs relative to training."""
        measured = json.loads((self.results / "generation-cpu.json").read_text(encoding="utf-8"))
        machine, training, paper = (measured[name] for name in ("machine", "training", "paper_training"))
        header = ["N", "one client, s", "of its training", "four at once (`vectorized`), s each", "paper, s"]
        body = [
            [
                str(row["n"]),
                f"{row['inline']:.2f}",
                f"{row['inline'] / training:.1%}",
                "" if row["vectorized"] is None else f"{row['vectorized']:.2f}",
                f"{row['paper']:.2f}",
                f"{row['paper'] / paper:.1%}",
            ]
            for row in measured["rows"]
        ]
        text = (
            f"One thread of {machine['cpu']} ({machine['cores']} cores), torch {machine['torch']}; "
            f"local training of {measured['steps']} steps of 64: {training:.1f} s (the paper's GPU: {paper} s)."
        )
        return f"\n\n{text}\n\n{markdown([*header, 'of its training'], body)}\n\n"

    def index(self) -> str:
        """Return the index of all tables and figures with their outcome files, by paper."""
        shown: dict[str, dict[str, Path | None]] = {}
        for path in self.paths:
            for block in TABLE.finditer(path.read_text(encoding="utf-8")):
                shown.setdefault(block[1], {})[block[2]] = path
        text = [
            "# Outcomes of the papers' tables and figures",
            "",
            "Written by `python -m speed.result_pages`. The numbers are links to the outcomes of these seeds. "
            "Tables share runs, so a line may stand in several. "
            "`unskew reproduce PRESET --scale SCALE --show` prints a table from its outcomes.",
        ]
        papers, listed = dict[str, list[str]](), set[str]()
        for name in [*preset_names(), *study_names()]:
            preset = load_study(name) if name in study_names() else load_preset(name)
            for scale, page in shown.get(name, {"cpu": None}).items():
                rows, note = self._rows_of_study(name, scale) if name in study_names() else self._rows(name, scale)
                if not rows:
                    continue
                where = "" if page is None else f", shown in [{page.stem}](../docs/results/{page.name})"
                section = papers.setdefault(preset.reference, [])
                section += ["", f"### {preset.where}: {preset.title}", "", f"`{name}`, scale `{scale}`{where}", ""]
                section += [*([note, ""] if note else []), self._links(rows)]
                listed.update(key for by_seed in rows.values() for key in by_seed.values())
        for reference, section in papers.items():
            text += ["", f"## {reference}", *section]
        rest = [stored for key, stored in self.outcomes.items() if key not in listed]
        if rest:
            text += ["", "## In no table", "", *(f"- {self._link(_run_title(stored), stored)}" for stored in rest)]
        return "\n".join(text) + "\n"

    def _rows(self, name: str, scale: str) -> tuple[Rows, str]:
        """Return a table's outcomes and the note on its settings."""
        rows: Rows = {}
        outcomes = list(self._sweep(name, scale).found(self.seeds))
        for cell, outcome in outcomes:
            seed = cell.config.seed
            rows.setdefault((cell.column, cell.row), {})[seed] = identity_hash(outcome["run"])
            if cell.parent is not None and (common := experiment_hash(cell.parent)) in self.outcomes:
                rows.setdefault((cell.column, f"{cell.row}: common rounds"), {})[seed] = common
        return rows, settings_note(load_preset(name), scale, (cell for cell, _ in outcomes))

    def _rows_of_study(self, name: str, scale: str) -> tuple[Rows, str]:
        study = StudyRuns(load_study(name), scale, self.runs)
        by_part = study.found(self.seeds)
        rows = {
            ("", part): {s: identity_hash(o["run"]) for s, o in by_seed.items()} for part, by_seed in by_part.items()
        }
        return rows, study.note()

    def _links(self, rows: Rows) -> str:
        body = [
            [column, row, " ".join(self._link(str(seed), self.outcomes[key]) for seed, key in by_seed.items())]
            for (column, row), by_seed in rows.items()
        ]
        return markdown(["column", "row", "seeds"], body)

    def _link(self, text: str, stored: StoredOutcome) -> str:
        return f"[{text}](runs/{stored.path.relative_to(self.runs).as_posix()}#L{stored.line})"


def _run_title(stored: StoredOutcome) -> str:
    run = stored.outcome["run"]
    return f"{run['data']}, {run['method']}, {run.get('partition', 'default partition')}, seed {run['seed']}"


def _as_text(tables: list[Line], settings: str, notes: Sequence[str] = ()) -> str:
    """Return tables as markdown, after a note on their settings and before the explanation of marks."""
    if not tables:
        return "\n*No run of this table has been made yet.*\n"
    text = [f"*{settings}*", ""] if settings else []
    for title, header, body in tables:
        text += [f"**{title}**", "", markdown(header, body), ""]
    for note in notes:
        text += [note, ""]
    return "\n\n" + "\n".join(text)


def main() -> None:
    """Regenerate the pages of the repository in the current folder."""
    for path, text in Pages(Path()).stale().items():
        write_atomic(path, text.encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
