"""Result of ``unskew diagnose``, as JSON and as a plot; ``unskew.cli.tables`` has its tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.measurements.heterogeneity import HeterogeneityMeasurement
from unskew.measurements.site_differences import SiteDifferences
from unskew.plots.figure import new_figure, save_or_return
from unskew.records.notebook import NotebookTable
from unskew.sums.statistics import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from unskew.diagnosis.advice import Advice
    from unskew.diagnosis.features import AdviceContext

PANELS = {
    "zeta2": "dissimilarity of gradients ζ̂²",
    "sigma2": "noise of gradients σ̂²",
    "L": "smoothness L",
    "rounds": "rounds, relative to p = 0 (Corollary I)",
}

WEAK, STRONG = 0.15, 0.4
"""Label distance minus chance: weak below the first value, strong from the second on."""


@dataclass(frozen=True, repr=False)
class DiagnosisReport(NotebookTable):
    """Result of a diagnosis.

    Attributes:
        details: Data, model and scope of the measurement.
        labels: Label and size skew, see ``unskew.measurements.label_skew.label_skew_metrics``.
        measurements: Measurements at each model, in order.
        sites: Rows, outcome, missing values and shifted columns of each client.
        setting: Data, model and configuration, which the advice uses to validate methods.
        not_requested: Statistics of labels and gradients that sites were not asked for.
    """

    details: dict[str, Any]
    labels: Metrics
    measurements: list[HeterogeneityMeasurement]
    sites: SiteDifferences
    setting: AdviceContext | None = field(default=None, compare=False)
    not_requested: tuple[str, ...] = ()

    def advice(
        self,
        *,
        traffic: str | float | None = None,
        secure_aggregation: bool = False,
        server_data: int | None = None,
        privacy: str | float | None = None,
    ) -> Advice:
        """Return advice: methods ordered by evidence, with reasons.

        Args:
            traffic: Traffic of the whole run, up and down, over all clients: ``"100MB"`` or a number of bytes.
            secure_aggregation: Whether the server may see only sums of updates.
            server_data: Number of labeled samples at the server, taken out of the test set.
            privacy: Privacy budget of everything that clients generate and share, such as ``"epsilon=5"``.

        Raises:
            ConfigError: If a limit cannot be parsed.
            DataError: If a limit does not fit the data.
        """
        from unskew.diagnosis.advice import advise
        from unskew.diagnosis.features import AdviceLimits

        assert self.setting is not None
        limits = AdviceLimits.read(traffic, secure_aggregation, server_data, privacy)
        return advise(self.setting, self.labels, self.measurements[0], self.details, limits)

    def summary(self) -> str:
        """Return a sentence on the label skew, or without labels on the clients' gradients at the first model.

        Label skew minus chance below 0.15 is weak, from 0.4 on strong; the rules of the advice use the same bounds.
        """
        distance, chance = self.labels["label_distance_mean"], self.labels["label_distance_chance"]
        if distance is None or chance is None:
            metrics = self.measurements[0].metrics
            zeta2, norm2 = metrics["zeta2"], metrics["gradient2"]
            if zeta2 is None and "gradients" in self.not_requested:
                names = " and ".join(self.not_requested)
                return f"The skew was not measured, because {names} were not requested (--statistics)."
            if zeta2 is None or not norm2:
                return "The skew was not measured, because these data have neither labels nor gradients to compare."
            return (
                f"The clients' gradients differ by {zeta2 / norm2:.2g} times the squared norm of their mean (0: all clients "
                "agree; above 1: they disagree more than they agree)."
            )
        excess = distance - chance
        kind = "Strong" if excess >= STRONG else "Moderate" if excess >= WEAK else "Weak or no"
        return (
            f"{kind} label skew: a client's class frequencies differ from those of all clients by {distance:.2f} on average "
            f"(total variation: 0 is none, 1 the most); chance alone gives {chance:.2f}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields as plain values; unknown values are None."""
        models = []
        for measurement in self.measurements:
            shares = [_plain(row) for row in measurement.shares]
            models.append({"model": measurement.model_label, **_plain(measurement.metrics), "shares": shares})
        test = {} if self.sites.test is None else {"log_rank": self.sites.test}
        return {**self.details, **self.labels, **test, "sites": self.sites.rows, "models": models}

    def _sentences(self) -> list[str]:
        return [self.summary()]

    def _shown(self) -> list[dict[str, object]]:
        columns = {
            measurement.model_label: {**self.labels, **_plain(measurement.metrics)} for measurement in self.measurements
        }
        names = dict.fromkeys(name for metrics in columns.values() for name in metrics)
        rows = ({model: metrics.get(name) for model, metrics in columns.items()} for name in names)
        return [{"metric": name, **row} for name, row in zip(names, rows, strict=True) if {*row.values()} != {None}]

    def plot(self, path: str | Path | None = None) -> Path | Figure:
        """Plot measurements (markers) and Lemma 1's bounds (dashed) against the share ``p``, in one color per model.

        Args:
            path: Image file to write; its suffix determines the format. None returns the figure, which notebooks display.

        Raises:
            ConfigError: If the file name does not end with the suffix of an image.
        """
        rows = [row for measurement in self.measurements for row in measurement.shares]
        names = [name for name in PANELS if any(row[name] is not None for row in rows)]
        figure, axes = new_figure(4.2 * max(1, len(names)), 3.6, max(1, len(names)), 1)
        for name, axis in zip(names, axes[0], strict=False):
            for number, measurement in enumerate(self.measurements):
                p = [row["p"] for row in measurement.shares]
                color = f"C{number % 10}"
                values = [_number(row[name]) for row in measurement.shares]
                axis.plot(p, values, "o-", color=color, label=measurement.model_label)
                bounds = [_number(row[f"{name}_bound"]) for row in measurement.shares]
                axis.plot(p, bounds, "--", color=color, alpha=0.7)
            axis.set_xlabel("share p of synthetic data")
            axis.set_title(PANELS[name], fontsize=9)
            axis.grid(alpha=0.3)
        if names:
            axes[0][0].plot([], [], "k--", alpha=0.7, label="Lemma 1")
            axes[0][0].legend(frameon=False, fontsize=8)
        return save_or_return(figure, path)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plain(metrics: Metrics) -> Metrics:
    return {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
