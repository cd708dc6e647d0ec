"""Figures: convergence, and what each client holds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unskew.errors import ConfigError
from unskew.files import make_folder, write_atomic

MARKERS = "osD^vPX*<>"


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen and without pyplot's global state
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _save(figure: Any, path: Path) -> Path:
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lower()[1:] not in known:
        raise ConfigError(f"{path} has no known ending for a figure; use one of {', '.join(sorted(known))}.")
    make_folder(path.parent)
    data = io.BytesIO()
    figure.savefig(data, dpi=130, format=path.suffix.lower()[1:])
    write_atomic(path, data.getvalue())
    return path


def convergence(runs: Mapping[str, Sequence[list[dict[str, Any]]]], path: Path) -> Path:
    """Test accuracy against rounds and against traffic, mean and standard deviation over seeds.

    Args:
        runs: For each method, the history of each seed.
        path: Image file to write; its ending decides the format.

    Returns:
        The path written.
    """
    figure, (left, right) = _figure(10, 4, columns=2)
    for number, (name, histories) in enumerate(runs.items()):
        scored = [[row for row in h if row["accuracy"] is not None] for h in histories]
        shortest = min(len(h) for h in scored)
        if not shortest:
            continue
        rounds = np.array([row["round"] for row in scored[0][:shortest]])
        values = 100 * np.array([[row["accuracy"] for row in h[:shortest]] for h in scored])
        traffic = np.array([[(r["bytes_up"] + r["bytes_down"]) / 1e6 for r in h[:shortest]] for h in scored]).mean(0)
        mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(shortest)
        # Methods often lie on top of each other: another marker at another place keeps each of them visible.
        style: dict[str, Any] = {
            "color": f"C{number % 10}",
            "marker": MARKERS[number % len(MARKERS)],
            "markevery": (number % max(1, shortest // 8), max(1, shortest // 8)),
        }
        for axis, x in ((left, rounds), (right, traffic)):
            axis.plot(x, mean, label=name, linewidth=1.4, markersize=5, alpha=0.9, **style)
            axis.fill_between(x, mean - spread, mean + spread, alpha=0.1, color=style["color"], linewidth=0)
    for axis, label in ((left, "communication round"), (right, "traffic, up and down (MB)")):
        axis.set_xlabel(label)
        axis.set_ylabel("test accuracy (%)")
        axis.grid(alpha=0.3)
    left.legend(frameon=False)
    return _save(figure, path)


def clients_by_class(
    counts: np.ndarray, class_names: Sequence[str], path: Path, title: str = "", most: int = 60
) -> Path:
    """What each client holds: a dot per client and class, its area the number of samples.

    Args:
        counts: Samples ``[K, C]``.
        class_names: Names of the classes.
        path: Image file to write.
        title: What is shown, such as the partition and its seed.
        most: Largest number of clients drawn; of more, evenly spaced ones are shown.
    """
    total = len(counts)
    shown = np.arange(total) if total <= most else np.linspace(0, total - 1, most).round().astype(int)
    counts = counts[shown]
    figure, (axis,) = _figure(max(4.0, 0.28 * len(shown) + 2), max(3.0, 0.28 * counts.shape[1] + 1.5))
    client, label = np.nonzero(counts)
    sizes = counts[client, label]
    axis.scatter(client, label, s=220 * sizes / max(1, counts.max()), alpha=0.75, linewidths=0)
    ticks = np.arange(0, len(shown), max(1, len(shown) // 20))
    axis.set_xticks(ticks, [str(shown[t]) for t in ticks])
    step = max(1, counts.shape[1] // 40)
    axis.set_yticks(range(0, counts.shape[1], step), list(class_names)[::step])
    axis.set_xlabel("client" + (f" ({len(shown)} of {total} shown)" if len(shown) < total else ""))
    axis.set_ylabel("class")
    axis.set_title(title + ("\n" if title else "") + "area of a dot: number of training samples", fontsize=9)
    axis.grid(alpha=0.25)
    return _save(figure, path)


def images_by_class(
    images: np.ndarray,
    labels: np.ndarray,
    classes: int,
    class_names: Sequence[str],
    path: Path,
    title: str,
    columns: int = 8,
) -> Path:
    """Draw ``grid_by_class``.

    Args:
        images: ``[n, c, h, w]`` from 0 to 1.
        labels: Classes ``[n]``.
        classes: Number of classes.
        class_names: Their names; numbers if there are none.
        path: Image file to write.
        title: What is shown.
        columns: Largest number of images in a row.
    """
    canvas = grid_by_class(images, labels, classes, columns)
    row, height = canvas.shape[0] / classes, images.shape[2]
    figure, (axis,) = _figure(5, 1 + 4 * canvas.shape[0] / canvas.shape[1])
    axis.imshow(canvas, interpolation="nearest")
    names = list(class_names) or [str(label) for label in range(classes)]
    axis.set_yticks([label * row + height / 2 for label in range(classes)], names)
    axis.set_xticks([])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_title(title, fontsize=9)
    return _save(figure, path)


def grid_by_class(images: np.ndarray, labels: np.ndarray, classes: int, columns: int) -> np.ndarray:
    """A row of images per class, the first ones of each, as one image ``[rows, columns, 3]``; what is left is white.

    Three channels are colours; of any other number the mean is shown as grey.

    >>> images, labels = np.arange(3.0).reshape(3, 1, 1, 1) / 4, np.array([1, 0, 1])
    >>> grid_by_class(images, labels, classes=2, columns=2)[:, :, 0]
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
        for column, image in enumerate(images[labels == label][:columns]):
            top, left = label * (height + gap), column * (width + gap)
            canvas[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    return canvas
