"""Tables that compare methods, for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from unskew.cli.wide import as_text, below
from unskew.comparison.target import TargetCost
from unskew.reporting.wording import F1, megabytes, method_title, metrics_in, number, percent
from unskew.tasks.score import SCORES, score_of

WORDS = ("model", "over")
"""Columns that hold words, not figures."""
COST = ("MB up", "MB down", "seconds")


def pieces(spelling: str) -> list[str]:
    """Where a method's spelling may be folded: behind ``+``, ``,`` and ``:``.

    >>> pieces("fedprox:mu=0.1+scaffold")
    ['fedprox:', 'mu=0.1+', 'scaffold']
    """
    return re.findall(r"[^+,:]*[+,:]|[^+,:]+", spelling)


class Spelling:
    """A method as it was written, in as few lines as there is room for; no word of it is broken."""

    def __init__(self, text: str):
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for piece in pieces(self.text):
            if lines[-1] and len(lines[-1] + piece) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(lines), no_wrap=True)


class ByMethod(Table):
    """A line per method: the figures come first to the room that there is, and spellings are folded into the rest."""

    def __init__(self, title: str, methods: Iterable[str], *columns: str):
        super().__init__(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        names = ["method", *methods]
        self.most, self.least = max(map(len, names)), max(len(piece) for name in names for piece in pieces(name))
        self.add_column("method")
        for name in columns:
            self.add_column(name, justify="left" if name in WORDS else "right")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.columns[0].width, self.padding = 0, (0, 1)
        figures = super().__rich_measure__(console, options.update(max_width=10_000)).maximum
        if figures + self.least > options.max_width:
            for column in self.columns[
                1:
            ]:  # a heading may be folded between its words, a figure and its spread may not
                cells = [as_text(cell, console).plain for cell in column.cells]
                column.width = max(map(len, [*cells, *str(column.header).split()]))
            self.padding = (0, 1, 0, 0)
            figures = super().__rich_measure__(console, options.update(max_width=10_000)).maximum
        self.columns[0].width = min(self.most, max(self.least, options.max_width - figures))
        if figures + self.least > options.max_width:
            yield from below(self, console)
        else:
            yield from super().__rich_console__(console, options)


def over_seeds(row: dict[str, Any]) -> str:
    """What the figures of a comparison are."""
    return f"mean ± std over {row['seeds']} seeds" if row["seeds"] > 1 else "1 seed"


def spread(row: dict[str, Any], name: str) -> float | None:
    """The standard deviation of a figure; of a single seed there is none."""
    return row.get(f"{name}_std") if row["seeds"] > 1 else None


def language_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of ``unskew compare`` for language models: losses, lower is better."""
    title = f"Test loss in nats per token (lower is better), {over_seeds(rows[0])}"
    rounds = f"rounds to {percent(rows[0]['target'])}%"
    figures = ("last round", "best round", "perplexity", "next token %", "clients, mean %", rounds)
    table = ByMethod(title, map(method_title, rows), *figures, *COST)
    for row in rows:
        losses = [number(row.get(name), spread(row, name)) for name in ("loss", "best_loss", "perplexity")]
        shares = [percent(row[name], spread(row, name)) for name in ("accuracy", "client_accuracy_mean")]
        traffic = [megabytes(row[name]) for name in ("bytes_up", "bytes_down")]
        table.add_row(
            Spelling(method_title(row)), *losses, *shares, rounds_cell(row), *traffic, f"{row['seconds']:.1f}"
        )
    return table


def rounds_cell(row: dict[str, Any]) -> str:
    """Rounds to the target, or how many seeds reached it."""
    reached = row["rounds_to_target"]
    return f"{reached:.1f}" if reached is not None else f"{row['seeds_reaching_target']} of {row['seeds']} seeds"


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table that ``unskew compare`` prints: one line per method, means over seeds."""
    if "perplexity" in rows[0]:
        return language_table(rows)
    several = F1 if rows[0].get("o_f1") is not None else {}
    errors = [name for name in ("mae", "rmse") if name in rows[0]]
    rounds = f"rounds to {percent(rows[0]['target'])}%"
    figures = ("last round", "best round", "clients, mean", "worst client", rounds, *errors, *several)
    scored = score_of(rows[0])
    title = f"Test {SCORES[scored]} in %, {over_seeds(rows[0])}"
    table = ByMethod(title, map(method_title, rows), *figures, *COST)
    for row in rows:
        table.add_row(
            Spelling(method_title(row)),
            *(
                percent(row[name], spread(row, name))
                for name in (scored, f"best_{scored}", f"client_{scored}_mean", f"client_{scored}_worst")
            ),
            rounds_cell(row),
            *(number(row.get(name), spread(row, name)) for name in errors),
            *(percent(row[name], spread(row, name)) for name in several.values()),
            megabytes(row["bytes_up"]),
            megabytes(row["bytes_down"]),
            f"{row['seconds']:.1f}",
        )
    return table


def reaching_table(rows: Sequence[TargetCost], target: float, scored: str = "accuracy") -> Table:
    """What a target accuracy costs, a line per method; ``>`` marks bounds, where the other one does not reach it."""
    title = f"Rounds and traffic to {percent(target)}% test {SCORES[scored]}"
    figures = ("rounds", "speed-up", "over", "MB, all clients", "saving over fedavg, %")
    table = ByMethod(title, (row.method for row in rows), *figures)
    for row in rows:
        faster = "-" if row.speed_up is None else f"{'>' if row.speed_up_at_least else ''}{row.speed_up:.1f}"
        saving = "-" if row.saving is None else f"{'>' if row.saving_at_least else ''}{100 * row.saving:.1f}"
        table.add_row(
            Spelling(row.method),
            f">{row.limit}" if row.rounds is None else f"{row.rounds:.1f}",
            faster,
            row.against or "",
            "-" if row.bytes is None else megabytes(row.bytes),
            saving,
        )
    return table


def metrics_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """The table of ``unskew compare`` for the ``metrics`` that were asked for; None without any."""
    asked = metrics_in(rows[0])
    if not asked:
        return None
    title = f"Test set in %, last round, {over_seeds(rows[0])}"
    table = ByMethod(title, map(method_title, rows), *asked.values())
    for row in rows:
        table.add_row(Spelling(method_title(row)), *(percent(row.get(name), spread(row, name)) for name in asked))
    return table


def clients_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """The second table of ``unskew compare``: what clients get, if some method has personal models; else None."""
    scored = score_of(rows[0])
    if all(row[f"personal_{scored}_mean"] is None for row in rows):
        return None
    title = f"{SCORES[scored].capitalize()} in % on the clients' own data, last round"
    figures = ("model", "mean", "std over clients", "worst decile", "worst client")
    table = ByMethod(title, map(method_title, rows), *figures)
    for row in rows:
        for label, whose in (("global", "client"), ("personal", "personal")):
            keys = [f"{whose}_{scored}_{name}" for name in ("mean", "std", "worst_decile", "worst")]
            if row[keys[0]] is not None:
                table.add_row(
                    Spelling(method_title(row)), label, *(percent(row[key], spread(row, key)) for key in keys)
                )
    return table
