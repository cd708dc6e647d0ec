"""Small images with masks: a bright or a dark square on noise."""

from pathlib import Path

import numpy as np
from PIL import Image

from unskew import Federation

SIDE = 8
UNET = {
    "model": "unet",
    "model_options": {"widths": [4, 6]},
    "rounds": 2,
    "local_steps": 2,
    "batch_size": 4,
    "lr": 0.05,
    "device": "cpu",
    "engine": "inline",
}
"""A run that costs next to nothing."""


def squares(n: int, draws: np.random.Generator, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[n, 1, side, side]`` and masks: squares of class 1 are bright, those of class 2 dark."""
    x, y = draws.normal(0, 0.3, (n, 1, side, side)), np.zeros((n, side, side), np.int64)
    for k in range(n):
        row, column = draws.integers(0, side - 3, 2)
        x[k, 0, row : row + 3, column : column + 3] += 3 - 6 * (k % 2)
        y[k, row : row + 3, column : column + 3] = 1 + k % 2
    return x.astype(np.float32), y


def square_federation(sizes=(9, 7, 8, 10), server: int | None = None) -> Federation:
    """Clients with such images, a test set, and perhaps images at the server."""
    draws = np.random.default_rng(0)
    clients, test = [squares(n, draws) for n in sizes], squares(6, draws)
    at_server = None if server is None else squares(server, draws)
    return Federation.from_arrays(clients, test, at_server, task="segmentation", classes=3, holdout=0.2)


def square_folder(folder: Path, n: int = 12, sites=("a", "b"), seed: int = 0) -> Path:
    """Write images of 16 x 12 pixels and their masks of 0, 100 and 200, for training and test of each site."""
    draws = np.random.default_rng(seed)
    for site in sites:
        for part, count in (("train", n), ("test", n // 3)):
            x, y = squares(count, draws, 16)
            for k in range(count):
                for kind, pixels in (("images", (100 + 30 * x[k, 0]).clip(0, 255)), ("masks", 100 * y[k])):
                    (folder / site / part / kind).mkdir(parents=True, exist_ok=True)
                    image = Image.fromarray(pixels[:, :12].astype(np.uint8))
                    image.save(folder / site / part / kind / f"{k:02}.png")
    return folder
