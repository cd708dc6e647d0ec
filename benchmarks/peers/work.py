"""What every library is given: images, cohorts, a first model, and turns, so that they can be measured one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SHAPES = [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (10, 84), (10,)]
"""Of CNN-A's parameters, in order."""


class Ended(Exception):
    """There are no more rounds."""


class Work:
    """What lies in a folder that ``python -m benchmarks.peers`` made.

    Attributes:
        cohorts: The clients of each round.
        steps, batch, lr, clients, per_client: The budget.
        x, y: Images ``[N, 32, 32, 3]``, uint8, mapped from a file, and labels ``[N]``.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        given = json.loads((self.folder / "work.json").read_text())
        self.cohorts: list[list[int]] = given["cohorts"]
        self.steps, self.batch, self.lr = given["steps"], given["batch"], given["lr"]
        self.clients, self.per_client = given["clients"], given["per_client"]
        self.x = np.load(self.folder / "x.npy", mmap_mode="r")
        self.y = np.load(self.folder / "y.npy")
        self._turns = self._wait_for_replies = None

    def start(self) -> list[np.ndarray]:
        """The first model, a tensor for each parameter."""
        cuts = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
        pieces = np.split(np.load(self.folder / "start.npy"), cuts)
        return [piece.reshape(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]

    def rows(self, client: int) -> slice:
        """Which samples a client owns."""
        return slice(client * self.per_client, (client + 1) * self.per_client)

    def normalized(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's images, float32 ``[n, 3, 32, 32]``, and its labels."""
        x = (self.x[self.rows(client)].astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), self.y[self.rows(client)]

    def begin(self) -> None:
        """Wait for this library's turn; called before each round.

        Raises:
            Ended: It was the last one.
        """
        if self._turns is None:
            self._turns = (self.folder / "turns").open()
        if self._turns.readline().strip() != "go":
            raise Ended

    def end(self) -> None:
        """Tell that a round has ended."""
        if self._wait_for_replies is None:
            self._wait_for_replies = (self.folder / "answers").open("w")
        self._wait_for_replies.write("done\n")
        self._wait_for_replies.flush()

    def finish(self, model: list[np.ndarray]) -> None:
        """Keep the last model."""
        np.save(self.folder / "model.npy", np.concatenate([np.asarray(part).ravel() for part in model]))
