"""Reference rows of a comparison: training on all data in one place, and each client alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.errors import UnskewError
from unskew.methods.registry import REFERENCES, check_expression, method, rule_class
from unskew.protocol.rules import Method
from unskew.runs.build_model import ModelLike
from unskew.runs.validation import resolve_run
from unskew.simulation.samplers.registry import parse_sampling
from unskew.tasks.primary_metric import primary_metric_name

BY_DEFAULT = True
"""Default of ``references``."""
TITLE = "References, not ranked: all data in one place (pooled), each client alone (local)."
"""Title of tables of references."""
UNTUNED = "With settings of another method, pooled is not an upper bound; unskew tune tunes both."
"""Second line of the title if the references were not tuned."""
ROUNDS = 10_000_000
"""Larger than any number of rounds: as ``eval_every``, it evaluates a model after the last round only."""
OF_CLIENTS = "personal_"
"""Prefix of metrics of the clients' own models."""


def is_reference(spelling: str) -> bool:
    """Return whether a method, or its label in a report, is a reference, which is shown but not ranked.

    >>> is_reference("pooled:participation=0.5"), is_reference("local (lr=0.1)"), is_reference("fedavg")
    (True, True, False)
    """
    return _first_word(spelling) in REFERENCES


def is_local(spelling: str) -> bool:
    """Return whether a method trains each client alone, so that there is no global model."""
    return _first_word(spelling) == "local"


@lru_cache(maxsize=256)
def trains_global_model(spelling: str) -> bool:
    """Return whether a method, or its label in a report, trains a global model; True if the method is not known.

    A class that is given by its import path counts as known only if its module is imported already.

    >>> trains_global_model("fedavg"), trains_global_model("fedprox+fedfomo (lr=0.1)"), trains_global_model("local")
    (True, False, False)
    """
    try:
        parts = check_expression(spelling.partition(" (")[0])
        names = [part.partition(":")[0].strip() for part in parts]
        known = [name for name in names if "." not in name or name.rpartition(".")[0] in sys.modules]
        return all(rule_class(name if "." in name else name.lower()).trains_global_model for name in known)
    except UnskewError:
        return True


def _first_word(spelling: str) -> str:
    return spelling.partition(":")[0].partition(" ")[0]


def reference_config(values: Mapping[str, Any], spelling: str) -> dict[str, Any]:
    """Return the fields of a reference's run: those of the methods, with default settings for communication.

    Args:
        values: Fields of the methods' runs.
        spelling: Expression of the reference.
    """
    fields = {**values, "network": "none", "secure_aggregation": "off", "diagnose": [], "synthetic": None}
    fields |= {"attack": None, "coefficients": False}
    fields |= {"save_samples": False, "base_run": False, "client_weighting": "auto", "buffers": "average"}
    sampler = parse_sampling(str(fields.get("sampling", "fixed")))
    if sampler.asks_loss or sampler.reads_reports:  # they select clients by their part in the training of one model
        fields["sampling"] = "fixed"
    if is_local(spelling):
        return {**fields, "early_stopping": None, "keep": "last", "eval_every": ROUNDS}
    return {**fields, "participation": 1.0}


def applicable_references(
    config: Experiment, federation: Federation, model: ModelLike | None, names: Sequence[str]
) -> tuple[dict[str, Method], list[str]]:
    """Choose the references of a comparison.

    Args:
        config: Configuration of one of the methods.
        federation: Data of all clients.
        model: Model given in Python, or None.
        names: Method expressions of the comparison.

    Returns:
        References that fit the data and the model, by name, and a note for each that does not.
    """
    if config.start_from is not None:
        return {}, ["pooled and local are left out: the runs continue another one (start_from)."]
    applicable: dict[str, Method] = {}
    notes = []
    share = "" if config.participation == 1 else f":participation={config.participation:g}"
    for spelling in (f"pooled{share}", "local"):
        if any(name.partition(":")[0] == spelling.partition(":")[0] for name in names):
            continue
        chosen = method(spelling)
        try:
            resolve_run(config.model_copy(update={"diagnose": (), "attack": None}), federation, model, chosen)
        except UnskewError as error:
            notes.append(f"{spelling} is left out: {error}")
        else:
            applicable[spelling] = chosen
    return applicable, notes


def without_global_model(row: Mapping[str, Any], own_metrics: Iterable[str] = (), alone: bool = True) -> dict[str, Any]:
    """Return a row, summary or client record without the global model, for methods that never train it.

    With ``local``, metrics of the clients' own models get the names of the global model's metrics on the clients' data.

    Args:
        row: Row, summary or record.
        own_metrics: Names of custom metrics.
        alone: Whether the method is ``local``; the metrics of other methods keep their names.

    Returns:
        Copy in which metrics of the global model are None.
    """
    from unskew.comparison.summary_statistics import is_metric

    own = {key.removeprefix(OF_CLIENTS): value for key, value in row.items() if key.startswith(OF_CLIENTS)}
    whose = "" if "client" in row else "client_"
    metrics = {key: value for key, value in row.items() if not key.startswith(OF_CLIENTS)}
    scored = primary_metric_name(row)
    bare = ("loss", "best_round", "best_last_5", scored, *own_metrics)
    for key in metrics:
        name = key.removeprefix("best_").removeprefix("kept_").removesuffix("_low").removesuffix("_high")
        if key.startswith(("unseen_", "validation_")) or is_metric(name) or name in bare or key in bare:
            metrics[key] = None
    if alone:
        return {**metrics, **{whose + key: value for key, value in own.items()}}
    without = {whose + key: None for key in own if whose + key in metrics}
    return {**metrics, **without, **{OF_CLIENTS + key: value for key, value in own.items()}}


def records_of_clients(
    history: Iterable[Mapping[str, Any]], summary: Mapping[str, Any], clients: Iterable[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Return all records of a run that trains no global model, without metrics of a global model.

    Args:
        history: Metrics of each round.
        summary: Summary of the run.
        clients: Rows of the clients.

    Returns:
        The records; in the summary, ``global_model`` is False.
    """
    own_metrics, alone = summary.get("own_metrics", ()), is_local(str(summary["method"]))
    rounds, rows = ([without_global_model(row, own_metrics, alone) for row in rows] for rows in (history, clients))
    return rounds, without_global_model(summary, own_metrics, alone) | {"global_model": False}, rows
