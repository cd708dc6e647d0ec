"""Interface of diagnostics: watch the updates of a round and compute metrics of the clients' models."""

from __future__ import annotations

from torch import Tensor

from unskew.protocol.messages import Update
from unskew.simulation.server import Server


class Diagnostic:
    """Collects the updates of a round.

    Args:
        server: Whose updates are watched from now on.
    """

    of_clients = True
    """Whether there are figures only of rounds in which an update came."""

    def __init__(self, server: Server):
        self.server = server
        self.updates: list[Update] = []
        self.start = server.v
        server.watchers.append(self.updates.append)
        server.wants_models = server.wants_models or self.of_clients

    def begin(self) -> None:
        """The next round starts from the server's model; forget the last one."""
        self.start = self.server.v
        self.updates.clear()

    def models(self) -> list[Tensor]:
        """The whole models ``[d]`` of the clients after training, slices that were not sent included, in evaluated rounds."""
        return [u.report["v"] if "v" in u.report else self.start + u.delta for u in self.updates]

    def metrics(self) -> dict[str, float]:
        """The figures of the round that has just ended; asked for in rounds that are evaluated."""
        raise NotImplementedError
