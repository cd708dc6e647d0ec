"""Grids of images that clients generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unskew.plots.figure import literal_text, new_figure, save_figure


def save_images_by_class(
    images: np.ndarray,
    labels: np.ndarray,
    classes: int,
    class_names: Sequence[str],
    path: Path,
    title: str,
    columns: int = 8,
) -> Path:
    """Write the grid of ``make_image_grid`` as a figure.

    Args:
        images: Images ``[n, c, h, w]`` in [0, 1].
        labels: Classes ``[n]``, or binary labels ``[n, classes]``.
        classes: Number of classes.
        class_names: Names of the classes; if empty, their numbers are shown.
        path: Image file to write.
        title: Title of the figure.
        columns: Maximum number of images per row.
    """
    canvas = make_image_grid(images, labels, classes, columns)
    row, height = canvas.shape[0] / classes, images.shape[2]
    figure, ((axis,),) = new_figure(5, 1 + 4 * canvas.shape[0] / canvas.shape[1])
    axis.imshow(canvas, interpolation="nearest")
    names = list(class_names) or [str(label) for label in range(classes)]
    axis.set_yticks([label * row + height / 2 for label in range(classes)], [literal_text(name) for name in names])
    axis.set_xticks([])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_title(literal_text(title), fontsize=9)
    return save_figure(figure, path)


def make_image_grid(images: np.ndarray, labels: np.ndarray, classes: int, columns: int) -> np.ndarray:
    """Arrange the first images of each class in one row per class, as one image ``[rows, columns, 3]`` on white.

    Images with three channels are in color; otherwise the mean over channels is shown in gray. Images with several labels
    appear in several rows.

    Args:
        images: Images ``[n, c, h, w]`` in [0, 1].
        labels: Classes ``[n]``, or binary labels ``[n, classes]``.
        classes: Number of classes.
        columns: Maximum number of images per row.

    >>> images, labels = np.arange(3.0).reshape(3, 1, 1, 1) / 4, np.array([1, 0, 1])
    >>> make_image_grid(images, labels, classes=2, columns=2)[:, :, 0]
    array([[0.25, 1.  , 1.  , 1.  ],
           [1.  , 1.  , 1.  , 1.  ],
           [0.  , 1.  , 0.5 , 1.  ],
           [1.  , 1.  , 1.  , 1.  ]])
    """
    if images.shape[1] != 3:
        images = images.mean(1, keepdims=True).repeat(3, axis=1)
    height, width = images.shape[2:]
    gap = max(1, height // 16)
    canvas = np.ones((classes * (height + gap), columns * (width + gap), 3))
    for label in range(classes):
        members = labels == label if labels.ndim == 1 else labels[:, label] > 0
        for column, image in enumerate(images[members][:columns]):
            top, left = label * (height + gap), column * (width + gap)
            canvas[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    return canvas
