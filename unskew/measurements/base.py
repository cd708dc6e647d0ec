"""Interface of diagnostics, which compute metrics from the updates of a round."""

from __future__ import annotations

from torch import Tensor

from unskew.protocol.messages import Update
from unskew.simulation.server import Server


class Diagnostic:
    """Base class of diagnostics; collects the updates of a round.

    Args:
        server: Server of the run, whose updates are collected from now on.
    """

    of_clients = True
    """True if the diagnostic needs at least one update in a round."""

    def __init__(self, server: Server):
        self.server = server
        self.updates: list[Update] = []
        self.start = server.state.v
        server.aggregator.watch(self.updates.append)
        if self.of_clients:
            server.broadcaster.request_models()

    def begin(self) -> None:
        """Start a round: store the server's model and forget earlier updates."""
        self.start = self.server.state.v
        self.updates.clear()

    def models(self) -> list[Tensor]:
        """Return the clients' models ``[d]`` after training, in evaluated rounds also with slices that were not sent."""
        return [u.report["v"] if "v" in u.report else self.start + u.delta for u in self.updates]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the finished round; called in evaluated rounds."""
        raise NotImplementedError
