"""Interface of tasks: targets, and interpretation of a model's logits."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


class Task:
    """One kind of target. ``C`` is the number of classes or labels, ``B`` that of the samples of a batch.

    A task says which choices a model makes for a sample (one among all classes; or yes or no for each label) and how likely
    it holds each of them. Divergences between two models are then the same for every task.
    """

    name: ClassVar[str]

    scored: ClassVar[str] = "accuracy"
    """The figure that decides best rounds, targets and early stopping; higher is better, and 1 is perfect."""

    labeled: ClassVar[bool] = True
    """Whether samples have classes or labels that can be counted."""

    figures: ClassVar[tuple[str, ...]] = ()
    """Names of the figures that ``measure`` gives beside the loss and the figure that is scored."""

    lower_is_better: ClassVar[tuple[str, ...]] = ()
    """Figures, the loss included, whose best value over the rounds is told and is the lowest one."""

    @property
    def unweighted(self) -> Task:
        """Return the task without class weights, by which a model is evaluated."""
        return self

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        raise NotImplementedError

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample as a batch of its own, ``[B]``.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        raise NotImplementedError

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the predicted probabilities, ``[B, C]``."""
        raise NotImplementedError

    def beliefs(self, logits: Tensor) -> Tensor:
        """Logarithms of the probabilities of each choice: ``[..., options]``, where the last axis sums to 1."""
        raise NotImplementedError

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Share of each sample's predictions that are right, 0 to 1: ``[B]``.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        raise NotImplementedError

    def counts(self, y: Tensor, classes: int) -> Tensor:
        """Samples of each class or label, ``[C]``.

        Args:
            y: Targets of all samples, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def pairs(self, y: Tensor, classes: int) -> Tensor:
        """Samples that have both of two labels, ``[C, C]``; the diagonal is ``counts``.

        Args:
            y: Targets of all samples, ``[n]`` or ``[n, L]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def targets(self, labels: Tensor, classes: int) -> Tensor:
        """Targets of samples that have one label each, ``labels [B]``.

        Args:
            labels: One label per sample, ``[B]``.
            classes: Number of classes.
        """
        raise NotImplementedError

    def scores(self, logits: Tensor) -> Tensor:
        """Return what metrics of all predictions take: probabilities, of regression predictions in the targets' units."""
        return self.probabilities(logits)

    def truth(self, y: Tensor) -> Tensor:
        """Return the true values that belong to ``scores``."""
        return y

    def predictions(self, y: Tensor) -> Tensor:
        """Return the number of predictions per sample, ``[B]``; loss and accuracy are means over predictions."""
        return torch.ones(len(y), dtype=torch.float64, device=y.device)

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the batch statistics that ``measure`` needs; those of several batches are added.

        Args:
            logits: Outputs of the model, ``[B, C]``.
            y: Targets, ``[B]`` or ``[B, L]``.
        """
        return logits.new_zeros(0)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """The task's ``figures``, and the scored one where it is no mean over samples, from a tally and the mean loss.

        Args:
            tally: Sum of the statistics of all batches.
            loss: Mean loss over all samples.
        """
        return {}

    def divergence(self, teacher: Tensor, student: Tensor, t: float = 1.0) -> Tensor:
        """Mean over samples (and labels) of ``KL(teacher || student)`` at temperature ``t``, from logits ``[B, C]``.

        Args:
            teacher: Logits of the teacher, ``[B, C]``.
            student: Logits of the student, ``[B, C]``.
            t: Temperature.
        """
        log_p, log_q = self.beliefs(teacher / t), self.beliefs(student / t)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    def disagreement(self, teacher: Tensor, student: Tensor, t: float = 1.0) -> Tensor:
        """``1 - JS`` with the Jensen-Shannon divergence averaged over samples (and labels), from logits ``[B, C]``.

        1 where the models agree, at least ``1 - ln 2``. With ``m`` the mean of ``p`` and ``q``,
        ``log(p / m) = ln 2 - softplus(log q - log p)``, which no logit can make infinite or anything but 0 for ``p = q``.

        Args:
            teacher: Logits of the teacher, ``[B, C]``.
            student: Logits of the student, ``[B, C]``.
            t: Temperature.
        """
        log_p, log_q = self.beliefs(teacher / t), self.beliefs(student / t)
        p_term = log_p.exp() * (math.log(2) - F.softplus(log_q - log_p))
        q_term = log_q.exp() * (math.log(2) - F.softplus(log_p - log_q))
        return 1 - 0.5 * (p_term + q_term).sum(-1).mean()
