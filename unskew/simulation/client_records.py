"""Values that the server stores about single clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.protocol.messages import Broadcast, Tensors, Update
from unskew.simulation.client_store import ClientStore
from unskew.simulation.update_buffer import AcceptedUpdate


@dataclass(frozen=True)
class SentModel:
    """Broadcast values that a rule needs later: version, round, model ``[d]`` and buffers ``[m]``."""

    version: int
    origin_round: int
    v: Tensor | None = None
    b: Tensor | None = None


class ClientRecords:
    """Clients' states and last updates, and the broadcasts that they train from.

    Args:
        store: Storage for the state of the clients; None for memory only.
        cache: Storage for the last updates of the clients, for rules that need them; None for memory only.

    Attributes:
        store: State of the clients.
        cache: Last updates of the clients.
        last_rounds: Round of each client's last applied update.
        sent: Broadcasts to clients in flight, for rules that need them.
    """

    def __init__(self, store: ClientStore | None = None, cache: ClientStore | None = None):
        self.store = ClientStore() if store is None else store  # an empty store is falsy
        self.cache = ClientStore() if cache is None else cache
        self.last_rounds: dict[int, int] = {}
        self.sent: dict[int, SentModel] = {}

    def tensors(self) -> Tensors:
        """Return the tensors of broadcasts in flight, by name; all broadcasts of a round share theirs."""
        sent = {f"sent/{sent.origin_round}": sent.v for sent in self.sent.values() if sent.v is not None}
        return sent | {f"sent-b/{sent.origin_round}": sent.b for sent in self.sent.values() if sent.b is not None}

    def add_sent(self, broadcast: Broadcast, version: int, v: bool, b: bool) -> None:
        """Remember what a client trains from.

        Args:
            broadcast: Message to the client.
            version: Number of updates applied so far.
            v: Whether a rule needs the model.
            b: Whether a rule needs the buffers.
        """
        model, buffers = (broadcast.v if v else None), (broadcast.b if b else None)
        self.sent[broadcast.client] = SentModel(version, broadcast.round, model, buffers)

    def take_sent(self, client: int) -> SentModel:
        """Remove and return what a client has trained from."""
        return self.sent.pop(client, SentModel(0, 0))

    def drop_sent(self, client: int) -> None:
        """Forget the broadcast to a client that dropped out and will send no update."""
        self.sent.pop(client, None)

    def forget(self, client: int) -> None:
        """Treat a client that has lost its state as a new one."""
        self.last_rounds.pop(client, None)

    def accept(self, update: AcceptedUpdate) -> None:
        """Store the client's state and the round of its update."""
        if update.state is not None:
            self.store.keep(update.client, update.state, update.file)
        self.last_rounds[update.client] = update.round

    def put_last_update(self, update: Update) -> None:
        """Store a client's last applied update."""
        self.cache.put(update.client, {"delta": update.delta.cpu()})

    def last_update(self, client: int, device: torch.device) -> Tensor | None:
        """Return a client's last applied update, ``[d]``; None if there is none.

        Args:
            client: Client number.
            device: Device of the result.
        """
        delta = self.cache.get(client).get("delta")
        return None if delta is None else delta.to(device)

    def restore(self, last_rounds: Mapping[str, int], sent: Mapping[int, SentModel]) -> None:
        """Restore the records except the stores.

        Args:
            last_rounds: Round of each client's last applied update, by client as a string.
            sent: Broadcasts to clients in flight.
        """
        self.last_rounds = {int(client): round for client, round in last_rounds.items()}
        self.sent = dict(sent)
