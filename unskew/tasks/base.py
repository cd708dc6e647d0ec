"""Interface of tasks, which define loss, metrics and interpretation of a model's logits."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


class Task:
    """Interface of a task. ``C`` is the number of classes or labels, ``B`` the number of samples in a batch.

    A task defines the choices that a model makes for a sample (one of all classes, or yes or no for each label) and
    their probabilities. With these, divergences between two models are computed in the same way for every task.
    """

    name: ClassVar[str]

    scored: ClassVar[str] = "accuracy"
    """Primary metric, for best rounds, targets and early stopping; higher is better, and 1 is perfect."""

    labeled: ClassVar[bool] = True
    """True if samples have classes or labels that can be counted."""

    extra_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that ``measure`` returns in addition to loss and primary metric."""

    lower_is_better: ClassVar[tuple[str, ...]] = ()
    """Metrics, including the loss, whose lowest value over the rounds is reported as the best."""

    @property
    def unweighted(self) -> Task:
        """Task without class weights, used for evaluation."""
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

    def counts(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples of each class or label, ``[C]``.

        Args:
            y: Targets of all samples, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def pairs(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples that have both of two labels, ``[C, C]``; the diagonal is ``counts``.

        Args:
            y: Targets of all samples, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def targets(self, labels: Tensor, classes: int) -> Tensor:
        """Return the targets of samples that have one label each.

        Args:
            labels: One label per sample, ``[B]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def scores(self, logits: Tensor) -> Tensor:
        """Return the inputs of ``MetricSet``: probabilities, or for regression, predictions in the targets' units."""
        return self.probabilities(logits)

    def truth(self, y: Tensor) -> Tensor:
        """Return the true values that correspond to ``scores``."""
        return y

    def named_counts(self, y: Tensor, names: Collection[str]) -> dict[str, int]:
        """Return the number of samples of each class or label by its name.

        Args:
            y: Targets, ``[n]`` or ``[n, L]``.
            names: Names of all classes or labels.
        """
        return dict(zip(names, self.counts(y, len(names)).tolist(), strict=True))

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

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the batch statistics that ``measure`` needs; statistics of several batches are added.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        return logits.new_zeros(0)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """Compute the metrics in ``extra_metrics``, and the primary metric if it is not a mean over samples.

        Args:
            tally: Sum of the statistics of all batches.
            loss: Mean loss over all samples.
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
