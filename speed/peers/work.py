"""Input of every library: data, cohorts, an initial model, and turns, so that the libraries are measured one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from speed.peers.workloads import WORKLOADS, normalize


class Ended(Exception):
    """There are no more rounds."""


class Work:
    """Content of a folder that ``python -m speed.peers`` created.

    Args:
        folder: The folder.

    Attributes:
        workload: Model and data, see ``speed.peers.workloads``.
        cohorts: Clients of each round.
        steps, batch, lr, clients, per_client: Budget.
        x, y: Samples, mapped from a file, and their classes ``[N]``.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        settings = json.loads((self.folder / "work.json").read_text())
        self.name: str = settings["workload"]
        self.workload = WORKLOADS[self.name]
        self.cohorts: list[list[int]] = settings["cohorts"]
        self.steps, self.batch = settings["steps"], settings["batch"]
        self.lr: float = settings["lr"]
        self.clients, self.per_client = settings["clients"], settings["per_client"]
        self.x = np.load(self.folder / "x.npy", mmap_mode="r")
        self.y = np.load(self.folder / "y.npy")
        self._turns = self._replies = None

    def model(self) -> nn.Module:
        """Return the initial model."""
        model = self.workload.model()
        nn.utils.vector_to_parameters(torch.from_numpy(np.load(self.folder / "start.npy")), model.parameters())
        return model

    def start(self) -> list[np.ndarray]:
        """Return the parameters of the initial model in their order."""
        return [parameter.detach().numpy() for parameter in self.model().parameters()]

    def rows(self, client: int) -> slice:
        """Return the slice of a client's samples."""
        return slice(client * self.per_client, (client + 1) * self.per_client)

    def normalized(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's normalized samples, float32, and their classes."""
        return normalize(self.x[self.rows(client)]), self.y[self.rows(client)]

    def begin(self) -> None:
        """Wait for this library's turn; called before each round.

        Raises:
            Ended: There are no more rounds.
        """
        if self._turns is None:
            self._turns = (self.folder / "turns").open()
        if self._turns.readline().strip() != "go":
            raise Ended

    def end(self) -> None:
        """Report the end of a round."""
        if self._replies is None:
            self._replies = (self.folder / "replies").open("w")
        self._replies.write("done\n")
        self._replies.flush()

    def finish(self, model: list[np.ndarray]) -> None:
        """Save the last model.

        Args:
            model: Its parameters in their order.
        """
        np.save(self.folder / "model.npy", np.concatenate([np.asarray(part).ravel() for part in model]))
