"""Survival analysis of right-censored times: one output per bin of time.

Bins ``0 = c_0 < ... < c_J``; bin ``j`` is ``(c_{j-1}, c_j]``, and time 0 belongs to the first one. ``T_ij`` is the time of
row ``i`` in bin ``j``, and ``D_ij`` is 1 if its event is there.

    piecewise   rate_ij = exp(o_j + z_ij)         loss_i = sum_j rate_ij T_ij - D_ij (o_j + z_ij)
    discrete    h_ij = sigmoid(o_j + z_ij)        loss_i = sum_j a_ij softplus(o_j + z_ij) - D_ij (o_j + z_ij)

``a_ij`` is 1 if row ``i`` passes bin ``j`` or has its event there, 1/2 if it is censored inside, and 0 afterwards. The
offsets ``o_j`` are the marginal hazards over all clients, so that training starts there. Both losses are sums over rows.

Sources: Friedman 1982 (Annals of Statistics 10); Gensheimer and Narasimhan 2019 (arXiv:1805.00917); Kvamme and Borgan 2019
(arXiv:1910.06724); federated: Andreux et al. 2020 (arXiv:2006.08997).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import ConfigError
from unskew.functorch_api import constant
from unskew.tasks.base import six_digits
from unskew.tasks.intervals import mean_statistic
from unskew.tasks.metrics import MetricSet, Statistic
from unskew.tasks.survival_bins import SurvivalBins
from unskew.tasks.survival_evaluation import (
    SurvivalPredictions,
    censored_at,
    compare_rows,
    count_comparable,
    metric_names,
)
from unskew.tasks.survival_metrics import number_text, survival_at, time_names
from unskew.tasks.survival_sums import metrics_of_sums, survival_sums
from unskew.tasks.survival_table import grid_edges
from unskew.tasks.survival_targets import LABEL_ORDER, encode_events, read_times


@dataclass(frozen=True)
class Survival(SurvivalBins):
    """Time to an event, ``y [B, 2]``: the time, and 1 for an event or 0 if the row is censored.

    A model has one output per bin. Its predictions are the probabilities to survive each cut point, ``[B, J]``.
    """

    name: ClassVar[str] = "survival"
    provides: ClassVar[frozenset[str]] = frozenset(("vector",))
    numeric_labels: ClassVar[bool] = True
    label_order: ClassVar[str] = LABEL_ORDER
    coded_labels: ClassVar[tuple[int, ...]] = (1,)
    output_kind: ClassVar[str] = "survival"
    loss_options: ClassVar[tuple[str, ...]] = ("piecewise", "discrete")
    scored: ClassVar[str] = "concordance"
    ranked: ClassVar[bool] = True
    outcome: ClassVar[str] = "event"
    constant_name: ClassVar[str] = "own hazards"
    client_events: ClassVar[str] = "whose event was observed"
    linear_model: ClassVar[str] = "proportional"
    ratio: ClassVar[str] = "hazard"
    statistics: ClassVar[tuple[str, ...]] = ("survival",)
    requestable: ClassVar[tuple[str, ...]] = ("uno", "ibs", "brier", "risk_gap")
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss",)

    def with_loss(self, loss: str) -> Survival:
        """Return the task with the loss ``piecewise`` or ``discrete``."""
        return replace(self, kind=loss)

    def recoded(self, y: Tensor, who: str) -> Tensor:
        """Return times, and 1 for the configured event or 0."""
        if self.event is None or y.dim() != 2 or y.shape[1] != 2:
            return y
        event = encode_events("y[:, 1]", y[:, 1].tolist(), who, self.event)
        return torch.stack([y[:, 0].to(torch.float64), torch.from_numpy(event)], 1)

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return times and events, ``[n, 2]``, as float64."""
        return read_times(y, who)

    def check_labels(self, names: Sequence[str]) -> None:
        """Validate that there are two label columns (raises ``ConfigError`` otherwise)."""
        if len(names) != 2:
            raise ConfigError(
                f"task=survival needs two label columns, but label is {','.join(names)}. Write {self.label_order}, as in "
                "label: days,event."
            )

    def encode_column(self, name: str, values: Sequence[object], where: str) -> np.ndarray:
        """Return 1 for each event and 0 for each other value of the column of events."""
        return encode_events(name, values, where, self.event)

    def check(self, y: Tensor, classes: int, who: str, x: Tensor | None = None) -> None:
        """Accept all targets that ``read`` returns."""

    def num_outputs(self, ys: Sequence[Tensor]) -> int:
        """Return the number of bins; 1 before they are known."""
        return len(self.cuts) or 1

    def distribution(self, y: Tensor, classes: int) -> Tensor:
        """Return whether each sample has its event in each bin, ``[n, J]``."""
        return self._bins(y.new_zeros(len(y), classes), y)[2].double()

    @cached_property
    def offsets(self) -> tuple[float, ...]:
        """Offset of each output, ``[J]``: log rate, or log-odds of the share."""
        if self.kind == "piecewise":
            return tuple(math.log(rate) for rate in self.rates)
        return tuple(math.log(share) - math.log1p(-share) for share in self.shares)

    def _bins(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs with their offsets, the exposure and whether the event is there, ``[B, J]`` each."""
        time, event = (y[..., column : column + 1].to(logits.dtype) for column in (0, 1))
        low, high = constant((0.0, *self.cuts[:-1]), logits), constant(self.cuts, logits)
        after = time > constant((-1.0, *self.cuts[:-1]), logits)  # time 0 belongs to the first bin
        inside = (after & (time <= high)).to(logits.dtype)
        if self.kind == "piecewise":
            exposure = torch.minimum(time, high).sub(low).clamp_min(0)
        else:
            exposure = torch.where(time >= high, torch.ones_like(inside), inside * (1 + event) / 2)
        return logits + constant(self.offsets, logits), exposure, inside * event

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of each row."""
        z, exposure, events = self._bins(logits, y)
        hazard = z.exp() if self.kind == "piecewise" else F.softplus(z)
        return (hazard * exposure - events * z).sum(-1)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean negative log-likelihood."""
        return self.losses(logits, y).mean()

    def constant(self, y: Tensor, classes: int) -> Tensor:
        """Return the outputs of the rows' own hazards; a bin without events counts half an event."""
        _, exposure, events = (part.sum(0) for part in self._bins(y.new_zeros(len(y), classes), y))
        offsets = y.new_tensor(self.offsets)
        counted = events.clamp_min(0.5)
        if self.kind == "piecewise":
            return torch.where(exposure > 0, (counted / exposure).log() - offsets, 0.0)
        counted = torch.minimum(counted, exposure - 0.5)
        return torch.where(counted > 0, torch.logit(counted / exposure) - offsets, 0.0)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return NaN: the concordance compares rows, so it is not a mean over them."""
        return torch.full((len(y),), math.nan, dtype=torch.float64, device=y.device)

    def measure_all(self, y: np.ndarray, scores: np.ndarray) -> dict[str, float]:
        """Compute the concordance: the share of comparable pairs in which the row with the earlier event has the higher risk.

        The risk is the cumulative hazard at the last cut point.
        """
        return self._predictions(y, scores).metrics([self.scored])

    @property
    def of_other_rows(self) -> Survival:
        """Task whose metrics use the censoring curve of the evaluated rows, because follow-up differs between clients."""
        return replace(self, censoring=())

    def metric_names(self, metrics: MetricSet) -> tuple[str, ...]:
        """Return the names of the values of the requested metrics; those at horizons end in the time."""
        return (*metric_names(metrics.known, self.horizons), *metrics.own)

    def metrics_of_all(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute the requested metrics of ``requestable``; ``brier`` and ``risk_gap`` at each horizon."""
        return self._predictions(y, scores).metrics(metric_names(metrics.known, self.horizons))

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute concordance, loss and all metrics."""
        everything = self.metrics_of_all(y, outputs, replace(metrics, known=self.requestable))
        loss = float(self._losses_of_outputs(y, outputs).mean()) if len(y) else math.nan
        return {**self.measure_all(y, outputs), "loss": loss, **everything}

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of the loss or of any metric."""
        if name == "loss":
            return mean_statistic(self._losses_of_outputs(y, scores))
        return self._predictions(y, scores).statistic(name)

    def curves(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, Any]:
        """Return predicted and observed risks at the horizons."""
        known = np.isfinite(scores).all()
        return {"risk_calibration": self._predictions(y, scores).calibration()} if known else {}

    def client_curve(self, name: str, y: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
        """Return observed and mean predicted survival."""
        return self._predictions(y, scores).mean_curve(name) if np.isfinite(scores).all() else {}

    def compare_clients(self, ys: Sequence[Tensor]) -> dict[str, Any]:
        """Compare events and Kaplan-Meier curves at the horizons, and test whether the hazards are equal."""
        return compare_rows([censored_at(y.cpu().numpy(), self.cuts[-1]) for y in ys], self.horizons)

    def held_out_sums(self, y: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers of rows by time, risk and event, and sums of Brier errors and risks."""
        typical = sum(rate * width for rate, width in zip(self.rates, self.widths, strict=True))
        return survival_sums(self._predictions(y, scores), typical)

    def metrics_of_sums(self, table: np.ndarray, sums: np.ndarray) -> dict[str, float]:
        """Compute all metrics; those that compare rows up to ranks within a cell."""
        none = self._predictions(np.zeros((0, 2)), np.zeros((0, len(self.cuts))))
        edges = grid_edges(self.cuts[-1])
        return metrics_of_sums(table, sums, edges, self.horizons, none.censoring, float(none.edges[-1]))

    def client_fields(self, y: Tensor) -> dict[str, int]:
        """Return the numbers of events and of comparable pairs."""
        return count_comparable(censored_at(y.cpu().numpy(), self.cuts[-1]))

    def _predictions(self, y: np.ndarray, scores: np.ndarray) -> SurvivalPredictions:
        hazards = cumulative_hazards(scores)
        return SurvivalPredictions.of(y, hazards, self.cuts, self.horizons, self.censoring)

    def _losses_of_outputs(self, y: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        hazards = np.maximum(np.diff(cumulative_hazards(outputs), axis=1, prepend=0), np.finfo(float).tiny)
        z = np.log(hazards / self.widths) if self.kind == "piecewise" else np.log(np.expm1(hazards))
        return self.losses(torch.from_numpy(z - np.array(self.offsets)), torch.from_numpy(y)).numpy()

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """Length of each bin, ``[J]``."""
        return tuple(high - low for low, high in zip((0.0, *self.cuts), self.cuts, strict=False))

    def outputs(self, logits: Tensor) -> Tensor:
        """Return the probability to survive each cut point, ``[B, J]``, in float64."""
        z = logits.to(torch.float64)
        z = z + z.new_tensor(self.offsets)
        if self.kind == "discrete":
            rates = z.clamp_min(0) + torch.log1p(torch.exp(-z.abs()))  # softplus, which ONNX Runtime lacks in float64
            return (-rates.cumsum(-1)).exp()
        return (-(z.exp() * z.new_tensor(self.widths)).cumsum(-1)).exp()

    @property
    def names(self) -> tuple[str, ...]:
        """``survival(TIME)`` for each cut point."""
        return tuple(f"survival({time})" for time in time_names(self.cuts))

    def output_names(self, names: Sequence[str], label: str | None) -> list[str]:
        """Return the names of the outputs unchanged."""
        return [*names]

    def survival(self, outputs: np.ndarray, times: Sequence[float]) -> np.ndarray:
        """Return the probability to survive some times, ``[n, T]``; the hazard is constant within a bin.

        Args:
            outputs: Probabilities to survive the cut points, ``[n, J]``.
            times: Times from 0 to the last cut point, ``[T]``.
        """
        return survival_at(cumulative_hazards(outputs), np.array(self.cuts), np.array(times))

    def predicted_columns(
        self,
        outputs: np.ndarray,
        names: Sequence[str],
        label: str | None,
        horizons: Sequence[float] = (),
        curve: bool = False,
    ) -> dict[str, Sequence[float | None]]:
        """Return the risk until each horizon, the median time, and on request the probability to survive each cut point."""
        if late := [time for time in horizons if time > self.cuts[-1]]:
            raise ConfigError(
                f"--horizons: {number_text(late[0])} is after {number_text(self.cuts[-1])}, the last time with a prediction."
            )
        times = tuple(horizons) or self.horizons
        risks = 1 - self.survival(outputs, times)
        columns: dict[str, Sequence[float | None]] = {
            f"risk({time})": six_digits(risks[:, k]) for k, time in enumerate(time_names(times))
        }
        columns["median"] = self.decisions(outputs, MetricSet())
        return columns | (super().predicted_columns(outputs, names, label) if curve else {})

    def decisions(self, outputs: np.ndarray, metrics: MetricSet, threshold: float | None = None) -> list[Any]:
        """Return the median time of each sample, which half of such samples survive; None if it is after all cut points."""
        super().decisions(outputs, metrics, threshold)
        before = np.concatenate([np.ones((len(outputs), 1)), outputs], 1)
        reached = np.asarray(outputs <= 0.5)
        bin_of, rows = reached.argmax(1), np.arange(len(outputs))
        upper, lower = before[rows, bin_of], np.maximum(before[rows, bin_of + 1], np.finfo(float).tiny)
        low, high = np.array((0.0, *self.cuts))[bin_of], np.array(self.cuts)[bin_of]
        with np.errstate(divide="ignore", invalid="ignore"):
            medians = low + (high - low) * np.log(upper / 0.5) / np.log(upper / lower)
        return [
            value if some else None for value, some in zip(medians.tolist(), np.any(reached, 1).tolist(), strict=True)
        ]


def cumulative_hazards(outputs: np.ndarray) -> np.ndarray:
    """Return the cumulative hazards at the cut points, ``[n, J]``, given the probabilities to survive them."""
    return np.asarray(-np.log(np.maximum(outputs, np.finfo(float).tiny)))
