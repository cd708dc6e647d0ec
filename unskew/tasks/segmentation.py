"""Semantic segmentation: one class per pixel, with cross-entropy and Dice loss per image, and metrics of overlap.

Loss of an image, with the softmax ``p``, the truth ``y`` and the foreground classes ``P`` that occur in the image:
``mean over pixels of w_y CE + weight (1 - mean over c in P of (2 sum p_c y_c + s) / (sum p_c + sum y_c + s))``.
Soft Dice: Milletari, Navab, Ahmadi 2016, arXiv:1606.04797.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from unskew.errors import ConfigError, DataError
from unskew.functorch_api import constant
from unskew.tasks.base import OUTSIDE, Task
from unskew.tasks.hausdorff_distance import mean_hd95
from unskew.tasks.intervals import mean_statistic, sums_statistic
from unskew.tasks.metrics import SMALLEST, MetricSet, Statistic

SMOOTHING = 1e-5
"""Summand ``s`` of numerator and denominator of the soft Dice."""
BOTH = (1.0, 1.0)
"""Weights of cross-entropy and Dice in the default loss."""
SHARE = "share("
"""Beginning of the names of columns with the share of a class in the pixels of an image."""


@dataclass(frozen=True)
class Segmentation(Task):
    """One class per pixel, ``y [B, *sides]`` as uint8, where ``OUTSIDE`` is a pixel without truth; class 0 is the background.

    Logits are ``[B, C, *sides]``. The primary metric is the mean over images of the mean Dice over the foreground classes
    with predicted or true pixels, 1 if there are none. All metrics but ``hd95`` follow from sums over images.

    Attributes:
        class_names: Names of the classes; empty numbers them.
        values: Gray value of each class in files of masks; empty means 0 to C - 1.
        ignore: Gray value of pixels without truth, or None.
        kind: Terms of the loss: ``ce+dice``, ``ce`` or ``dice``.
        weight: Weight of the Dice term of ``ce+dice``.
        weights: Class weights of the cross-entropy, ``[C]``; empty if there are none.
    """

    name: ClassVar[str] = "segmentation"
    provides: ClassVar[frozenset[str]] = frozenset()
    pixels: ClassVar[bool] = True
    section: ClassVar[str] = "segmentation"
    loss_options: ClassVar[tuple[str, ...]] = ("ce+dice", "ce+dice:WEIGHT", "ce", "dice")
    weighted: ClassVar[bool] = True
    scored: ClassVar[str] = "dice"
    requestable: ClassVar[tuple[str, ...]] = ("hd95",)

    class_names: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    ignore: int | None = None
    kind: str = "ce+dice"
    weight: float = 1.0
    weights: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, if they are configured."""
        return self.class_names

    @property
    def extra_metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the metrics in addition to loss and Dice; those of classes only if the classes have names."""
        return (*_metric_names(self.class_names), "dice_pooled", "accuracy")

    @property
    def constants(self) -> dict[str, tuple[float, ...]]:
        """Known gray values of classes and of ignored pixels, class weights, and weights of the loss's terms, if not 1."""
        ignore = () if self.ignore is None else (self.ignore,)
        terms = {"ce": (1.0, 0.0), "dice": (0.0, 1.0)}.get(self.kind, (1.0, self.weight))
        loss = () if terms == BOTH else terms
        known = {"values": self.values, "ignore": ignore, "class_weights": self.weights, "loss": loss}
        return {name: tuple(map(float, values)) for name, values in known.items() if values}

    def with_constants(self, constants: Mapping[str, Sequence[float]], classes: int) -> Segmentation:
        """Return the segmentation with gray values and loss; class weights have no effect on predictions and metrics."""
        weights = tuple(constants.get("class_weights", ()))
        numbers = [*constants.get("values", ()), *constants.get("ignore", ())]
        values, ignore = (tuple(int(level) for level in constants.get(name, ())) for name in ("values", "ignore"))
        levels = {*values, *ignore}
        valid = levels == {*numbers} and len(levels) == len(numbers) and all(0 <= level <= OUTSIDE for level in levels)
        valid = valid and len(values) in (0, classes) and len(ignore) < 2 and min(weights, default=1) > 0
        terms = tuple(constants.get("loss", BOTH))
        valid = valid and (terms == (0, 1) or (len(terms) == 2 and terms[0] == 1 and 0 <= terms[1] < math.inf))
        known = {"values", "ignore", "class_weights", "loss"}
        if {*constants} - known or not valid or len(weights) not in (0, classes):
            raise ValueError(
                "the constants are not a gray value and a positive weight per class, one of ignored pixels, and the weights "
                "of cross-entropy and Dice"
            )
        kind = "dice" if not terms[0] else "ce+dice" if terms[1] else "ce"
        return replace(self, values=values, ignore=next(iter(ignore), None), kind=kind, weight=terms[1] or 1.0)

    def accepts(self, constants: Mapping[str, Sequence[float]]) -> str:
        """Return why gray values or loss are not the configured ones; those that are not configured may be any."""
        values = tuple(constants.get("values", ()))
        if self.values and values != self.values:
            return "its gray values of the classes are not those of segmentation.values"
        if tuple(constants.get("ignore", ())) != (() if self.ignore is None else (self.ignore,)):
            return "its ignored gray value is not that of segmentation.ignore"
        loss = self.constants.get("loss", BOTH)
        if tuple(constants.get("loss", loss)) != loss:  # a data schema leaves the loss to the experiment
            return "its loss is not that of the experiment"
        return ""

    def configured(self, options: Any) -> Segmentation:
        """Return the segmentation with classes and gray values of the configuration.

        Args:
            options: Section ``segmentation`` of the configuration; what it does not set stays unchanged.

        Raises:
            ConfigError: If options contradict each other, or the classes of the data.
        """
        names, values = options.classes or self.class_names, options.values or self.values
        names = names or tuple(map(str, values))
        ignore = self.ignore if options.ignore is None else options.ignore
        problems = {
            f"has one class, but a segmentation needs at least two: {', '.join(names)}": len(names) == 1,
            f"has {len(names)} classes, but {len(values)} values": bool(values) and len(names) != len(values),
            f"has {len(names)} classes, but the data have {len(self.class_names)}": bool(self.class_names)
            and len(names) != len(self.class_names),
            "names a class twice": len({*names}) < len(names),
            "has a value twice, or ignores the value of a class": len({*values, ignore}) <= len(values),
        }
        for problem in (text for text, wrong in problems.items() if wrong):
            raise ConfigError(f"segmentation {problem}.")
        return replace(self, class_names=names, values=values, ignore=ignore)

    def described(self, levels: set[int]) -> Segmentation:
        """Return the segmentation with classes and values for masks with these gray values, if it has none.

        Without configured values, these are 0 to C - 1, or 0 and 255 for two classes.

        Args:
            levels: Gray values of all masks.

        Raises:
            DataError: If the classes are not configured, and do not follow from the values.
        """
        levels = levels - {self.ignore}
        names, values = self.class_names, self.values
        if not values:
            two = OUTSIDE in levels and (levels <= {0, OUTSIDE} if not names else len(names) == 2 and 1 not in levels)
            if not two and not names and levels != {*range(len(levels))}:
                few = ", ".join(map(str, sorted(levels)[:10])) + ("" if len(levels) <= 10 else ", ...")
                raise DataError(
                    f"The masks have the gray values {few}. Set segmentation.values to the value of each class, and "
                    "segmentation.classes to their names. JPEG files change gray values."
                )
            values = (0, OUTSIDE) if two else tuple(range(len(names) or len(levels)))
            names = names or (("background", "foreground") if two else tuple(map(str, values)))
        return replace(self, class_names=names, values=values)

    def named(self, names: Sequence[str]) -> Segmentation:
        """Return the segmentation with the names of its classes."""
        return replace(self, class_names=tuple(names))

    @property
    def unweighted(self) -> Task:
        """Segmentation without class weights, used for evaluation."""
        return replace(self, weights=())

    def with_loss(self, loss: str) -> Task:
        """Return the segmentation with the loss ``ce+dice``, ``ce+dice:WEIGHT``, ``ce`` or ``dice``."""
        kind, _, text = loss.partition(":")
        try:
            weight = float(text or 1)
        except ValueError:
            weight = 0.0
        if not 0 < weight < math.inf:
            raise ConfigError(f"{loss!r}: write ce+dice:WEIGHT with a number above 0, the weight of the Dice term.")
        return replace(self, kind=kind, weight=weight)

    def with_weights(self, weights: tuple[float, ...]) -> Task:
        """Return the segmentation with class weights of the cross-entropy."""
        if self.kind == "dice":
            raise ConfigError(
                "class_weights weight the cross-entropy, which loss=dice does not have. Remove one of them."
            )
        return replace(self, weights=weights)

    def recoded(self, y: Tensor, who: str) -> Tensor:
        """Return classes by the configured gray values, and ``OUTSIDE`` for ignored pixels."""
        if y.is_floating_point() or (not self.values and self.ignore is None):
            return y
        y = y.to(torch.int64)
        outside = {OUTSIDE, self.ignore} - {*self.values, None}
        ignored = torch.isin(y, y.new_tensor([*outside]))
        if not self.values:
            return y.masked_fill(ignored, OUTSIDE)
        levels, order = y.new_tensor(self.values).sort()
        place = torch.searchsorted(levels, y).clamp_max(len(levels) - 1)
        wrong = y[(levels[place] != y) & ~ignored]
        if len(wrong):
            raise DataError(
                f"The masks of {who} contain {int(wrong[0])}, but the classes have {', '.join(map(str, self.values))}. Add "
                "it to segmentation.values or segmentation.ignore, or correct the masks."
            )
        return order[place].masked_fill(ignored, OUTSIDE)

    def read(self, y: Tensor, who: str) -> Tensor:
        """Return the classes ``[n, *sides]`` as uint8."""
        if y.dim() not in (3, 4) or y.is_floating_point() or y.dtype == torch.bool:
            raise DataError(
                f"The masks of {who} have shape {tuple(y.shape)} and type {y.dtype}; expected one integer class per pixel, "
                "[n, height, width], or for volumes [n, depth, height, width]."
            )
        if y.numel() and (int(y.min()) < 0 or int(y.max()) > OUTSIDE):
            raise DataError(f"The masks of {who} have values outside of 0 to {OUTSIDE}.")
        y = y.to(torch.uint8).contiguous()
        empty = torch.nonzero((y == OUTSIDE).flatten(1).all(1))[:, 0].tolist()
        if empty:
            raise DataError(f"The mask {empty[0]} of {who} has only ignored pixels. Remove the image.")
        return y

    def check(self, y: Tensor, classes: int, who: str, x: Tensor | None = None) -> None:
        """Validate that the classes are from 0 to ``classes - 1``, and masks have the sides of their images."""
        if classes < 2:
            raise DataError(f"The masks of {who} have one class, but a segmentation needs at least two.")
        if x is not None and x.shape[2:] != y.shape[1:]:
            raise DataError(
                f"The masks of {who} have the sides {tuple(y.shape[1:])}, but their images {tuple(x.shape[2:])}. Volumes "
                "need an axis of channels: [n, channels, depth, height, width]."
            )
        wrong = y[(y >= classes) & (y != OUTSIDE)]
        if len(wrong):
            raise DataError(
                f"The masks of {who} contain {int(wrong[0])}, but with {classes} classes they must be 0 to {classes - 1}, or "
                f"{OUTSIDE} for pixels without truth."
            )

    def num_outputs(self, ys: Sequence[Tensor]) -> int:
        """Return the number of classes, of which the largest occurs."""
        return max(int(y[y != OUTSIDE].max()) for y in ys) + 1

    def distribution(self, y: Tensor, classes: int) -> Tensor:
        """Return the share of each class in the pixels of each image, ``[n, C]``."""
        return pixel_shares(y, classes)

    def counts(self, y: Tensor, classes: int) -> Tensor:
        """Count the pixels of each class, ``[C]``, for class weights."""
        return torch.bincount(y.flatten(), minlength=OUTSIDE + 1)[:classes]

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the images of a batch."""
        return self.losses(logits, y).mean()

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each image; 0 for images without truth."""
        logs = torch.log_softmax(logits, 1).flatten(2)
        truth = _one_hot(y, logits.shape[1]).to(logs.dtype)
        valid = truth.sum(1)  # 0 for ignored pixels
        losses = logs.new_zeros(len(logs))
        if self.kind != "dice":
            weighted = truth * constant(self.weights, logs)[:, None] if self.weights else truth
            losses = losses - (weighted * logs).sum((1, 2)) / valid.sum(1).clamp_min(1)
        if self.kind == "ce":
            return losses
        chances, truth = (logs.exp() * valid[:, None])[:, 1:], truth[:, 1:]
        true = truth.sum(2)
        dice = (2 * (chances * truth).sum(2) + SMOOTHING) / (chances.sum(2) + true + SMOOTHING)
        occurs = (true > 0).to(dice.dtype)
        count = occurs.sum(1)
        missed = (count > 0).to(dice.dtype) - (dice * occurs).sum(1) / count.clamp_min(1)
        return losses + (missed if self.kind == "dice" else self.weight * missed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax over classes, ``[B, C, *sides]``."""
        return torch.softmax(logits, 1)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the Dice of each image, averaged over its predicted or true foreground classes, ``[B]``; 1 if none."""
        sums = _overlaps(logits, y)[:, 1:]
        present = sums[..., 4].sum(1)
        return torch.where(present > 0, sums[..., 2].sum(1) / present.clamp_min(1), 1.0)

    def tally(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the sums over images of, for each class, ``[C, 5]``.

        These are pixels in both truth and prediction, pixels of the truth plus those of the prediction, Dice and
        intersection over union of the images in which the class is predicted or true, and the number of these images.
        """
        return _overlaps(logits, y).sum(0)

    def empty_tally(self, classes: int) -> Tensor:
        """Return zeros, ``[C, 5]``."""
        return torch.zeros((classes, 5), dtype=torch.float64)

    def measure(self, tally: Tensor, loss: float) -> dict[str, float]:
        """Compute Dice and IoU of each class, pooled Dice and accuracy of the pixels; NaN for classes without pixels."""
        hits, pixels, dice, iou, images = tally.cpu().T
        names = self.class_names or tuple(map(str, range(len(hits))))
        present = pixels[1:] > 0
        pooled = (2 * hits[1:] / pixels[1:])[present].mean() if bool(present.any()) else 1.0
        means = torch.cat([dice[1:] / images[1:], iou[1:] / images[1:]]).tolist()
        return {
            **dict(zip(_metric_names(names), means, strict=True)),
            "dice_pooled": float(pooled),
            "accuracy": float(2 * hits.sum() / pixels.sum().clamp_min(1)),
        }

    def scores(self, logits: Tensor) -> Tensor:
        """Return the predicted class of each pixel, ``[B, *sides]``."""
        return logits.argmax(1).to(torch.uint8)

    def metrics_of_all(self, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute the requested HD95: the mean over images of the mean over foreground classes, in pixels."""
        return {"hd95": mean_hd95(scores, y, len(metrics.class_names))}

    def metrics_of_outputs(self, y: np.ndarray, outputs: np.ndarray, metrics: MetricSet) -> dict[str, float]:
        """Compute Dice, loss and all metrics but HD95."""
        logits, target = _logits_of(outputs, y), torch.from_numpy(y)
        loss = float(self.losses(logits, target).mean())
        return {
            "dice": float(self.correct(logits, target).mean()),
            "loss": loss,
            **self.measure(self.tally(logits, target), loss),
        }

    def statistic(self, name: str, y: np.ndarray, scores: np.ndarray, metrics: MetricSet) -> Statistic | None:
        """Return the statistic of a metric of overlap, or of the loss if ``scores`` are probabilities."""
        logits, target = _logits_of(scores, y, len(metrics.class_names)), torch.from_numpy(y)
        if name == "dice":
            return mean_statistic(self.correct(logits, target).numpy())
        if name == "loss" and scores.ndim > y.ndim:
            return mean_statistic(self.losses(logits, target).numpy())
        return sums_statistic(name, self, logits, target)

    def gray(self, classes: np.ndarray) -> np.ndarray:
        """Return masks with the gray values of their classes.

        Args:
            classes: Class of each pixel, ``OUTSIDE`` without one.
        """
        table = np.arange(OUTSIDE + 1, dtype=np.uint8)
        table[: len(self.values)] = self.values
        if self.ignore is not None:
            table[OUTSIDE] = self.ignore
        return np.asarray(table[classes])

    def decisions(self, outputs: np.ndarray, metrics: MetricSet, threshold: float | None = None) -> list[Any]:
        """Return the mask of each image with the gray values of the predicted classes, uint8 ``[*sides]``."""
        if threshold is not None:
            return super().decisions(outputs, metrics, threshold)
        return [*self.gray(outputs.argmax(1))]

    def output_names(self, names: Sequence[str], label: str | None) -> list[str]:
        """Return the names of the pixel shares, such as ``share(vessel)``."""
        return [f"{SHARE}{name})" for name in names]

    def predicted_columns(
        self,
        outputs: np.ndarray,
        names: Sequence[str],
        label: str | None,
        horizons: Sequence[float] = (),
        curve: bool = False,
    ) -> dict[str, Sequence[float | None]]:
        """Return the share of each predicted class in the pixels of each image."""
        shares = pixel_shares(torch.from_numpy(outputs.argmax(1)), outputs.shape[1]).numpy()
        return super().predicted_columns(shares, names, label, horizons, curve)


def pixel_shares(y: Tensor, classes: int) -> Tensor:
    """Return the share of each class in the valid pixels of each image, ``[n, C]``.

    Args:
        y: Classes, ``[n, *sides]``.
        classes: Number of classes.

    >>> pixel_shares(torch.tensor([[[0, 2], [2, 255]]]), 3)
    tensor([[0.3333, 0.0000, 0.6667]], dtype=torch.float64)
    """
    counts = torch.stack([(y == c).flatten(1).sum(1) for c in range(classes)], 1).double()
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def _metric_names(names: Sequence[str]) -> tuple[str, ...]:
    return (*(f"dice/{name}" for name in names[1:]), *(f"iou/{name}" for name in names[1:]))


def _one_hot(y: Tensor, classes: int) -> Tensor:
    """Return which class each pixel has, ``[B, C, pixels]``; none for ignored pixels."""
    return y.flatten(1)[:, None] == torch.arange(classes, device=y.device)[:, None]


def _overlaps(logits: Tensor, y: Tensor) -> Tensor:
    """Return the summands of ``tally`` of each image, ``[B, C, 5]``."""
    truth = _one_hot(y, logits.shape[1])
    predicted = _one_hot(logits.argmax(1), logits.shape[1]) & (y != OUTSIDE).flatten(1)[:, None]
    hits, pixels = ((part.sum(2, dtype=torch.float64)) for part in (truth & predicted, truth.int() + predicted))
    return torch.stack(
        [hits, pixels, 2 * hits / pixels.clamp_min(1), hits / (pixels - hits).clamp_min(1), (pixels > 0).double()], -1
    )


def _logits_of(outputs: np.ndarray, y: np.ndarray, classes: int = 0) -> Tensor:
    """Return logits that give these probabilities, or predict these classes."""
    if outputs.ndim == y.ndim:
        return (torch.from_numpy(outputs)[:, None] == torch.arange(classes).view(-1, *[1] * (y.ndim - 1))).double()
    return torch.from_numpy(outputs).double().clamp_min(SMALLEST).log()
