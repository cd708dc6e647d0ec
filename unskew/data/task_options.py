"""Task options of a run: regression loss and class weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unskew.data.column_statistics import NUMBER, balanced_class_weights
from unskew.data.federation import Federation
from unskew.errors import ConfigError
from unskew.tasks.classification import Classification
from unskew.tasks.regression import Regression


def apply_task_options(
    federation: Federation,
    loss: str,
    class_weights: str | Sequence[float] | None,
    counts: np.ndarray | None = None,
) -> Federation:
    """Return the federation with the loss and class weights of a run.

    Args:
        federation: Federation.
        loss: ``auto``, or a regression loss.
        class_weights: A string for ``balanced_class_weights``, one weight per class, or None.
        counts: Samples of each class over all clients, ``[C]``; by default, they are counted here.

    Raises:
        ConfigError: If an option does not apply to the task, or the number of weights differs from that of classes.
    """
    objective = federation.objective
    if loss != "auto":
        if not isinstance(objective, Regression):
            raise ConfigError(
                f"loss={loss} requires regression, but the task of {federation.name} is {federation.task}."
            )
        kind, _, text = loss.partition(":")
        return replace(federation, trained_for=replace(objective, kind=kind, delta=huber_delta(text, loss)))
    if class_weights is None:
        return federation
    if federation.task != "classification":
        raise ConfigError(
            f"class_weights require one class per sample, but the task of {federation.name} is {federation.task}."
        )
    traffic = federation.stats_traffic
    if isinstance(class_weights, str):
        weights = balanced_class_weights(federation.class_counts().sum(0) if counts is None else counts)
        sent = np.full((len(federation.clients), 2), NUMBER * federation.classes, np.int64)
        traffic = sent if traffic is None else traffic + sent
    else:
        weights = tuple(class_weights)
        if len(weights) != federation.classes:
            raise ConfigError(f"class_weights has {len(weights)} weights, but there are {federation.classes} classes.")
    return replace(federation, trained_for=Classification(weights), stats_traffic=traffic)


def huber_delta(text: str, loss: str) -> float:
    """Parse the threshold at which the Huber loss becomes linear; 1 by default.

    Args:
        text: Text after ``huber:``.
        loss: The complete loss option, for errors.
    """
    try:
        delta = float(text or 1)
    except ValueError:
        delta = 0.0
    if not 0 < delta < math.inf:
        raise ConfigError(f"{loss!r}: write huber:DELTA with a number above 0, in standard deviations of the targets.")
    return delta
