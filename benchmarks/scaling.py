"""How long a round takes on many nodes, on paper: a model of its parts from constants that were measured.

``python -m benchmarks.scaling [--constants FILE] [--write]``

``FILE`` is what ``python -m benchmarks.cluster --json FILE`` keeps. ``--write`` puts the tables into ``docs/scaling.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
NODES = (1, 2, 4, 10, 30, 100, 300, 1000)
MODELS = {"62k": 62_000, "11M": 11_000_000, "110M": 110_000_000}
CLIENTS = (10**4, 10**5, 10**6, 10**7)
COHORT, WORKERS, TRAINING = 1000, 16, 10.0
"""Of the tables: clients in a round, workers of a node, seconds of a client's training."""


@dataclass(frozen=True)
class Constants:
    """What a machine can do.

    Attributes:
        task: Seconds of the server's process for a task: to send it, to wait for it, to take it in.
        store: Bytes a second into or out of a node's object store.
        link: Bytes a second between two nodes.
        add: Bytes of updates a second that are added up.
        draw: Seconds for each registered client to draw a cohort.
    """

    task: float = 0.35e-3
    store: float = 1.2e9
    link: float = 0.48e9
    add: float = 4e9
    draw: float = 50e-9


def parts(
    machine: Constants, nodes: int, parameters: int, cohort: int, workers: int, training: float, clients: int = 10**4
) -> dict[str, float]:
    """Seconds of each part of a round.

    Args:
        machine: What a node can do.
        nodes: How many; the server is on one of them.
        parameters: Of the model, four bytes each.
        cohort: Clients in the round.
        workers: Of a node.
        training: Seconds of a client's training.
        clients: Registered ones.
    """
    size = 4.0 * parameters
    away = cohort * (nodes - 1) / nodes
    return {
        "drawing": clients * machine.draw,
        # Nodes that have the model pass it on.
        "broadcast": size / machine.store + math.ceil(math.log2(nodes)) * size / machine.link,
        "training": math.ceil(cohort / (nodes * workers)) * training,
        "link": away * size / machine.link,
        "store": cohort * size / machine.store,
        "adding": cohort * size / machine.add,
        "tasks": cohort * machine.task,
    }


def seconds(of: dict[str, float]) -> float:
    """Of a round: while clients train, the server takes in those that are done; its link works beside its process."""
    server = of["store"] + of["adding"] + of["tasks"]
    return of["drawing"] + of["broadcast"] + max(of["training"], of["link"], server)


def limit(of: dict[str, float]) -> str:
    """The part that takes longest."""
    return max(of, key=lambda name: of[name])


def round_table(machine: Constants) -> list[str]:
    """Seconds of a round and what limits it, by nodes and model."""
    lines = ["| nodes | " + " | ".join(MODELS) + " |", "|---" * (len(MODELS) + 1) + "|"]
    for nodes in NODES:
        cases = [parts(machine, nodes, size, COHORT, WORKERS, TRAINING) for size in MODELS.values()]
        lines.append(f"| {nodes:,} | " + " | ".join(f"{seconds(one):,.1f} s, {limit(one)}" for one in cases) + " |")
    return lines


def client_table(machine: Constants) -> list[str]:
    """What registered clients cost, by their number."""
    lines = [
        "| clients | to draw a cohort | who holds what | SCAFFOLD's variates of 11M parameters | nodes' files for them |",
        "|---|---|---|---|---|",
    ]
    for clients in CLIENTS:
        draw, held, kept = clients * machine.draw, 16 * clients / 1e6, 4 * MODELS["11M"] * clients / 1e12
        lines.append(f"| {clients:,} | {draw:.4f} s | {held:,.2f} MB | {kept:,.2f} TB | {clients // 1000:,} folders |")
    return lines


def saturation(machine: Constants) -> list[str]:
    """From how many nodes on more of them do not help, by model."""
    lines = ["| model | more nodes help up to | then the limit is | seconds of a round there |", "|---|---|---|---|"]
    for name, size in MODELS.items():
        best = min(NODES, key=lambda nodes: seconds(parts(machine, nodes, size, COHORT, WORKERS, TRAINING)))
        more = parts(machine, 2 * best, size, COHORT, WORKERS, TRAINING)
        there = seconds(parts(machine, best, size, COHORT, WORKERS, TRAINING))
        lines.append(f"| {name} | {best:,} | {limit(more)} | {there:,.1f} |")
    return lines


TABLES = {"rounds": round_table, "clients": client_table, "saturation": saturation}


def filled(text: str, machine: Constants) -> str:
    """The page with its tables made anew, each between its marks."""
    for name, make in TABLES.items():
        body = "\n".join(make(machine))
        text = re.sub(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{body}\g<2>", text, flags=re.S)
    return text


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constants", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    told = json.loads(args.constants.read_text())["constants"] if args.constants else {}
    machine = Constants(**{one.name: told[one.name] for one in fields(Constants) if one.name in told})
    if args.write:
        PAGE.write_text(filled(PAGE.read_text(), machine))
    else:
        print("\n\n".join("\n".join(make(machine)) for make in TABLES.values()))


if __name__ == "__main__":
    main()
