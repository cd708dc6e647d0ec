"""Task options of a run: loss and class weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unskew.data.column_statistics import NUMBER, balanced_class_weights
from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.tasks.registry import TASKS, has_loss


def apply_task_options(
    federation: Federation,
    loss: str,
    class_weights: str | Sequence[float] | None,
    counts: np.ndarray | None = None,
) -> Federation:
    """Return the federation with the loss and class weights of a run.

    Args:
        federation: Federation.
        loss: ``auto``, or a loss of the task.
        class_weights: A string for ``balanced_class_weights``, one weight per class, or None.
        counts: Samples of each class over all clients, ``[C]``; by default, they are counted here.

    Raises:
        ConfigError: If an option does not apply to the task, or the number of weights differs from that of classes.
    """
    objective = federation.objective
    if loss != "auto":
        if not has_loss(objective, loss):
            others = " or ".join(name for name, task in TASKS.items() if has_loss(task, loss))
            raise ConfigError(f"loss={loss} requires {others}, but the task of {federation.name} is {federation.task}.")
        federation = replace(federation, trained_for=objective.with_loss(loss))
    if class_weights is None:
        return federation
    if not objective.weighted:
        others = " or ".join(name for name, task in TASKS.items() if task.weighted)
        raise ConfigError(f"class_weights require {others}, but the task of {federation.name} is {federation.task}.")
    traffic = federation.stats_traffic
    if isinstance(class_weights, str):
        weights = balanced_class_weights(federation.class_counts().sum(0) if counts is None else counts)
        sent = np.full((len(federation.clients), 2), NUMBER * federation.classes, np.int64)
        traffic = sent if traffic is None else traffic + sent
    else:
        weights = tuple(class_weights)
        if len(weights) != federation.classes:
            raise ConfigError(f"class_weights has {len(weights)} weights, but there are {federation.classes} classes.")
    return replace(federation, trained_for=federation.objective.with_weights(weights), stats_traffic=traffic)
