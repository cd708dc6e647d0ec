"""Tables that compare methods, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from unskew.cli.tables import F1, megabytes, number, percent
from unskew.comparison.target import TargetCost

SHORT = 20  # letters of a method's spelling that are never folded


def language_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of ``unskew compare`` for language models: losses, lower is better."""
    seeds, target = rows[0]["seeds"], rows[0]["target"]
    spread = f"mean ± std over {seeds} seeds" if seeds > 1 else "1 seed"
    title = f"Test loss in nats per token (lower is better), {spread}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    method_column(table, (row["method"] for row in rows))
    heads = (
        "last round",
        "best round",
        "perplexity",
        "next token %",
        "clients, mean %",
        f"rounds to {percent(target)}%",
    )
    for name in (*heads, "MB up", "MB down", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        losses = [number(row.get(name), row.get(f"{name}_std")) for name in ("loss", "best_loss", "perplexity")]
        shares = [percent(row[name], row[f"{name}_std"]) for name in ("accuracy", "client_accuracy_mean")]
        traffic = [megabytes(row[name]) for name in ("bytes_up", "bytes_down")]
        table.add_row(row["method"], *losses, *shares, rounds_cell(row), *traffic, f"{row['seconds']:.1f}")
    return table


def rounds_cell(row: dict[str, Any]) -> str:
    """Rounds to the target, or how many seeds reached it."""
    reached = row["rounds_to_target"]
    return f"{reached:.1f}" if reached is not None else f"{row['seeds_reaching_target']} of {row['seeds']} seeds"


def method_column(table: Table, methods: Iterable[str]) -> None:
    """The column of the methods' spellings; long ones are folded, so that the figures keep their room."""
    table.add_column("method", overflow="fold", no_wrap=max(map(len, methods)) <= SHORT)


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table that ``unskew compare`` prints: one line per method, means over seeds."""
    if "perplexity" in rows[0]:
        return language_table(rows)
    seeds, target = rows[0]["seeds"], rows[0]["target"]
    spread = f"mean ± std over {seeds} seeds" if seeds > 1 else "1 seed"
    table = Table(title=f"Test accuracy in %, {spread}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    method_column(table, [row["method"] for row in rows])
    for name in ("last round", "best round", "clients, mean", "worst client", f"rounds to {percent(target)}%"):
        table.add_column(name, justify="right")
    several = rows[0].get("o_f1") is not None
    for name in (*(F1 if several else ()), "MB up", "MB down", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            percent(row["accuracy"], row["accuracy_std"]),
            percent(row["best_accuracy"], row["best_accuracy_std"]),
            percent(row["client_accuracy_mean"], row["client_accuracy_mean_std"]),
            percent(row["client_accuracy_worst"], row["client_accuracy_worst_std"]),
            rounds_cell(row),
            *(percent(row[name], row[f"{name}_std"]) for name in (F1.values() if several else ())),
            megabytes(row["bytes_up"]),
            megabytes(row["bytes_down"]),
            f"{row['seconds']:.1f}",
        )
    return table


def reaching_table(rows: Sequence[TargetCost], target: float) -> Table:
    """What a target accuracy costs, a line per method; ``>`` marks bounds, where the other one does not reach it."""
    title = f"Rounds and traffic to {percent(target)}% test accuracy"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    method_column(table, [row.method for row in rows])
    for name in ("rounds", "speed-up", "over", "MB, all clients", "saving over fedavg, %"):
        table.add_column(name, justify="left" if name == "over" else "right")
    for row in rows:
        faster = "-" if row.speed_up is None else f"{'>' if row.speed_up_at_least else ''}{row.speed_up:.1f}"
        saving = "-" if row.saving is None else f"{'>' if row.saving_at_least else ''}{100 * row.saving:.1f}"
        table.add_row(
            row.method,
            f">{row.limit}" if row.rounds is None else f"{row.rounds:.1f}",
            faster,
            row.against or "",
            "-" if row.bytes is None else megabytes(row.bytes),
            saving,
        )
    return table


def clients_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """The second table of ``unskew compare``: what clients get, if some method has personal models; else None."""
    if all(row["personal_accuracy_mean"] is None for row in rows):
        return None
    title = "Accuracy in % on the clients' own data, last round"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    method_column(table, [row["method"] for row in rows])
    table.add_column("model")
    for name in ("mean", "std over clients", "worst decile", "worst client"):
        table.add_column(name, justify="right")
    for row in rows:
        for label, whose in (("global", "client"), ("personal", "personal")):
            keys = [f"{whose}_accuracy_{name}" for name in ("mean", "std", "worst_decile", "worst")]
            if row[keys[0]] is not None:
                table.add_row(row["method"], label, *(percent(row[key], row[f"{key}_std"]) for key in keys))
    return table
