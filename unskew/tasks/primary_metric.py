"""Metric names, titles and directions."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

SCORES: dict[str, str] = {"concordance": "concordance", "r2": "R²", "dice": "Dice", "accuracy": "accuracy"}
"""Primary metrics by name in files, with titles; they are shown in percent, higher is better, and 1 is perfect. A task may
have a metric of a later name in addition to its primary metric."""
RECALL = "recall/"
"""Prefix of the names of per-class recalls."""
OVERLAPS = {"dice/": "Dice", "iou/": "IoU"}
"""Prefixes of the names of overlaps of a class in segmentation, with titles."""
BRIER, RISK_GAP = "brier/", "risk_gap/"
"""Prefixes of the names of the Brier score of survival at a time, and of the predicted minus the observed risk."""
METRIC_PREFIXES = (RECALL, *OVERLAPS, BRIER, RISK_GAP)
"""Prefixes of the names of metrics with a value for each class or time."""
WORST = "worst_client"
"""Objective that is the primary metric of the worst client."""


@dataclass(frozen=True)
class MetricInfo:
    """Name and properties of a metric.

    Attributes:
        name: Name in files.
        title: Name in tables and plots.
        lower_is_better: Whether lower values are better.
        percent: Whether values are at most 1 and shown in percent.
    """

    name: str
    title: str
    lower_is_better: bool = False
    percent: bool = True

    @property
    def heading(self) -> str:
        """Title with a capital letter."""
        return self.title[0].upper() + self.title[1:]

    def rank(self, value: float) -> float:
        """Return a number that is higher for better values.

        >>> metric_info("loss").rank(0.5), metric_info("auroc").rank(0.5)
        (-0.5, 0.5)
        """
        return -value if self.lower_is_better else value

    def default_target(self, best: float, constant: float | None = None) -> float:
        """Return 90 % of the best value, or the best value divided by 0.9 if lower is better.

        If a constant prediction reaches this and the best value is better, return the value at 90 % of the way from the
        constant to the best value.

        Args:
            best: Best value.
            constant: Value of a constant prediction; None if it is not known.

        >>> metric_info("accuracy").default_target(0.8), metric_info("loss").default_target(0.18)
        (0.72, 0.2)
        >>> round(metric_info("accuracy").default_target(0.8, constant=0.75), 3)
        0.795
        """
        if self.percent and not self.lower_is_better:
            target = max(0.0, round(0.9 * best, 3))  # R² may be negative
        else:
            wider = best / 0.9 if self.lower_is_better == (best > 0) else 0.9 * best
            target = float(f"{wider:.3g}")
        if constant is not None and self.rank(target) <= self.rank(constant) < self.rank(best):
            return constant + 0.9 * (best - constant)
        return target


KNOWN_METRICS = {
    **{name: MetricInfo(name, title) for name, title in SCORES.items()},
    "loss": MetricInfo("loss", "loss", lower_is_better=True, percent=False),
    "mae": MetricInfo("mae", "MAE", lower_is_better=True, percent=False),
    "rmse": MetricInfo("rmse", "RMSE", lower_is_better=True, percent=False),
    "dice_pooled": MetricInfo("dice_pooled", "pooled Dice"),
    "hd95": MetricInfo("hd95", "HD95 in pixels", lower_is_better=True, percent=False),
    "perplexity": MetricInfo("perplexity", "perplexity", lower_is_better=True, percent=False),
    "exact_match": MetricInfo("exact_match", "exact match"),
    "macro_precision": MetricInfo("macro_precision", "C-precision"),
    "macro_recall": MetricInfo("macro_recall", "C-recall"),
    "macro_f1": MetricInfo("macro_f1", "C-F1"),
    "micro_precision": MetricInfo("micro_precision", "O-precision"),
    "micro_recall": MetricInfo("micro_recall", "O-recall"),
    "micro_f1": MetricInfo("micro_f1", "O-F1"),
    "samples_f1": MetricInfo("samples_f1", "F1 per sample"),
    "auroc": MetricInfo("auroc", "AUROC"),
    "auprc": MetricInfo("auprc", "AUPRC"),
    "f1": MetricInfo("f1", "F1"),
    "balanced_accuracy": MetricInfo("balanced_accuracy", "balanced accuracy"),
    "ece": MetricInfo("ece", "ECE", lower_is_better=True),
    "brier": MetricInfo("brier", "Brier score", lower_is_better=True, percent=False),
    "observed_expected": MetricInfo("observed_expected", "observed/expected", percent=False),
    "calibration_slope": MetricInfo("calibration_slope", "calibration slope", percent=False),
    "uno": MetricInfo("uno", "Uno's concordance"),
    "ibs": MetricInfo("ibs", "integrated Brier score", lower_is_better=True, percent=False),
    "risk_gap": MetricInfo("risk_gap", "mean risk minus Kaplan-Meier risk", percent=False),
    WORST: MetricInfo(WORST, "worst client"),
}
"""Metrics that unskew computes, by name, without those of single classes or times."""
ONE_CLASS = ("auprc", "f1", "ece", "observed_expected")
"""Metrics of two classes that depend on which of them is positive."""


def metric_info(name: str, own: Mapping[str, str] | None = None, positive: str | None = None) -> MetricInfo:
    """Return the properties of a metric.

    Args:
        name: Name in files.
        own: Directions of custom metrics, ``"lower"`` or ``"higher"``, by name.
        positive: Name of the positive one of two classes, for the title; None with more classes.

    >>> metric_info("recall/yes").title, metric_info("cost", {"cost": "lower"}).lower_is_better
    ('recall of yes', True)
    >>> metric_info("auprc", positive="fraud").title, metric_info("brier/365").title
    ('AUPRC of fraud', 'Brier score at 365')
    """
    if name in ONE_CLASS and positive is not None:
        return replace(KNOWN_METRICS[name], title=f"{KNOWN_METRICS[name].title} of {positive}")
    if name in KNOWN_METRICS:
        return KNOWN_METRICS[name]
    base, slash, which = name.partition("/")
    if name.startswith((RECALL, *OVERLAPS)):
        return MetricInfo(name, f"{OVERLAPS.get(f'{base}/', base)} of {which}")
    if slash and base in KNOWN_METRICS:
        return replace(KNOWN_METRICS[base], name=name, title=f"{KNOWN_METRICS[base].title} at {which}")
    return MetricInfo(name, name, lower_is_better=(own or {}).get(name) == "lower", percent=False)


def primary_metric_name(names: Container[str]) -> str:
    """Return the name of the primary metric, given the metric names of a row or a summary.

    >>> primary_metric_name({"round": 1, "r2": 0.5}), primary_metric_name(["best_accuracy", "accuracy"])
    ('r2', 'accuracy')
    """
    return next((name for name in SCORES if name in names), "accuracy")


def metric_of(summary: Mapping[str, Any], name: str) -> MetricInfo:
    """Return the properties of a metric of the run of a summary or of a comparison row.

    Args:
        summary: Summary or row, which has custom metrics and the positive class.
        name: Name of the metric.
    """
    return metric_info(name, summary.get("own_metrics"), summary.get("positive"))


def validation_metric_name(objective: str) -> str:
    """Return the name of an objective's value on the clients' held-out samples, in the rounds of a run.

    >>> validation_metric_name("auroc"), validation_metric_name("worst_client")
    ('validation_auroc', 'worst_client')
    """
    return objective if objective == WORST else f"validation_{objective}"
