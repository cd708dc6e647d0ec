"""Estimate the time of a round on many nodes, from a model of its parts with measured constants.

``python -m speed.scaling [--constants FILE]`` prints the tables, computed from the results of
``python -m speed.cluster`` in ``results/cluster-cpu.json`` or in ``FILE``.
``python -m speed.cluster --pages`` writes them to ``docs/results/scaling.md``.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "cluster-cpu.json"
NODES = (1, 2, 4, 10, 30, 100, 300, 1000)
MODELS = {"62k": 62_000, "11M": 11_000_000, "110M": 110_000_000}
CLIENTS = (10**4, 10**5, 10**6, 10**7)
COHORT, WORKERS, TRAINING = 1000, 16, 10.0
"""Assumptions of the tables: clients per round, workers per node, and training seconds per client."""


@dataclass(frozen=True)
class Constants:
    """Performance of a machine.

    Attributes:
        task: Seconds of the server's process per task: to send it, to wait for it, to receive its result.
        store: Bytes per second into or out of a node's object store.
        link: Bytes per second between two nodes.
        add: Bytes of updates per second that are summed.
        draw: Seconds per registered client to draw a cohort.
    """

    task: float = 0.35e-3
    store: float = 1.2e9
    link: float = 0.48e9
    add: float = 4e9
    draw: float = 50e-9


def parts(
    machine: Constants, nodes: int, parameters: int, cohort: int, workers: int, training: float, clients: int = 10**4
) -> dict[str, float]:
    """Return the seconds of each part of a round.

    Args:
        machine: Performance of a node.
        nodes: Number of nodes; one of them runs the server.
        parameters: Number of parameters of the model, four bytes each.
        cohort: Number of clients in the round.
        workers: Number of workers per node.
        training: Training seconds per client.
        clients: Number of registered clients.
    """
    size = 4.0 * parameters
    away = cohort * (nodes - 1) / nodes
    return {
        "drawing": clients * machine.draw,
        # Nodes that have the model forward it.
        "broadcast": size / machine.store + math.ceil(math.log2(nodes)) * size / machine.link,
        "training": math.ceil(cohort / (nodes * workers)) * training,
        "link": away * size / machine.link,
        "store": cohort * size / machine.store,
        "adding": cohort * size / machine.add,
        "tasks": cohort * machine.task,
    }


def seconds(of: dict[str, float]) -> float:
    """Return the seconds of a round; the server receives results while clients train, its link works in parallel."""
    server = of["store"] + of["adding"] + of["tasks"]
    return of["drawing"] + of["broadcast"] + max(of["training"], of["link"], server)


def limit(of: dict[str, float]) -> str:
    """Return the part that takes longest."""
    return max(of, key=lambda name: of[name])


def round_table(machine: Constants) -> list[str]:
    """Return the table of seconds per round and of the bottleneck, by nodes and model."""
    lines = ["| nodes | " + " | ".join(MODELS) + " |", "|---" * (len(MODELS) + 1) + "|"]
    for nodes in NODES:
        cases = [parts(machine, nodes, size, COHORT, WORKERS, TRAINING) for size in MODELS.values()]
        lines.append(f"| {nodes:,} | " + " | ".join(f"{seconds(one):,.1f} s, {limit(one)}" for one in cases) + " |")
    return lines


def client_table(machine: Constants) -> list[str]:
    """Return the table of the cost of registered clients, by their number."""
    lines = [
        "| clients | to draw a cohort | data partition | SCAFFOLD's variates of 11M parameters | nodes' files for them |",
        "|---|---|---|---|---|",
    ]
    for clients in CLIENTS:
        draw, partition_mb, variates_tb = clients * machine.draw, 16 * clients / 1e6, 4 * MODELS["11M"] * clients / 1e12
        lines.append(
            f"| {clients:,} | {draw:.4f} s | {partition_mb:,.2f} MB | {variates_tb:,.2f} TB | {clients // 1000:,} folders |"
        )
    return lines


def saturation(machine: Constants) -> list[str]:
    """Return the table of the number of nodes above which more nodes do not help, by model."""
    lines = ["| model | more nodes help up to | then the limit is | seconds of a round there |", "|---|---|---|---|"]
    for name, size in MODELS.items():
        best = min(NODES, key=lambda nodes: seconds(parts(machine, nodes, size, COHORT, WORKERS, TRAINING)))
        more = parts(machine, 2 * best, size, COHORT, WORKERS, TRAINING)
        shortest = seconds(parts(machine, best, size, COHORT, WORKERS, TRAINING))
        lines.append(f"| {name} | {best:,} | {limit(more)} | {shortest:,.1f} |")
    return lines


TABLES = {"rounds": round_table, "clients": client_table, "saturation": saturation}


def page_of(name: str) -> Path:
    """Return the path of a documentation page."""
    return ROOT / "docs" / "results" / f"{name}.md"


def constants_of(stored: dict[str, Any] | None) -> Constants:
    """Return the measured constants, with assumptions for the others."""
    measured = (stored or {}).get("constants", {})
    return Constants(**{one.name: measured[one.name] for one in fields(Constants) if one.name in measured})


def said(stored: dict[str, Any] | None) -> list[str]:
    """Return sentences on the origin of the constants."""
    of = constants_of(stored)
    text = (
        f"`task` {1000 * of.task:.2f} ms, `store` {of.store / 1e9:.2f} GB/s, `link` {of.link / 1e9:.2f} GB/s, `add` "
        f"{of.add / 1e9:.0f} GB/s, `draw` {1e9 * of.draw:.0f} ns. "
    )
    if stored and stored.get("constants"):
        text += "The first two are measured on one machine, as [below](speed.md#ray). `link` comes from a trial"
    else:
        text += "The first three come from a trial"
    return [
        f"{text} of Ray 2.60 between two nodes on one machine whose two cores were busy; the others are assumptions."
    ]


def scaling_tables(stored: dict[str, Any] | None) -> dict[str, list[str]]:
    """Return the tables of ``docs/results/scaling.md`` by their marks."""
    return {name: make(constants_of(stored)) for name, make in TABLES.items()} | {"constants": said(stored)}


def filled(text: str, tables: dict[str, list[str]]) -> str:
    """Return a page with its tables regenerated, each between its marks."""
    for name, lines in tables.items():
        start, rest = text.split(f"<!-- {name} -->\n\n", 1)
        text = (
            f"{start}<!-- {name} -->\n\n" + "\n".join(lines) + "\n\n<!-- end -->" + rest.split("\n\n<!-- end -->", 1)[1]
        )
    return text


def write_pages(stored: dict[str, Any] | None, pages: dict[Path, dict[str, list[str]]]) -> None:
    """Write the tables of pages, including those of ``docs/results/scaling.md``."""
    for page, tables in {**pages, page_of("scaling"): scaling_tables(stored)}.items():
        page.write_text(filled(page.read_text(), tables))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constants", type=Path, default=RESULTS)
    args = parser.parse_args()
    stored = json.loads(args.constants.read_text()) if args.constants.exists() else None
    print("\n\n".join("\n".join(lines) for lines in scaling_tables(stored).values()))


if __name__ == "__main__":
    main()
