"""Test set after the last round: intervals of the metrics, samples per class, calibration, and curves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unskew.data.federation import ArrayClients, Federation
from unskew.errors import abbreviate
from unskew.runs.metrics import RunMetrics
from unskew.simulation.evaluate import Evaluator, truth_and_scores
from unskew.simulation.server import Server
from unskew.tasks.intervals import NORMAL_95, interval_fields, metric_interval, wilson_interval

MOST_CLASSES = 100
"""Maximum number of classes whose test samples are counted in the summary."""
MOST_CURVES = 20
"""Maximum number of clients whose curves are stored."""
FEWEST_EVENTS = 5
"""Number of held-out events of a client below which a simulation warns."""
WRONG_BY = 1.5
"""Factor between mean probability and share from which a run warns: a risk that is wrong by half changes decisions."""


@dataclass(frozen=True)
class FinalEvaluation:
    """Results of the final model on the test set, in addition to its metrics.

    Attributes:
        fields: Intervals and class support, for ``summary.json``.
        curves: Curves of the task, such as those of a classifier with requested metrics.
        warning: Warning about probabilities that are far from the observed share, or None.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)
    warning: str | None = None


def evaluate_final_model(
    evaluator: Evaluator, server: Server, metrics: RunMetrics, accuracy: float | None, best: bool
) -> FinalEvaluation:
    """Evaluate the final model of a run on the test set.

    Args:
        evaluator: Evaluator of the run.
        server: Server after the last round.
        metrics: Metrics of the run.
        accuracy: Primary metric of this model on the test set.
        best: Whether this is the best model instead of the last one; the keys of its intervals then begin with ``kept_``.
    """
    task, federation, wanted = evaluator.task, evaluator.federation, metrics.computed
    size, prefix = len(evaluator.test[1]), "kept_" if best else ""
    if task.tokens or not size:
        return FinalEvaluation()
    support = {"test_samples": size, **class_support(federation)}
    if "one_class" in task.provides and not wanted and federation.classes > 2:  # saves the predictions
        interval = None if accuracy is None else wilson_interval(round(accuracy * size), size)
        return FinalEvaluation(interval_fields(prefix + task.scored, interval) | support)
    y, scores = evaluator.test_scores(*server.selection.evaluated)
    fields = support
    for name in wanted.with_intervals:
        fields |= interval_fields(prefix + name, metric_interval(name, task, y, scores, wanted))
    sync = server.setup.method.sync
    trained = sync is None or sync.trains_global_model
    warning = calibration_warning(y, scores, wanted.class_names) if metrics.positive is not None and trained else None
    curves = task.curves(y, scores, wanted)
    curve_of_all = task.client_curve("test set", y, scores)
    if curve_of_all is not None:
        curves["km"] = [curve_of_all, *client_curves(evaluator, server)]
        warning = few_events_warning(federation)
    return FinalEvaluation(fields, curves, warning)


def client_curves(evaluator: Evaluator, server: Server) -> list[dict[str, Any] | None]:
    """Return the curves of the clients with the most held-out samples.

    Args:
        evaluator: Evaluator of the run.
        server: Server after the last round.
    """
    clients, task = evaluator.federation.clients, evaluator.task
    if not isinstance(clients, ArrayClients):
        return []
    held_out = clients.offsets[1:] - clients.splits
    chosen = [k for k in np.argsort(-held_out, kind="stable")[:MOST_CURVES].tolist() if held_out[k]]
    curves = []
    for client in (clients[k] for k in sorted(chosen)):
        logits = evaluator.client_sums(*server.selection.evaluated, client)[1]
        label = evaluator.federation.client_label(client.id)
        curves.append(task.client_curve(label, *truth_and_scores(task, logits, client.y_test)))
    return curves


def few_events_warning(federation: Federation) -> str | None:
    """Return a warning if clients have too few held-out events for metrics of their own.

    Args:
        federation: Data of all clients.
    """
    if not isinstance(federation.clients, ArrayClients):
        return None
    fields = {
        k: federation.objective.client_fields(c.y_test) for k, c in enumerate(federation.clients) if len(c.y_test)
    }
    few = [
        federation.client_label(k) for k, known in fields.items() if known.get("events", FEWEST_EVENTS) < FEWEST_EVENTS
    ]
    if not few:
        return None
    return (
        f"{len(few)} of {len(fields)} clients have fewer than {FEWEST_EVENTS} events in their held-out samples, so their "
        f"metrics are mostly chance: {abbreviate(few)}. Increase holdout, or judge the model on the test set."
    )


def class_support(federation: Federation) -> dict[str, Any]:
    """Return the test samples of each class or label as the field ``support``; empty if there are none or too many."""
    if "counts" not in federation.objective.provides or federation.classes > MOST_CLASSES:
        return {}
    return {"support": federation.objective.named_counts(federation.test[1], federation.names)}


def calibration_warning(y: np.ndarray, p: np.ndarray, class_names: tuple[str, ...]) -> str | None:
    """Return a warning if the mean probability of one of two classes is far from its share, beyond chance.

    Args:
        y: Classes, ``[n]``.
        p: Probabilities, ``[n, 2]``.
        class_names: Names of the classes.
    """
    observed = np.bincount(y, minlength=2) / len(y)
    rare = int(observed.argmin())  # its factor is the larger one
    mean, share = float(p[:, rare].mean()), float(observed[rare])
    chance = NORMAL_95 * float(np.sqrt((p[:, 0] * p[:, 1]).mean() / len(y)))
    if not abs(mean - share) > chance or max(mean, share) < WRONG_BY * min(mean, share):
        return None
    return (
        f"The probabilities are not risks: the mean probability of {class_names[rare]} is {mean:.1%}, but {share:.1%} of the "
        f"{len(y)} test samples are {class_names[rare]}. Train for more rounds, or recalibrate the model before using them."
    )
