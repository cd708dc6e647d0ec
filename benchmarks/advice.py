"""Evaluate the advice of ``unskew diagnose``: ``python -m benchmarks.advice [--only NAME] [--data-path CIFAR10]``.

On federations of different skew, each with two seeds, all considered methods are trained: FedAvg, a list that is the
same everywhere, and the three suggested ones. The score is the mean test accuracy of the last five rounds. Finished
runs are kept in ``results/advice.json`` and not repeated. The advice is kept too, by the version of its rules, so if
rules change, both versions stay. The tables are written to ``docs/advice.md``; ``--show`` only writes them and runs
nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import unskew
from unskew.diagnosis.advice_rules import VERSION
from unskew.filesystem import file_lock, write_atomic

KEPT = Path("results/advice.json")
PAGE, MARK = Path("docs/advice.md"), "<!-- scores -->"
SEEDS = (0, 1)
EVERYWHERE = ("fedavg", "fedavgm", "fedprox:mu=0.1", "scaffold", "feddyn", "fednova", "fedexp")
SMALL = {
    "model": "mlp",
    "model_options": {"hidden": [32]},
    "rounds": 20,
    "local_steps": 10,
    "batch_size": 16,
    "lr": 0.1,
}
CNN = {"model": "cnn", "rounds": 20, "local_steps": 10, "batch_size": 16, "lr": 0.05}
COMMON = {
    "client_weighting": "samples",
    "engine": "inline",
    "device": "cpu",
    "eval_clients": 0,
    "checkpoint_every": 1000,
}


class Words(nn.Module):
    """Text classifier: mean of the embeddings of neighboring tokens, and two layers."""

    def __init__(self, classes: int = 3, tokens: int = 400, width: int = 16):
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Embedding(tokens, width)
        self.near = nn.Conv1d(width, 2 * width, 7, padding=3)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.near(self.embed(ids.clamp(min=0)).transpose(1, 2))).amax(2))


def table(load: str, divided: str, seed: int) -> unskew.Federation:
    """Split a table of scikit-learn over eight clients, by its first column or by Dirichlet-distributed labels."""
    from sklearn import datasets

    x, y = getattr(datasets, load)(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype("float32")
    draws = np.random.default_rng(seed)
    order = draws.permutation(len(y))
    test, train = order[: len(y) // 4], order[len(y) // 4 :]
    if divided == "first column":
        parts = np.array_split(train[np.argsort(x[train, 0])], 8)
    else:
        owner = np.empty(len(train), int)
        for c in np.unique(y):
            rows = np.flatnonzero(y[train] == c)
            owner[rows] = draws.choice(8, len(rows), p=draws.dirichlet(np.full(8, 0.3)))
        parts = [part for k in range(8) if len(part := train[owner == k]) >= 5]
    clients = [(x[p], y[p]) for p in parts]
    return unskew.Federation.from_arrays(clients, (x[test], y[test]), classes=len(np.unique(y)), holdout=0.0)


def digits(partition: str, **changes: Any) -> dict[str, Any]:
    return {"data": "digits", "partition": partition, **SMALL, **changes}


def gaussians(partition: str) -> dict[str, Any]:
    return {"data": "gaussians", "partition": partition, "max_train_samples": 2000, **SMALL}


def texts(partition: str) -> dict[str, Any]:
    words = {"data": "sentences", "label": "label", "text": {"columns": [], "tokenizer": "bytes", "block": 96}}
    return {**words, "partition": partition, "max_train_samples": 1500, "clients": 5, **CNN, "lr": 0.2}


def cifar(partition: str) -> dict[str, Any]:
    return {"data": "cifar10", "partition": partition, "max_train_samples": 1000, "clients": 5, "image_size": 16, **CNN}


FEDERATIONS: dict[str, dict[str, Any] | Callable[[int], unskew.Federation]] = {
    "digits, iid": digits("iid"),
    "digits, Dirichlet 1": digits("dirichlet:1"),
    "digits, Dirichlet 0.3": digits("dirichlet:0.3"),
    "digits, Dirichlet 0.1": digits("dirichlet:0.1"),
    "digits, Dirichlet 0.01": digits("dirichlet:0.01,min=half"),
    "digits, two classes": digits("classes:2"),
    "digits, sizes differ": digits("quantity:0.3", local_steps=None, local_epochs=3),
    "digits, Dirichlet 0.1, a third of 30 clients": digits("dirichlet:0.1,min=3", clients=30, participation=0.3),
    "digits, Dirichlet 0.1, few steps": digits("dirichlet:0.1", local_steps=3),
    "digits, Dirichlet 0.1, 100 samples at the server": digits("dirichlet:0.1", server_data=100),
    "gaussians, Dirichlet 0.1": gaussians("dirichlet:0.1"),
    "gaussians, two classes": gaussians("classes:2"),
    "breast cancer, by the first column": lambda seed: table("load_breast_cancer", "first column", seed),
    "breast cancer, Dirichlet 0.3": lambda seed: table("load_breast_cancer", "labels", seed),
    "wine, by the first column": lambda seed: table("load_wine", "first column", seed),
    "sentences, by genre": texts("sorted:genre"),
    "sentences, Dirichlet 0.1": texts("dirichlet:0.1"),
    "CIFAR-10, 1,000 images, Dirichlet 0.1": cifar("dirichlet:0.1"),
    "CIFAR-10, 1,000 images, Dirichlet 1": cifar("dirichlet:1"),
}


def kept() -> dict[str, Any]:
    """Read the stored results: ``runs`` and ``advice``."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {"runs": {}, "advice": {}}


def keep(part: str, *keys: str, value: Any) -> None:
    """Add one result to the file, which other processes may write to as well."""
    with file_lock(KEPT.with_suffix(".lock"), 60):
        whole = kept()
        place = whole.setdefault(part, {})
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        write_atomic(KEPT, (json.dumps(whole, indent=1) + "\n").encode())


def carry_out(name: str, seed: int, data_path: str | None) -> None:
    """Compute the advice on a federation, and train all considered methods."""
    made = FEDERATIONS[name]
    options: dict[str, Any] = {**(SMALL if callable(made) else made), **COMMON, "seed": seed}
    if options.get("data") == "cifar10":
        options["data_path"] = data_path
    model = options.pop("model")
    if options.get("data") == "sentences":
        model = Words
    given = (made(seed),) if callable(made) else ()
    print(f"{name}, seed {seed}", flush=True)
    asked = {k: v for k, v in options.items() if v is not None}
    advice = unskew.diagnose(*given, model=model, samples=200, curvature=False, **asked).advice()
    keep("advice", str(VERSION), name, str(seed), value=advice.methods[1:])
    server = ("fedft",) if "server_data" in options else ()
    for method in dict.fromkeys((*EVERYWHERE, *server, *advice.methods)):
        if method in kept()["runs"].get(name, {}).get(str(seed), {}):
            continue
        result = unskew.run(*given, model=model, method=method, **asked)
        figures = [row["accuracy"] for row in result.history[-5:]]
        outcome = {"accuracy": round(statistics.fmean(figures), 4), "seconds": round(result.summary["seconds"], 1)}
        keep("runs", name, str(seed), method, value=outcome)
        print(f"  {method}: {outcome['accuracy']:.4f}, {outcome['seconds']} s", flush=True)


def lines(rules: str) -> list[str]:
    """Return the table of the results for these rules, and sentences that summarize it."""
    whole = kept()
    rows, wins, total = [], 0, 0
    gaps, chance, chance_gaps, base_gaps = [], [], [], []
    firsts, first_gaps, one_gaps = [], [], []
    for name in FEDERATIONS:
        for seed, advised in whole["advice"].get(rules, {}).get(name, {}).items():
            runs = {m: r["accuracy"] for m, r in whole["runs"].get(name, {}).get(seed, {}).items()}
            if any(m not in runs for m in (*EVERYWHERE, *advised)):
                continue
            base, best = runs["fedavg"], max(runs, key=lambda m: runs[m])
            first = f"{100 * (runs[advised[0]] - base):+.1f}" if advised else "-"
            top = max((runs[m] for m in advised), default=base)
            total += 1
            wins += top > base
            gaps.append(runs[best] - top)
            base_gaps.append(runs[best] - base)
            others = [runs[m] for m in EVERYWHERE if m != "fedavg"]
            three = [max(some) for some in combinations(others, 3)]
            chance.append(statistics.fmean(top > base for top in three))
            firsts.append(bool(advised) and runs[advised[0]] > base)
            first_gaps.append(runs[best] - (runs[advised[0]] if advised else base))
            one_gaps.append(runs[best] - statistics.fmean(others))
            chance_gaps.append(runs[best] - statistics.fmean(three))
            cells = (name, seed, ", ".join(f"`{m}`" for m in advised), f"{100 * base:.1f}", first)
            rows.append((*cells, f"{100 * (top - base):+.1f}", f"`{best}`", f"{100 * (runs[best] - top):.1f}"))
    header = ("federation", "seed", "advised", "FedAvg, %", "first", "best of three", "best of all", "missing to it")
    shown = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)]
    if total:
        shown += [
            "",
            f"The best of the three advised is above FedAvg in {wins} of {total} cases (three drawn at random from the list: "
            f"{100 * statistics.fmean(chance):.0f} %). It is {100 * statistics.fmean(gaps):.1f} points below the best of all "
            f"methods considered on average, {100 * max(gaps):.1f} at most. The best of three at random "
            f"is {100 * statistics.fmean(chance_gaps):.1f} points below it on average, FedAvg "
            f"{100 * statistics.fmean(base_gaps):.1f}. The first advised alone is above FedAvg in {sum(firsts)} cases, and "
            f"{100 * statistics.fmean(first_gaps):.1f} points below the best of all; one at random is "
            f"{100 * statistics.fmean(one_gaps):.1f} below.",
        ]
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="this federation; repeatable")
    parser.add_argument("--seed", type=int, action="append", help="this seed; repeatable")
    parser.add_argument("--data-path", help="folder of CIFAR-10; without it its federations are left out")
    parser.add_argument("--show", action="store_true", help="write the tables of what is there; run nothing")
    parser.add_argument("--list", action="store_true", help="list the federations")
    args = parser.parse_args()
    if args.list:
        print("\n".join(FEDERATIONS))
        return
    torch.set_num_threads(1)
    for name in [] if args.show else args.only or FEDERATIONS:
        if name.startswith("CIFAR") and args.data_path is None:
            continue
        for seed in args.seed or SEEDS:
            carry_out(name, seed, args.data_path)
    scores = "\n\n".join("\n".join([f"**Rules, version {r}**", "", *lines(r)]) for r in kept()["advice"])
    print(scores)
    text = PAGE.read_text()
    before, rest = text.split(f"{MARK}\n", 1)
    PAGE.write_text(f"{before}{MARK}\n\n{scores}\n\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}")


if __name__ == "__main__":
    main()
