"""Pictures of what clients make."""

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
    """Draw ``make_image_grid``.

    Args:
        images: ``[n, c, h, w]`` from 0 to 1.
        labels: Classes ``[n]``, or 0 and 1 for each label ``[n, classes]``.
        classes: Number of classes.
        class_names: Their names; numbers if there are none.
        path: Image file to write.
        title: What is shown.
        columns: Largest number of images in a row.
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
    """A row of images per class, the first ones of each, as one image ``[rows, columns, 3]``; what is left is white.

    Three channels are colors; of any other number the mean is shown as gray. Images with several labels are in several rows.

    Args:
        images: Images, uint8 ``[n, C, H, W]``.
        labels: Class of each image ``[n]``, or labels ``[n, L]``.
        classes: Number of classes.
        columns: Number of images in a row.

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
