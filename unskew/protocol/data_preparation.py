"""Before the first round: where a data rule works, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation, joined_clients
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors, num_bytes
from unskew.protocol.training_config import Training


def _quiet(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Workspace:
    """Resources of a data preparation in addition to the data.

    Attributes:
        folder: Where it keeps its work and what it made, or None to keep nothing.
        shared: Whether other runs use that folder, too; then it takes a folder within, named after what it makes.
        device: Where it computes.
        given: What another run made, to be taken instead; or None.
        report: Called with the current step, the amount done and the total.
        warn: Called with warnings for the user.
    """

    folder: Path | None = None
    shared: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    given: Path | None = None
    report: Callable[[str, float, float], None] = _quiet
    warn: Callable[[str], None] = _quiet

    def within(self, name: str) -> Workspace:
        """The workspace for what ``name`` identifies."""
        return replace(self, folder=self.folder / name, shared=False) if self.folder and self.shared else self


NOWHERE = Workspace()


def smallest_integer_dtype(y: Tensor, classes: int) -> Tensor:
    """Labels ``[n]`` as they are sent: in the smallest integers that hold them.

    Args:
        y: Labels, ``[n]``.
        classes: Number of classes.
    """
    return y.to(torch.uint8 if classes <= 256 else torch.int16 if classes <= 1 << 15 else torch.int32)


@dataclass(frozen=True)
class ClientPayloads:
    """Payloads that clients send before the first round.

    Attributes:
        sent: By client; counted as it lies in memory.
        about: What a run's summary says of it.
        digest: Changes with what is in it.
    """

    sent: dict[int, Tensors] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True)
class ServerPayload:
    """Payload that the server sends before the first round.

    Attributes:
        shares: By client, what it alone is sent.
        common: What every client is sent alike; client rules of the same name read it as ``ctx.common``.
    """

    shares: dict[int, Tensors] = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedData:
    """Data and budget of the clients when training begins.

    Attributes:
        federation: The data.
        training: The clients' budget.
        common: What every client was sent alike, by rule.
        counted: Samples per client that count in a weighted mean, ``[K]``, where others do not; None: all of them do.
        about: What a run's summary says of what was made.
        digest: Changes with what clients were given.
        traffic: Bytes up and down that it cost each client.
    """

    federation: Federation
    training: Training
    common: dict[str, Tensors] = field(default_factory=dict)
    counted: np.ndarray | None = None
    about: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    traffic: tuple[tuple[int, tuple[int, int]], ...] = ()

    @property
    def federation_info(self) -> FederationInfo:
        """Return the information that the server has of the clients."""
        return FederationInfo.of(self.federation, self.counted)

    def received(
        self,
        rule: str,
        made: ClientPayloads,
        dealt: ServerPayload,
        receive: Callable[[ClientData, Tensors], ClientData],
    ) -> PreparedData:
        """After ``made`` was sent to the server and ``dealt`` to the clients, who ``receive`` it; its bytes are counted.

        Args:
            rule: Whose messages these are, by name.
            made: What went up.
            dealt: What went down.
            receive: From a client's data and its share to its new data.
        """
        federation, everywhere = self.federation, num_bytes(dealt.common.values())
        if dealt.shares:
            clients = joined_clients([receive(c, dealt.shares[c.id]) for c in federation.clients])
            federation = replace(federation, clients=clients)
        cost = {
            k: (num_bytes(made.sent.get(k, {}).values()), num_bytes(dealt.shares.get(k, {}).values()) + everywhere)
            for k in range(len(self.federation.clients))
        }
        return replace(
            self,
            federation=federation,
            common={**self.common, rule: dealt.common} if dealt.common else self.common,
            counted=self.federation.sizes if dealt.shares and self.counted is None else self.counted,
            about={**self.about, **made.about},
            digest=made.digest or self.digest,
            traffic=(*self.traffic, *cost.items()),
        )

    def to(self, device: torch.device) -> PreparedData:
        """The same with its arrays on ``device``."""
        common = {rule: {name: t.to(device) for name, t in tensors.items()} for rule, tensors in self.common.items()}
        return replace(self, federation=self.federation.to(device), common=common)
