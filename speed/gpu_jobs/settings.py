"""Settings in which simulators are compared on a GPU: data, budget and model. Needs NumPy only, so that JAX can use it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speed import settings
from speed.settings import MEAN, STD

SEED = 0
PREPARED_ROUNDS = 16
"""Rounds whose cohorts and batches are drawn before the measurement; later rounds repeat them."""
CHECKED_ROUNDS = 2
"""Rounds after which the models of all loops are compared."""


@dataclass(frozen=True)
class Setting:
    """Data, budget and model of FedAvg.

    Attributes:
        model: Name of the model in ``models.py`` and ``jax_loop.py``.
        clients: Number of registered clients.
        per_client: Samples of each client.
        cohort: Clients per round.
        steps: Local steps of a client.
        batch: Samples per step; the last batch of an epoch may be smaller.
        lr: Learning rate of the clients.
        shape: Shape of an image, channels first.
        dropout: Whether dropout layers of the model are active.
        precision: ``fp32`` or ``fp64``.
        published: Seconds per round that another project published for this setting, or None.
    """

    model: str
    clients: int
    per_client: int
    cohort: int
    steps: int
    batch: int
    lr: float
    shape: tuple[int, int, int] = (3, 32, 32)
    dropout: bool = True
    precision: str = "fp32"
    published: float | None = None

    @property
    def per_epoch(self) -> int:
        """Batches in a pass over a client's samples."""
        return -(-self.per_client // self.batch)

    def quick(self) -> Setting:
        """Return the setting with next to no work, for a test of the scripts on a CPU."""
        return replace(self, clients=6, per_client=10, cohort=5, steps=2, batch=4)

    def checked(self) -> Setting:
        """Return a small setting without dropout, whose models are equal up to rounding; its last batches are smaller.

        ResNet-18 is compared in float64: it amplifies rounding so much that after four steps in float32, its model was 6 %
        of its movement away from that in float64.
        """
        precision = "fp64" if self.model == "resnet18" else "fp32"
        small = {"clients": 6, "per_client": 10, "cohort": 3, "steps": 3, "batch": 4, "lr": 0.005}
        return replace(self, dropout=False, precision=precision, **small)

    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """Return random images, uint8 ``[N, C, H, W]``, and classes ``[N]``; client ``c`` owns a block of samples."""
        total, draws = self.clients * self.per_client, np.random.default_rng(0)
        images = draws.integers(0, 256, (total, *self.shape), dtype=np.uint8)
        return images, draws.integers(0, 10, total)

    def normalized(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the images with mean 0 and standard deviation 1 per channel, and the classes."""
        images, labels = self.images()
        channels, dtype = self.shape[0], np.float64 if self.precision == "fp64" else np.float32
        scale = (1 / 255 / np.array(STD[:channels])).astype(dtype)
        shift = (-np.array(MEAN[:channels]) / np.array(STD[:channels])).astype(dtype)
        return images.astype(dtype) * scale[:, None, None] + shift[:, None, None], labels


def cnn_a(name: str) -> Setting:
    """Return setting A or B of the measurements on a CPU; the seed is that of all loops here."""
    return Setting("cnn", **{key: value for key, value in settings.SETTINGS[name].items() if key != "seed"})


SETTINGS = {
    "A": cnn_a("A"),
    "B": cnn_a("B"),
    # pfl-research's CIFAR-10 benchmark
    "pfl": Setting("pfl", clients=1000, per_client=50, cohort=50, steps=5, batch=10, lr=0.1),
    # PFLlib, issue 253, on MNIST
    "pfllib": Setting(
        "pfllib",
        clients=20,
        per_client=2630,
        cohort=20,
        steps=263,
        batch=10,
        lr=0.005,
        shape=(1, 28, 28),
        published=17.0,
    ),
    # FL-Simulator: ResNet-18 with group norm, 5 epochs
    "flsim": Setting("resnet18", clients=100, per_client=500, cohort=10, steps=50, batch=50, lr=0.1, published=15.9),
}


def setting_of(name: str, quick: bool, check: bool) -> Setting:
    """Return a setting.

    Args:
        name: Name in ``SETTINGS``.
        quick: Whether to return the one with next to no work.
        check: Whether to return the one for comparing models.
    """
    setting = SETTINGS[name]
    if check:
        return setting.checked()
    return setting.quick() if quick else setting


@dataclass(frozen=True)
class Prepared:
    """Initial model, cohorts and batches, equal for all loops.

    Attributes:
        setting: The setting.
        start: Initial parameters in PyTorch's order and layout.
        cohorts: Clients, ``[rounds, cohort]``, in ascending order.
        rows: Samples of each batch, ``[rounds, cohort, steps, batch]``; smaller batches are filled up with the first sample.
        weights: 1 for samples and 0 for rows that fill up a batch, of the same shape.
    """

    setting: Setting
    start: list[np.ndarray]
    cohorts: np.ndarray
    rows: np.ndarray
    weights: np.ndarray

    @property
    def padded(self) -> bool:
        """Return whether there are batches that were filled up."""
        return not bool(self.weights.all())

    def save(self, file: Path) -> None:
        """Write everything except the setting to a file."""
        start = {f"start{index}": part for index, part in enumerate(self.start)}
        np.savez(file, cohorts=self.cohorts, rows=self.rows, weights=self.weights, **start)

    @staticmethod
    def load(file: Path, setting: Setting) -> Prepared:
        """Read a file that ``save`` has written."""
        with np.load(file) as stored:
            count = sum(name.startswith("start") for name in stored.files)
            start = [stored[f"start{index}"] for index in range(count)]
            return Prepared(setting, start, stored["cohorts"], stored["rows"], stored["weights"])
