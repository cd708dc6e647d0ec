"""Test images of a segmentation with the best, the median and the worst Dice: image, truth and prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.errors import UnskewError
from unskew.plots.figure import PALETTE
from unskew.reporting.run_groups import MethodRuns, RunGroup
from unskew.reporting.run_reader import RunFiles
from unskew.reporting.synthetic_vs_real import federation_at_hand, image_address
from unskew.serving.load import load_predictor
from unskew.tasks.base import OUTSIDE
from unskew.tasks.formatting import format_percent
from unskew.tasks.metrics import SMALLEST

MOST = 500
"""Maximum number of test images that are predicted."""
BACKGROUND, UNKNOWN = "#000000", "#FFFFFF"
"""Colors of the background and of pixels without truth."""


@dataclass(frozen=True)
class MaskRow:
    """A test image with its masks, each as a data URI, and its Dice in percent."""

    name: str
    dice: str
    image: str
    truth: str
    prediction: str


@dataclass(frozen=True)
class SegmentedImages:
    """Table of test images.

    Attributes:
        title: Method, seed and number of images.
        colors: Name and color of each class.
        rows: Images.
    """

    title: str
    colors: list[tuple[str, str]]
    rows: list[MaskRow]


def segmented_images(part: RunGroup) -> SegmentedImages | None:
    """Return test images of the best method whose model and data are available; None for other tasks.

    Args:
        part: Runs of the group.
    """
    if "dice" not in part.series[0].runs[0].summary:
        return None
    ranked = [*part.ranked, *(entry for entry in part.series if entry not in part.ranked)]
    for method_runs, run in ((entry, run) for entry in ranked for run in entry.runs):
        shown = _images_of_run(method_runs, run)
        if shown is not None:
            return shown
    return None


def _images_of_run(one: MethodRuns, run: RunFiles) -> SegmentedImages | None:
    federation = federation_at_hand(run)
    if federation is None:
        return None
    x, y = (part[:MOST] for part in federation.test)
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
        return None
    try:
        outputs = load_predictor(run.folder).outputs(x)
    except UnskewError:  # custom code is not run
        return None
    dice = federation.objective.correct(torch.from_numpy(outputs).clamp_min(SMALLEST).log(), y)
    order = dice.argsort(stable=True).tolist()
    predicted = torch.from_numpy(outputs.argmax(1))
    rows = [
        MaskRow(
            name,
            format_percent(float(dice[row])),
            image_address(x[row].permute(1, 2, 0).numpy()),
            *(_colored(mask, federation.classes) for mask in (y[row], predicted[row])),
        )
        for name, row in (("best", order[-1]), ("median", order[len(order) // 2]), ("worst", order[0]))
    ]
    title = f"{one.label}, seed {run.summary['seed']}, {len(y)} of {len(federation.test[1])} test images"
    colors = [*zip(federation.names, _colors(federation.classes), strict=True)]
    return SegmentedImages(title, [*colors, ("no truth", UNKNOWN)] if bool((y == OUTSIDE).any()) else colors, rows)


def _colors(classes: int) -> list[str]:
    return [BACKGROUND, *(PALETTE[c % len(PALETTE)] for c in range(classes - 1))]


def _colored(mask: Tensor, classes: int) -> str:
    """Return a mask with a color for each class as a data URI."""
    table = np.full((OUTSIDE + 1, 3), 255, np.uint8)
    table[:classes] = [tuple(bytes.fromhex(color[1:])) for color in _colors(classes)]
    return image_address(table[mask.numpy()])
