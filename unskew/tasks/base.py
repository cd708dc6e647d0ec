"""Interface of tasks, which define loss, metrics and interpretation of a model's logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import ConfigError
from unskew.tasks.constants import TaskConstants
from unskew.tasks.metrics import MetricSet, Statistic, custom_metric_value
from unskew.tasks.primary_metric import WORST
from unskew.tasks.targets import TaskTargets

PROVIDED = {
    "one_class": "one class per sample",
    "counts": "classes or labels that can be counted",
    "vector": "one feature vector per sample",
}
"""What a task may provide of a sample, and a method may need, by name. With one vector there is also one prediction."""
OUTSIDE = 255
"""Class of pixels without truth, such as those outside of an image that was moved."""


class Task(TaskTargets, TaskConstants):
    """Interface of a task. ``C`` is the number of classes or labels, ``B`` the number of samples in a batch.

    Nothing outside this package asks which task it has: a new task is a subclass and an entry of ``TASKS``. A task that
    provides ``counts`` defines the choices that a model makes for a sample (one of all classes, or yes or no for each
    label) and their probabilities. With these, divergences between two models are computed in the same way.
    """

    least: ClassVar[float] = 0.0
    """Lowest value of the primary metric."""

    weighted: ClassVar[bool] = False
    """True if ``with_weights`` supports class weights."""

    output_kind: ClassVar[str] = "probabilities"
    """Kind of ``outputs``, as one word."""

    loss_options: ClassVar[tuple[str, ...]] = ()
    """Values of the option ``loss`` besides ``auto``; ``huber:DELTA`` stands for the name with any number."""

    scored: ClassVar[str] = "accuracy"
    """Primary metric; higher is better, and 1 is perfect."""

    ranked: ClassVar[bool] = False
    """True if ``measure_all`` computes the primary metric, because it depends on all samples together."""

    outcome: ClassVar[str] = ""
    """Name of the outcome whose share is the sum of the means of ``distribution``; empty if there is none."""

    constant_name: ClassVar[str] = "class shares"
    """Description of the prediction of ``constant``."""

    client_events: ClassVar[str] = ""
    """Held-out samples that a comparison counts as the events of a client, in words; empty if there are none."""

    statistics: ClassVar[tuple[str, ...]] = ()
    """Permissions of statistics about the targets of clients that only this task has."""

    linear_model: ClassVar[str] = ""
    """Name of the model whose coefficients have intervals (``coefficients``); empty if there is none."""

    ratio: ClassVar[str] = ""
    """Quantity that the exponential of such a coefficient multiplies: ``odds`` or ``hazard``."""

    requestable: ClassVar[tuple[str, ...]] = ()
    """Metrics that ``metrics_of_all`` computes if a run requests them."""

    extra_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that ``measure`` returns in addition to loss and primary metric."""

    shown: ClassVar[tuple[str, ...]] = ()
    """Metrics of ``extra_metrics`` that tables list next to the objective."""

    lower_is_better: ClassVar[tuple[str, ...]] = ()
    """Metrics, including the loss, whose lowest value over the rounds is reported as the best."""

    weights: tuple[float, ...] = ()
    """Class weights of the loss; empty if there are none."""

    std: tuple[float, ...] = ()
    """Standard deviation of each target, if targets are standardized."""

    def with_loss(self, loss: str) -> Task:
        """Return the task with another loss.

        Args:
            loss: One of ``loss_options``.

        Raises:
            ConfigError: If its number is not valid.
        """
        raise NotImplementedError

    def with_weights(self, weights: tuple[float, ...]) -> Task:
        """Return the task with class weights, if ``weighted``.

        Args:
            weights: One weight per class.

        Raises:
            ConfigError: If the loss has no class weights.
        """
        raise NotImplementedError

    @property
    def judged_by(self) -> str:
        """Objective of runs with ``objective: auto``: the primary metric, unless another metric says more."""
        return self.scored

    def client_metric_name(self, objective: str) -> str:
        """Return the name of the metric that is shown for clients.

        It is the objective, or the primary metric if the objective is ``judged_by`` or ``worst_client``.

        Args:
            objective: Name of the objective.
        """
        return self.scored if objective in (self.judged_by, WORST) else objective

    def names_with_intervals(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of some metrics that have intervals, each once: by default all.

        Args:
            names: Names of metrics.
        """
        return tuple(dict.fromkeys(names))

    @property
    def unweighted(self) -> Task:
        """Task without class weights, used for evaluation."""
        return self

    @property
    def of_other_rows(self) -> Task:
        """Task for the metrics of rows that do not represent all clients, such as those of one client or of a new file."""
        return self

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        raise NotImplementedError

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample as if it were a separate batch, ``[B]``.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        raise NotImplementedError

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the predicted probabilities, ``[B, C]``."""
        raise NotImplementedError

    def outputs(self, logits: Tensor) -> Tensor:
        """Return the predictions of a model for users, ``[B, C]``: probabilities, or numbers in the targets' units.

        They are in float64, in which few large logits give equal probabilities.
        """
        return self.probabilities(logits.to(torch.float64))

    def output_names(self, names: Sequence[str], label: str | None) -> list[str]:
        """Return a column name for each output: ``p(sepsis=1)`` or ``p(cat)``, or for numbers ``predicted_cost``.

        Args:
            names: Names of the classes, labels or targets.
            label: Name of the label column, or None.
        """
        if self.output_kind != "probabilities":
            return [f"predicted_{name}" for name in names]
        return [f"p({name})" if label is None else f"p({label}={name})" for name in names]

    def predicted_columns(
        self,
        outputs: np.ndarray,
        names: Sequence[str],
        label: str | None,
        horizons: Sequence[float] = (),
        curve: bool = False,
    ) -> dict[str, Sequence[float | None]]:
        """Return the numbers of ``unskew predict`` by the names of their columns; probabilities have six digits.

        Args:
            outputs: Outputs of the model, ``[n, C]``.
            names: Names of the classes, labels or targets.
            label: Name of the label column, or None.
            horizons: Times at which risks are requested; empty means those of the task.
            curve: Whether survival at each cut point is requested.

        Raises:
            ConfigError: If the task has no times, or one is after the last time of the task.
        """
        if horizons or curve:
            raise ConfigError(f"--horizons and --curve require a survival model, but the task is {self.name}.")
        columns = outputs.T.tolist() if self.output_kind == "numbers" else map(six_digits, outputs.T)
        return dict(zip(self.output_names(names, label), columns, strict=True))

    def decisions(self, outputs: np.ndarray, metrics: MetricSet, threshold: float | None = None) -> list[Any]:
        """Return the prediction of each sample: a class name, a list of labels, or by default the number or numbers.

        Args:
            outputs: Outputs of the model, ``[n, C]``.
            metrics: Class names, positive class, and class weights of the training.
            threshold: Smallest probability for which the positive one of two classes, or a label, is predicted.

        Raises:
            ConfigError: If the predictions do not depend on a threshold.
        """
        if threshold is not None:
            raise ConfigError("A threshold needs a model with two classes or a multi-label model; remove it.")
        numbers: list[Any] = (outputs[:, 0] if outputs.shape[1] == 1 else outputs).tolist()
        return numbers

    def beliefs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of each choice, ``[..., options]``, normalized over the last axis."""
        raise NotImplementedError

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the share of correct predictions of each sample, ``[B]`` in [0, 1].

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        raise NotImplementedError

    def scores(self, logits: Tensor) -> Tensor:
        """Return the predictions that metrics of all samples need, ``outputs`` or, for one number per sample, ``[B]``."""
        return self.outputs(logits)

    def truth(self, y: Tensor) -> Tensor:
        """Return the true values that correspond to ``scores``."""
        return y

    def constant(self, y: Tensor, classes: int) -> Tensor | None:
        """Return the best output that is the same for every input, ``[C]``; None if the task has none.

        Args:
            y: Targets that it describes, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        return None

    def predictions(self, y: Tensor) -> Tensor:
        """Return the number of predictions per sample, ``[B]``; loss and accuracy are means over predictions."""
        return torch.ones(len(y), dtype=torch.float64, device=y.device)

    def stored_outputs(self, logits: Tensor, correct: Tensor) -> Tensor:
        """Return what an evaluation stores of a batch until it computes metrics of all batches, ``[B, ...]``: the logits.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            correct: Share of correct predictions of each sample, ``[B]``.
        """
        return logits

    def tally(self, stored: Tensor, y: Tensor) -> Tensor:
        """Return the batch statistics that ``measure`` needs; statistics of several batches are added.

        Args:
            stored: Outputs of the model, ``[B, C]``, or what ``stored_outputs`` returned for them.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        return stored.new_zeros(0)

    def empty_tally(self, classes: int) -> Tensor:
        """Return the tally of no samples, which has the shape of every tally.

        Args:
            classes: Number of classes.
        """
        y = torch.zeros(1, dtype=torch.int64) if "one_class" in self.provides else torch.zeros((1, classes))
        return torch.zeros_like(self.tally(torch.zeros(1, classes), y))

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """Compute the metrics in ``extra_metrics``, and the primary metric if it is not a mean over samples.

        Args:
            tally: Sum of the statistics of all batches.
            loss: Mean loss over all samples.
        """
        return {}

    def measure_all(self, y: np.ndarray, scores: np.ndarray) -> dict[str, float]:
        """Compute the primary metric and metrics of ``extra_metrics`` that are not sums over samples; NaN if undefined.

        Args:
            y: True values, ``truth`` of the targets.
            scores: Predictions, from ``scores``.
        """
        return {}

    def requested_metrics(
        self, metrics: MetricSet, y: np.ndarray, scores: np.ndarray, where: str, defined: bool = True
    ) -> dict[str, float]:
        """Compute every requested metric, also custom ones; undefined values are NaN.

        Args:
            metrics: Requested metrics and class names.
            y: True values, ``truth`` of the targets.
            scores: Predictions, from ``scores``.
            where: Name of these samples for errors, such as ``"the test set"``.
            defined: Whether custom metrics must return a finite number. For single clients they may return NaN.

        Raises:
            ConfigError: If a custom metric fails, or does not return a number.
        """
        if not np.isfinite(scores).all():
            return dict.fromkeys(self.metric_names(metrics), math.nan)
        own = {name: custom_metric_value(name, f, y, scores, where, defined) for name, f in metrics.own.items()}
        return {**(self.metrics_of_all(y, scores, metrics) if metrics.known else {}), **own}

    def metric_names(self, metrics: MetricSet) -> tuple[str, ...]:
        """Return the names of the values of the requested metrics.

        Args:
            metrics: Requested metrics and class names.
        """
        return metrics.names

    def metrics_of_all(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute the metrics ``metrics.known`` from all predictions at once.

        Args:
            y: True values, ``truth`` of the targets.
            scores: Predictions, from ``scores``.
            metrics: Requested metrics and class names.
        """
        return {}

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute all metrics from a model's outputs, for labeled files.

        Args:
            y: Labels in their original units.
            outputs: Outputs of the model, ``[n, C]``.
            metrics: Class names, positive class, and class weights of the training.
        """
        raise NotImplementedError

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of a metric for bootstrap intervals; None if the metric has no interval.

        Args:
            name: Name of the metric.
            y: True values, as for ``metrics_of_all`` or ``metrics_of_outputs``.
            scores: Predictions, likewise.
            metrics: Class names and positive class.
        """
        return None

    def curves(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, Any]:
        """Return the curves of the test set for ``curves.json``.

        Args:
            y: True values, as for ``metrics_of_all``.
            scores: Predictions, likewise.
            metrics: Requested metrics and class names.
        """
        return {}

    def client_curve(self, name: str, y: np.ndarray, scores: np.ndarray) -> dict[str, Any] | None:
        """Return the curve of the test set or of a client's held-out samples for ``curves.json``; None if the task has none.

        Args:
            name: Name of the samples.
            y: True values, as for ``metrics_of_all``.
            scores: Predictions, likewise.
        """
        return None

    def compare_clients(self, ys: Sequence[Tensor]) -> dict[str, Any]:
        """Compare the targets of clients beyond their means; empty if there is nothing else to compare.

        Args:
            ys: Targets of each client.

        Returns:
            ``rows``, a dictionary per client, ``pooled`` for all of them together, and ``test``, a test of their equality.
        """
        return {}

    def held_out_sums(self, y: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return sums over samples from which ``metrics_of_sums`` computes metrics of all sites.

        Args:
            y: True values, as for ``metrics_of_all``.
            scores: Predictions, likewise.

        Returns:
            Numbers of samples in cells, int64 of shape ``cells``, and further sums, float64 ``[sums]``.
        """
        return np.zeros(0, np.int64), np.zeros(0)

    def metrics_of_sums(self, table: np.ndarray, sums: np.ndarray) -> dict[str, float]:
        """Compute metrics from sums over all sites; NaN if undefined.

        Args:
            table: Numbers of samples in cells, of shape ``cells``.
            sums: Further sums, from ``held_out_sums``.
        """
        return {}

    def client_fields(self, y: Tensor) -> dict[str, int]:
        """Return numbers of a client's held-out samples for ``clients.jsonl``.

        Args:
            y: Targets of the held-out samples.
        """
        return {}

    def divergence(self, teacher: Tensor, student: Tensor, t: float = 1.0) -> Tensor:
        """Compute the mean over samples (and labels) of ``KL(teacher || student)`` at temperature ``t``.

        Args:
            teacher: Logits of the teacher, ``[B, C]``.
            student: Logits of the student, ``[B, C]``.
            t: Temperature.
        """
        log_p, log_q = self.beliefs(teacher / t), self.beliefs(student / t)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    def disagreement(self, teacher: Tensor, student: Tensor, t: float = 1.0) -> Tensor:
        """Compute ``1 - JS``, with the Jensen-Shannon divergence averaged over samples (and labels).

        The value is 1 if the models agree, and at least ``1 - ln 2``. With ``m`` the mean of ``p`` and ``q``,
        ``log(p / m) = ln 2 - softplus(log q - log p)``, which is finite for all logits and exactly 0 for ``p = q``.

        Args:
            teacher: Logits of the teacher, ``[B, C]``.
            student: Logits of the student, ``[B, C]``.
            t: Temperature.
        """
        log_p, log_q = self.beliefs(teacher / t), self.beliefs(student / t)
        p_term = log_p.exp() * (math.log(2) - F.softplus(log_q - log_p))
        q_term = log_q.exp() * (math.log(2) - F.softplus(log_p - log_q))
        return 1 - 0.5 * (p_term + q_term).sum(-1).mean()


def six_digits(values: np.ndarray) -> list[float]:
    """Return probabilities ``[n]`` with six significant digits."""
    return [float(f"{value:.6g}") for value in values]
