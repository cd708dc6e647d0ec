"""Threshold below which a client's metric is mostly chance and is not tested."""

from __future__ import annotations

from unskew.tasks.primary_metric import MetricInfo

FEWEST = 10
"""Number of held-out samples, or of events, below which a client's metric is mostly chance."""


def has_few_samples(held_out: float, events: float | None) -> bool:
    """Return whether a client's metric is mostly chance; a client without held-out samples is compared on the test set.

    Args:
        held_out: Number of held-out samples.
        events: Number of them of the rarest class, for a metric that compares classes.
    """
    return held_out > 0 and min(held_out, held_out if events is None else events) < FEWEST


def compares_classes(metric: MetricInfo, scored: str) -> bool:
    """Return whether a metric depends on the samples of each class.

    Args:
        metric: Metric of clients.
        scored: Primary metric of the task.
    """
    return metric.name not in (scored, "loss")
