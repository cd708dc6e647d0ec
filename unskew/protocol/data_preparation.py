"""Data preparation before the first round: workspace, payloads and results of data rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ArrayClients, ClientData, Federation, joined_clients
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors, num_bytes
from unskew.protocol.training_config import Training


def _quiet(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Workspace:
    """Resources of a data preparation in addition to the data.

    Attributes:
        folder: Folder for intermediate files and results; None to store nothing.
        shared: Whether other runs use the folder too; if so, each preparation uses its own subfolder.
        device: Device of computations.
        existing: Results of another run to use instead of preparing the data; or None.
        run: Folder of a resumed run, above which finished results of several runs may be read; or None.
        report: Called with the current step, the amount done and the total.
        warn: Called with warnings for the user.
    """

    folder: Path | None = None
    shared: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    existing: Path | None = None
    run: Path | None = None
    report: Callable[[str, float, float], None] = _quiet
    warn: Callable[[str], None] = _quiet

    def within(self, name: str) -> Workspace:
        """Return the workspace with the subfolder ``name`` if the folder is shared."""
        return replace(self, folder=self.folder / name, shared=False) if self.folder and self.shared else self


NOWHERE = Workspace()


def smallest_integer_dtype(y: Tensor, classes: int) -> Tensor:
    """Convert labels ``[n]`` to the smallest integer type that can represent all classes, for sending.

    Args:
        y: Labels, ``[n]``.
        classes: Number of classes.
    """
    return y.to(torch.uint8 if classes <= 256 else torch.int16 if classes <= 1 << 15 else torch.int32)


@dataclass(frozen=True)
class ClientPayloads:
    """Payloads that clients send before the first round.

    Attributes:
        sent: Tensors by client and name; their memory size counts as traffic.
        summary: Entries about the payloads for the run summary; a real site sends only those in
            ``DataRule.payload_metrics``.
        digest: Digest of the content.
    """

    sent: dict[int, Tensors] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True)
class ServerPayload:
    """Payload that the server sends before the first round.

    Attributes:
        shares: Tensors for single clients, by client and name.
        common: Tensors for all clients; client rules of the same name read them as ``ctx.common``.
        match_steps: Local budget in epochs with the new data: False: more steps, as there are more data; True: the same
            number of steps as before; ``epochs``: fewer epochs, in proportion to the number of samples.
    """

    shares: dict[int, Tensors] = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)
    match_steps: bool | Literal["epochs"] = False


@dataclass(frozen=True)
class PreparedData:
    """Data and budget of the clients after preparation.

    Attributes:
        federation: Data of all clients.
        training: Budget of the clients.
        common: Tensors sent to all clients, by rule.
        counted: Samples per client that count in weighted means, ``[K]``; None if all training samples count.
        summary: Entries about the prepared data for the run summary.
        digest: Digest of the data that clients received.
        traffic: Pairs of a client and its bytes up and down.
        client: Client of a real site, the only one with data; None in simulations.
        site_mean: Mean number of samples per client, which the server reports to a site; None in simulations.
    """

    federation: Federation
    training: Training
    common: dict[str, Tensors] = field(default_factory=dict)
    counted: np.ndarray | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    traffic: tuple[tuple[int, tuple[int, int]], ...] = ()
    client: int | None = None
    site_mean: int | None = None

    @property
    def clients(self) -> Sequence[int]:
        """Clients whose data are available: all of them, or the client of a real site."""
        return range(len(self.federation.clients)) if self.client is None else (self.client,)

    @property
    def mean_size(self) -> int:
        """Mean number of samples per client, including held-out ones; at least 1."""
        if self.site_mean is not None:
            return self.site_mean
        clients = self.federation.clients
        total = len(clients.y) if isinstance(clients, ArrayClients) else sum(len(c.y) + len(c.y_test) for c in clients)
        return max(1, total // len(clients))

    @property
    def federation_info(self) -> FederationInfo:
        """Server's information about the clients."""
        return FederationInfo.of(self.federation, self.counted)

    def received(
        self,
        rule: str,
        payloads: ClientPayloads,
        server_payload: ServerPayload,
        receive: Callable[[ClientData, Tensors], ClientData],
    ) -> PreparedData:
        """Return the data after clients sent ``payloads`` and received ``server_payload``, with the traffic counted.

        Args:
            rule: Name of the rule that exchanged the payloads.
            payloads: Payloads from clients to the server.
            server_payload: Payload from the server to clients.
            receive: Maps a client's data and its share to its new data.
        """
        federation, everywhere = self.federation, num_bytes(server_payload.common.values())
        if server_payload.shares:
            clients = joined_clients([receive(c, server_payload.shares[c.id]) for c in federation.clients])
            federation = replace(federation, clients=clients)
        cost = {
            k: (
                num_bytes(payloads.sent.get(k, {}).values()),
                num_bytes(server_payload.shares.get(k, {}).values()) + everywhere,
            )
            for k in range(len(self.federation.clients))
        }
        return replace(
            self,
            federation=federation,
            training=self._matched(federation, server_payload.match_steps),
            common={**self.common, rule: server_payload.common} if server_payload.common else self.common,
            counted=self.federation.sizes if server_payload.shares and self.counted is None else self.counted,
            summary={**self.summary, **payloads.summary},
            digest=payloads.digest or self.digest,
            traffic=(*self.traffic, *cost.items()),
        )

    def _matched(self, after: Federation, match_steps: bool | Literal["epochs"]) -> Training:
        """Return the budget of the clients after they received data, see ``ServerPayload.match_steps``."""
        epochs = self.training.local_epochs
        if epochs is None or not match_steps:
            return self.training
        if match_steps is True:
            return replace(self.training, counted=tuple(self.federation.sizes.clip(1).tolist()))
        real = self.mean_size * len(self.federation.clients)
        more = int(after.sizes.sum() - self.federation.sizes.sum())
        return replace(self.training, local_epochs=max(1, epochs * real // (real + more)))

    def to(self, device: torch.device) -> PreparedData:
        """Return a copy with all tensors on ``device``."""
        common = {rule: {name: t.to(device) for name, t in tensors.items()} for rule, tensors in self.common.items()}
        return replace(self, federation=self.federation.to(device), common=common)
