"""Metrics of the global model from masked sums over all sites: no server sees those of a single site."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from unskew.deployment.common.small_counts import MIN_COUNT, reported_support
from unskew.errors import ConfigError
from unskew.runs.input_spec import InputSpec
from unskew.sums.base import SumRequest, Sums
from unskew.sums.exchange import Exchange
from unskew.sums.scores import TALLIES
from unskew.tasks.cells import class_metrics_from_sums
from unskew.tasks.intervals import Interval
from unskew.tasks.primary_metric import RECALL

ALL_SITES = "all sites"
"""Name of the site in rows of sums over all sites."""


def masked_rows(exchange: Exchange, v: Tensor, b: Tensor, inputs: InputSpec, level: float) -> list[dict[str, Any]]:
    """Return a row per metric of the global model on the held-out samples of all sites together.

    Args:
        exchange: Exchange of sums over sites.
        v: Parameters of the model, ``[d]``.
        b: Buffers of the model, ``[m]``.
        inputs: Input specification of the model.
        level: Level of the intervals.
    """
    classes = inputs.classes if "one_class" in inputs.objective.provides else 0
    task = inputs.objective
    args: dict[str, Any] = {"classes": classes, "tally": task.empty_tally(inputs.classes).numel()}
    table, further = task.held_out_sums(np.zeros((0, 2)), np.zeros((0, inputs.classes)))
    if table.size:
        args |= {"table": [*table.shape], "further": len(further)}
    (sums,) = exchange([SumRequest("scores", args, {"v": v, "b": b})])
    support = reported_support(sums["confusion"].sum(1).tolist(), MIN_COUNT)
    labeled = dict(zip(inputs.names, (int(c) if c.isdigit() else c or None for c in support), strict=False))
    n = int(sums["confusion"].sum()) if classes else int(sums["sums"][0])
    rows = []
    hidden = {f"{RECALL}{name}" for name, text in labeled.items() if not isinstance(text, int)}
    for metric, (value, interval) in metrics_from_sums(sums, inputs, level).items():
        if metric in hidden:  # with its interval, a recall tells the number of samples
            continue
        low, high = interval if interval is not None and math.isfinite(value) else (None, None)
        about = {"model": "global", "site": ALL_SITES, "client": None, "metric": metric}
        known = value if math.isfinite(value) else None
        rows.append({**about, "value": known, "low": low, "high": high, "n": n, "support": labeled})
    return rows


def metrics_from_sums(sums: Sums, inputs: InputSpec, level: float) -> dict[str, tuple[float, Interval]]:
    """Return value and interval of each metric.

    Args:
        sums: Sums of the kind ``scores``.
        inputs: Input specification of the model.
        level: Level of the intervals.

    Raises:
        ConfigError: If no site has held-out samples.
    """
    task = inputs.objective
    predictions, correct, losses = sums["sums"][:TALLIES].tolist()
    if not predictions:
        raise ConfigError(
            "No site has held-out samples. Set holdout in the experiment, or give the sites' data a test split."
        )
    loss = losses / predictions
    measured = task.measure(sums["sums"][TALLIES:].reshape(task.empty_tally(inputs.classes).shape), loss)
    found: dict[str, tuple[float, Interval]] = {task.scored: (measured.pop(task.scored, correct / predictions), None)}
    found |= {name: (value, None) for name, value in {"loss": loss, **measured}.items()}
    if "table" in sums:
        of_table = task.metrics_of_sums(sums["table"].numpy(), sums["further"].numpy())
        found |= {name: (value, None) for name, value in of_table.items()}
    if "one_class" in task.provides:
        cells, confusion, probabilities = (sums[name].numpy() for name in ("cells", "confusion", "probabilities"))
        metrics = replace(inputs.metrics, level=level)
        found |= class_metrics_from_sums(cells, confusion, probabilities, metrics)
    return found
