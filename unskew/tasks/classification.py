"""Classification, multi-label classification, and language modeling (next-token prediction)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import DataError
from unskew.functorch_api import constant, is_mapped
from unskew.tasks.base import Task
from unskew.tasks.curves import classifier_curves
from unskew.tasks.intervals import class_statistic, mean_statistic, sums_statistic
from unskew.tasks.metrics import METRICS, SMALLEST, TINY, TWO_CLASSES, MetricSet, Statistic, metric_names

NOTHING = -1
"""Target of positions without a next token, such as the end of a text."""
TRUNCATED = -2
"""Target that has no loss and marks a text whose answer is truncated, so that it is not an exact match."""
TRANSFORMERS_PADDING = -100
"""Target of such positions in the package transformers, and there also the padding of token ids."""
MOST_RECALLS = 10
"""Maximum number of classes whose recalls are computed for labeled files."""


def cross_entropy(logits: Tensor, y: Tensor, weights: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy as ``torch.nn.functional.cross_entropy`` does, and the same numbers faster under ``vmap``.

    There, PyTorch computes the loss of classes in Python, for which it first imports sympy.

    Args:
        logits: Logits, ``[B, C]``.
        y: Classes ``[B]``, or class probabilities ``[B, C]``. With ``sum``, the class ``NOTHING`` has no loss.
        weights: Weight of each class, with ``none``; None means 1.
        reduction: ``mean`` over the batch, ``sum``, or ``none``.
    """
    total = reduction == "sum"
    if y.is_floating_point() or not is_mapped(logits, y):
        return F.cross_entropy(logits, y, weights, ignore_index=NOTHING if total else -100, reduction=reduction)
    scores = F.log_softmax(logits, dim=1)
    scores = scores if weights is None else scores * weights
    losses = -scores.gather(1, (y.clamp_min(0) if total else y)[:, None]).squeeze(1)
    if total:
        return losses.where(y != NOTHING, 0).sum()
    return losses.sum() / len(y) if reduction == "mean" else losses


@dataclass(frozen=True)
class Classification(Task):
    """One class per sample, ``y [B]``: mean cross-entropy, softmax, accuracy.

    Attributes:
        name: Name of the task.
        provides: What the task provides of a sample.
        linear_model: Model whose coefficients have intervals.
        client_events: Samples that count as the events of a client.
        ratio: What the exponential of a coefficient multiplies.
        requestable: Metrics that a run may request.
        weighted: Whether the loss may have class weights.
        weights: Class weights, by which the loss of each sample is multiplied; empty means no weights.
        trained_with: Class weights of the training, for which probabilities and loss are corrected; empty means none.
    """

    name: ClassVar[str] = "classification"
    provides: ClassVar[frozenset[str]] = frozenset(("one_class", "counts", "vector"))
    linear_model: ClassVar[str] = "logistic"
    client_events: ClassVar[str] = "of the class that is rarest over all clients"
    ratio: ClassVar[str] = "odds"
    requestable: ClassVar[tuple[str, ...]] = tuple(METRICS)
    weighted: ClassVar[bool] = True

    weights: tuple[float, ...] = ()
    trained_with: tuple[float, ...] = ()

    @property
    def constants(self) -> dict[str, tuple[float, ...]]:
        """Class weights of the training, if there are any."""
        return {"class_weights": self.weights} if self.weights else {}

    def with_constants(self, constants: Mapping[str, Sequence[float]], classes: int) -> Classification:
        """Return the classification that corrects for the class weights of the training."""
        weights = tuple(constants.get("class_weights", ()))
        if {*constants} - {"class_weights"} or (weights and (len(weights) != classes or min(weights) <= 0)):
            raise ValueError("the constants are not one positive class weight per class")
        return Classification(trained_with=weights)

    def with_weights(self, weights: tuple[float, ...]) -> Task:
        """Return the classification with class weights."""
        return Classification(weights)

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return the classes ``[n]`` as int64."""
        if y.dim() == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.dim() != 1:
            raise DataError(
                f"The labels of {who} have shape {tuple(y.shape)}; expected one class index per sample. "
                'For several labels per sample, set task="multilabel"; for a class per pixel, task="segmentation".'
            )
        if y.is_floating_point() and not bool((torch.isfinite(y) & (y == y.round())).all()):
            raise DataError(
                f"The labels of {who} are not integers, but classification requires class indices. For regression, use a "
                'table with task=regression, or in Python Federation.from_arrays(..., task="regression").'
            )
        return y.to(torch.int64).contiguous()

    def check(self, y: Tensor, classes: int, who: str, x: Tensor | None = None) -> None:
        """Validate that the classes are from 0 to ``classes - 1``."""
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= classes):
            bad = int(y.min()) if int(y.min()) < 0 else int(y.max())
            raise DataError(
                f"The labels of {who} contain {bad}, but with {classes} classes they must be 0 to {classes - 1}."
            )

    def distribution(self, y: Tensor, classes: int) -> Tensor:
        """Return 1 for the class of each sample and 0 for the others, ``[n, C]``."""
        return F.one_hot(y.long(), classes).double()

    def decisions(self, outputs: np.ndarray, metrics: MetricSet, threshold: float | None = None) -> list[str]:
        """Return the name of the predicted class of each sample."""
        names = metrics.class_names
        if threshold is None:
            return [names[k] for k in metrics.decided(outputs)]
        if len(names) != 2:
            return super().decisions(outputs, metrics, threshold)
        positive = metrics.positive
        return [names[positive if p >= threshold else 1 - positive] for p in outputs[:, positive]]

    def metrics_of_all(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute the requested metrics of ``METRICS``."""
        predictions = metrics.predictions(y, scores)
        known = [value for metric in metrics.known for value in METRICS[metric](predictions)]
        return dict(zip(metric_names(metrics.known, metrics.class_names), known, strict=True))

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute accuracy, loss and all metrics; recalls only of few classes."""
        classes = outputs.shape[1]
        left_out = [*(["recall"] if classes > MOST_RECALLS else []), *(TWO_CLASSES if classes != 2 else ())]
        metrics = replace(metrics, known=tuple(name for name in METRICS if name not in left_out))
        return {
            "accuracy": (metrics.decided(outputs) == y).mean(),
            "loss": -np.log(np.maximum(outputs[np.arange(len(y)), y], SMALLEST)).mean(),
            **self.metrics_of_all(y, outputs, metrics),
        }

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of a classification metric."""
        return class_statistic(name, metrics.predictions(y, scores), metrics.class_names)

    def curves(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, Any]:
        """Return ROC, precision and recall, calibration and confusion matrix, if metrics are requested."""
        return classifier_curves(y, scores, metrics) if metrics.known else {}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``logits [B, C]`` and ``y [B]`` (or class probabilities ``[B, C]``)."""
        return cross_entropy(self._corrected(logits), y) if not self.weights else self.losses(logits, y).mean()

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each sample."""
        weights = constant(self.weights, logits) if self.weights else None
        return cross_entropy(self._corrected(logits), y, weights, "none")

    @property
    def unweighted(self) -> Task:
        """Classification for evaluation, without class weights in the loss."""
        return Classification(trained_with=self.weights)

    def _corrected(self, logits: Tensor) -> Tensor:
        """Correct logits for the class weights of the training.

        With weights ``w``, the softmax estimates ``w_c P(c | x)``, normalized, which is the posterior after a shift of the
        prior (Saerens, Latinne, Decaestecker 2002, Neural Computation 14, Equation 2.4). Dividing by ``w`` restores
        ``P(c | x)``.
        """
        if not self.trained_with:
            return logits
        return logits - constant(self.trained_with, logits).log()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax over classes, corrected for the class weights of the training."""
        return torch.softmax(self._corrected(logits), dim=-1)

    def beliefs(self, logits: Tensor) -> Tensor:
        """Return the log-softmax over classes, ``[B, C]``."""
        return F.log_softmax(self._corrected(logits), dim=-1)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return 1.0 for samples whose label has the largest logit, otherwise 0.0."""
        return (logits.argmax(dim=-1) == y).to(torch.float64)

    def counts(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples per class."""
        return torch.bincount(y, minlength=classes)

    def constant(self, y: Tensor, classes: int) -> Tensor:
        """Return the log-shares of the classes; an absent class counts as half a sample, so that the loss is finite."""
        return self.counts(y, classes).clamp_min(0.5).to(torch.float32).log()

    def pairs(self, y: Tensor, classes: int) -> Tensor:
        """Return a diagonal matrix, because no sample has two classes."""
        return torch.diag(self.counts(y, classes))

    def targets(self, labels: Tensor, classes: int) -> Tensor:
        """Return the labels unchanged."""
        return labels


class MultiLabel(Task):
    """Any number of labels per sample, ``y [B, L]`` of 0 and 1: binary cross-entropy and sigmoid for each label.

    A label is predicted if its probability is above 0.5. The metrics are those of multi-label papers: precision, recall
    and F1 averaged over the ``L`` labels (``macro_``; ``macro_f1`` is the mean of the labels' F1), over all decisions
    (``micro_``), and F1 per sample, averaged over samples (``samples_f1``). Divisions by zero give 0, as in
    scikit-learn.
    """

    name: ClassVar[str] = "multilabel"
    provides: ClassVar[frozenset[str]] = frozenset(("counts", "vector"))
    extra_metrics: ClassVar[tuple[str, ...]] = (
        *("macro_precision", "macro_recall", "macro_f1", "micro_precision", "micro_recall", "micro_f1", "samples_f1"),
    )

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return the labels ``[n, L]`` of 0 and 1 as uint8."""
        if y.dim() != 2 or y.shape[1] < 1:
            raise DataError(f"The labels of {who} have shape {tuple(y.shape)}. Multi-label data require [n, labels].")
        if not bool(((y == 0) | (y == 1)).all()):
            raise DataError(f"The labels of {who} must be 0 or 1, where 1 means that the sample has the label.")
        return y.to(torch.uint8).contiguous()

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy of ``logits [B, L]`` and ``y [B, L]``, averaged over samples and labels."""
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the labels of each sample."""
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none").mean(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the sigmoid for each label."""
        return torch.sigmoid(logits)

    def beliefs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of yes and no for each label, ``[B, L, 2]``."""
        return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], dim=-1)

    def decisions(self, outputs: np.ndarray, metrics: MetricSet, threshold: float | None = None) -> list[list[str]]:
        """Return the list of predicted labels of each sample."""
        chosen = outputs > 0.5 if threshold is None else outputs >= threshold
        return [[metrics.class_names[k] for k in np.flatnonzero(row)] for row in chosen]

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute accuracy, loss and all metrics."""
        chance = np.clip(outputs, TINY, 1 - TINY)
        tally = self.tally(torch.from_numpy(outputs - 0.5), torch.from_numpy(y))
        loss = -np.log(np.where(y > 0, chance, 1 - chance)).mean()
        return {"accuracy": ((outputs > 0.5) == (y > 0)).mean(), "loss": loss, **self.measure(tally, loss)}

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of a metric of labels."""
        chance, target = torch.from_numpy(scores.astype(np.float64)), torch.from_numpy(y)
        if name == "loss":
            likelihood = torch.where(target > 0, chance, 1 - chance).clamp(TINY, 1)
            return mean_statistic(-likelihood.log().mean(1).numpy())
        logits = chance - 0.5  # a label is predicted above 0
        if name == "accuracy":
            return mean_statistic(self.correct(logits, target).numpy())
        return sums_statistic(name, self, logits, target)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the share of correctly predicted labels per sample, including absent labels, ``[B]``."""
        return ((logits > 0) == (y > 0)).to(torch.float64).mean(dim=-1)

    def counts(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples that have each label."""
        return y.sum(0, dtype=torch.int64)

    def constant(self, y: Tensor, classes: int) -> Tensor:
        """Return the log-odds of each label; no share is nearer to 0 or 1 than half a sample."""
        n = max(1, len(y))
        return torch.logit(self.counts(y, classes).to(torch.float32).clamp(0.5, n - 0.5) / n)

    def pairs(self, y: Tensor, classes: int) -> Tensor:
        """Count the samples that have both of two labels."""
        y = y.to(torch.float64)
        return (y.T @ y).to(torch.int64)

    def targets(self, labels: Tensor, classes: int) -> Tensor:
        """Return one-hot rows, ``[B, L]``."""
        return (labels[:, None] == torch.arange(classes, device=labels.device)).to(torch.uint8)

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return true positives, predicted positives and positives per label, ``[3, L + 1]``.

        The last column has the sum of the samples' F1 and the number of samples.
        """
        predicted, actual = logits > 0, y > 0
        right = predicted & actual
        by_label, by_sample = (
            torch.stack([part.sum(axis) for part in (right, predicted, actual)]).to(torch.float64) for axis in (0, -1)
        )
        f1 = precision_recall_f1(by_sample)[2]
        by_sample = torch.stack([f1.sum(), f1.new_tensor(len(f1)), f1.new_tensor(0)])
        return torch.cat([by_label, by_sample[:, None]], dim=1)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """Compute macro- and micro-averaged precision, recall and F1, and the mean F1 per sample."""
        by_label, (f1, samples, _) = tally[:, :-1], tally[:, -1].tolist()
        means = [float(values.mean()) for values in precision_recall_f1(by_label)]
        overall = [float(value) for value in precision_recall_f1(by_label.sum(1))]
        return dict(zip(self.extra_metrics, [*means, *overall, f1 / max(1.0, samples)], strict=True))


class LanguageModeling(Task):
    """Next-token prediction, ``y [B, L]`` with -1 for no target: mean cross-entropy per token, in nats.

    Logits are ``[B, L, V]``. Accuracy is the share of correctly predicted tokens. Positions without a target, such as
    padding or the prompt of an answer, are ignored. The additional metrics are the perplexity ``exp(loss)`` and the exact
    match, the share of texts all of whose targets have the largest logit, given the true tokens before them (teacher
    forcing). A text with the target -2, which means that its answer is truncated, is not a match.
    """

    name: ClassVar[str] = "language"
    tokens: ClassVar[bool] = True
    extra_metrics: ClassVar[tuple[str, ...]] = ("perplexity", "exact_match")
    shown: ClassVar[tuple[str, ...]] = extra_metrics
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "perplexity")

    @property
    def judged_by(self) -> str:
        """Loss, because the accuracy of next tokens changes little while a model improves."""
        return "loss"

    def names_with_intervals(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return no names, because the tokens of a text are not independent."""
        return ()

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return the token ids ``[n, L]`` as int64, -1 for positions without a target."""
        if y.dim() != 2 or y.is_floating_point():
            raise DataError(
                f"The targets of {who} must be integer token ids [n, L], with -1 for positions without a target."
            )
        return torch.where(y == TRANSFORMERS_PADDING, NOTHING, y).to(torch.int64)

    def check(self, y: Tensor, classes: int, who: str, x: Tensor | None = None) -> None:
        """Validate that targets are tokens, -1 or -2, and that the inputs are token ids of the same shape."""
        if x is not None and (x.dtype != torch.int64 or x.shape != y.shape):
            raise DataError(f"The texts of {who} must be token ids (int64) with the shape of their targets.")
        if len(y) and (int(y.min()) < TRUNCATED or int(y.max()) >= classes):
            raise DataError(f"The targets of {who} must be -1, -2 or tokens from 0 to {classes - 1}.")

    def num_outputs(self, ys: Sequence[Tensor]) -> int:
        """Return the number of tokens, of which the largest occurs."""
        return max(int(y.max()) for y in ys) + 1

    def distribution(self, y: Tensor, classes: int) -> Tensor:
        """Return no numbers, ``[n, 0]``."""
        return torch.zeros(len(y), 0, dtype=torch.float64)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over all targets of the batch (not over its texts); 0 without targets."""
        total = cross_entropy(logits.flatten(0, -2), y.flatten().clamp_min(NOTHING), reduction="sum")
        return total / (y >= 0).sum().clamp_min(1)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the targets of each text; 0 without targets."""
        each = F.cross_entropy(logits.transpose(1, 2), y.clamp_min(NOTHING), ignore_index=NOTHING, reduction="none")
        return each.sum(-1) / (y >= 0).sum(-1).clamp_min(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax over the vocabulary, ``[B, L, V]``."""
        return torch.softmax(logits, dim=-1)

    def beliefs(self, logits: Tensor) -> Tensor:
        """Return the log-softmax over the vocabulary."""
        return F.log_softmax(logits, dim=-1)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the share of each text's targets that have the largest logit."""
        right = ((logits.argmax(dim=-1) == y) & (y >= 0)).sum(-1)
        return right.to(torch.float64) / self.predictions(y).clamp_min(1)

    def predictions(self, y: Tensor) -> Tensor:
        """Return the number of targets of each text."""
        return (y >= 0).sum(-1).to(torch.float64)

    def stored_outputs(self, logits: Tensor, correct: Tensor) -> Tensor:
        """Return the share of each text's targets that are correct, because there are too many logits to store."""
        return correct

    def tally(self, stored: Tensor, y: Tensor) -> Tensor:
        """Return the number of exact matches, and of rows with targets, ``[2]``."""
        matches = (stored == 1) & (y != TRUNCATED).all(-1)
        return torch.stack([matches.sum(), (self.predictions(y) > 0).sum()]).to(torch.float64)

    def empty_tally(self, classes: int) -> Tensor:
        """Return the tally of no samples."""
        return torch.zeros(2, dtype=torch.float64)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """Compute the perplexity, which is infinite if it would overflow, and the exact match, 0 without texts."""
        matches, texts = tally.tolist()
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"perplexity": perplexity, "exact_match": matches / max(1.0, texts)}


def precision_recall_f1(tally: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute precision, recall and F1 ``[...]`` from ``tally [3, ...]``; 0 instead of a division by zero.

    >>> precision_recall_f1(torch.tensor([[3.0, 0.0], [4.0, 0.0], [6.0, 0.0]]))
    (tensor([0.7500, 0.0000]), tensor([0.5000, 0.0000]), tensor([0.6000, 0.0000]))
    """
    right, predicted, actual = tally
    return right / predicted.clamp_min(1), right / actual.clamp_min(1), 2 * right / (predicted + actual).clamp_min(1)
