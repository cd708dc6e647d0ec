"""Label distribution: a heat map of clients and classes, sizes, and metrics of the skew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unskew.comparison.benefit import client_label
from unskew.plots.curves import prevalence
from unskew.reporting.chart_data import evenly_spaced, gini
from unskew.reporting.run_groups import RunGroup
from unskew.reporting.run_reader import RunFiles
from unskew.sums.skew import label_distances

ROWS, COLUMNS = 100, 100
"""Maximum number of rows and of columns of a heat map."""
MOST = 10_000_000
"""Maximum number of clients times classes that are read."""
MAPS = 5
"""Maximum number of partitions (of several seeds) that a group shows."""


def label_distributions(part: RunGroup) -> list[dict[str, Any]]:
    """Return an entry for each partition of the group, of the first seeds; none if run folders lack label counts."""
    distributions: dict[str, RunFiles] = {}
    for run in sorted(part.runs, key=lambda run: int(run.summary["seed"])):
        if run.clients:
            trained = [row for row in run.clients if "unseen" not in row]
            distributions.setdefault(run.summary["partition_hash"], replace(run, clients=trained))
    return [distribution_of(run) for run in list(distributions.values())[:MAPS]]


def distribution_of(run: RunFiles) -> dict[str, Any]:
    """Return the heat map, the sizes and the metrics of one partition."""
    sizes = np.array([row["samples"] for row in run.clients], float)
    names = [client_label(row) for row in run.clients]
    rows_shown = evenly_spaced(len(sizes), 2 * ROWS)
    ordered = np.argsort(-sizes, kind="stable")
    entry: dict[str, Any] = {
        "title": f"seed {run.summary['seed']}",
        "hash": run.summary["partition_hash"],
        "sizes": sizes[ordered][rows_shown].tolist(),
        "who": [names[index] for index in ordered[rows_shown]],
        "statistics": size_statistics(sizes),
    }
    counts = class_counts(run)
    if counts is not None:
        entry["statistics"] = {**entry["statistics"], **skew_statistics(counts)}
        entry["map"] = heat_map(counts, names, run.about.get("classes", []))
        if counts.shape[1] == 2 and (counts.sum(1) == sizes).all():  # not two labels, of which a sample may have both
            shown = evenly_spaced(len(names), ROWS)
            rare, rows, pooled = prevalence(counts[shown])
            entry["prevalence"] = {
                "title": entry["map"]["classes"][rare],
                "rows": [names[k] for k in shown],
                "counts": counts[shown].sum(1).tolist(),
                "all": pooled,
                **dict(zip(("share", "low", "high"), rows.tolist(), strict=True)),
            }
    return entry


def class_counts(run: RunFiles) -> np.ndarray | None:
    """Return samples per client and class, ``[K, C]``; None if the folder does not contain them for all clients."""
    if not all("class_counts" in row for row in run.clients):
        return None
    highest = max((int(label) for row in run.clients for label in row["class_counts"]), default=-1)
    classes = max(highest + 1, len(run.about.get("classes", [])))
    if not 0 < classes * len(run.clients) <= MOST:
        return None
    counts = np.zeros((len(run.clients), classes))
    for index, row in enumerate(run.clients):
        for label, count in row["class_counts"].items():
            counts[index, int(label)] = count
    return counts


def heat_map(counts: np.ndarray, names: list[str], classes: list[str]) -> dict[str, Any]:
    """Return a heat map of clients and classes; if there are many clients, rows are means of similar clients.

    Args:
        counts: Samples per client and class, ``[K, C]``.
        names: Labels of the clients.
        classes: Names of the classes; classes without a name are shown by number.
    """
    labels = [*classes, *map(str, range(len(classes), counts.shape[1]))]
    note = ""
    if counts.shape[1] > COLUMNS:
        most = np.sort(np.argsort(-counts.sum(0), kind="stable")[: COLUMNS - 1])
        rest = np.delete(counts, most, axis=1).sum(1, keepdims=True)
        note = f"The {COLUMNS - 1} classes with the most samples are shown, the other {counts.shape[1] - len(most)} as one."
        counts, labels = np.hstack([counts[:, most], rest]), [*(labels[index] for index in most), "all others"]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    rows = names
    if len(counts) > ROWS:
        # Clients with the same main class are grouped, so that the skew stays visible in means of few clients.
        order = np.lexsort((-shares.max(1), shares.argmax(1)))
        bins = np.array_split(order, ROWS)
        rows = [f"mostly {labels[int(shares[some].mean(0).argmax())]} ({len(some)} clients)" for some in bins]
        counts, shares = (np.stack([values[some].mean(0) for some in bins]) for values in (counts, shares))
        note = f"{len(names)} clients in {ROWS} rows: each row is the mean of clients with the same main class. {note}"
    values = {"counts": counts.round(1).tolist(), "shares": shares.round(3).tolist()}
    return {"rows": rows, "classes": labels, **values, "note": note.strip()}


def size_statistics(sizes: np.ndarray) -> dict[str, float]:
    """Return statistics of the clients' sizes."""
    total = float(sizes.sum())
    return {
        "clients": len(sizes),
        "training samples": total,
        "samples per client, smallest": float(sizes.min()),
        "samples per client, median": float(np.median(sizes)),
        "samples per client, largest": float(sizes.max()),
        "Gini coefficient of the sizes": gini(sizes),
        "effective number of clients": total**2 / float(np.square(sizes).sum()) if total else 0.0,
    }


def skew_statistics(counts: np.ndarray) -> dict[str, float]:
    """Return the label skew metrics of ``unskew diagnose`` from class counts ``[K, C]``, over clients with samples."""
    counts = counts[counts.sum(1) > 0]
    if not len(counts):
        return {}
    distances, entropies, _ = label_distances(counts, counts.sum(0) / counts.sum())
    return {
        "classes per client, median": float(np.median((counts > 0).sum(1))),
        "effective number of classes per client, mean": float(np.exp(entropies).mean()),
        "share of a client's main class, mean": float((counts.max(1) / counts.sum(1)).mean()),
        "distance of a client's labels from all (total variation), mean": float(distances.mean()),
        "distance of a client's labels from all, largest": float(distances.max()),
    }
