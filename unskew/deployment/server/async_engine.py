"""Asynchronous rounds: the server applies updates as they arrive, while slower sites continue to train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unskew.deployment.server.engine import FlowerEngine, tensor_norms
from unskew.deployment.server.round_requests import PendingRequests, RoundWait
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import encode_broadcast
from unskew.protocol.messages import Broadcast, Update


@dataclass(eq=False)
class AsyncFlowerEngine(FlowerEngine):
    """``FlowerEngine`` whose rounds end after the first arriving updates, regardless of the round they were trained in."""

    def __post_init__(self) -> None:
        self.flying: dict[int, Broadcast] = {}
        self.pending = PendingRequests(self.sites, "", self._take)
        self.norms: dict[int, dict[str, float]] = {}  # tensor norms of each client's last update

    @property
    def in_flight(self) -> set[int]:
        """Clients whose update has been requested and has not arrived."""
        return {*self.flying}

    def _take(self, client: int, frame: Frame) -> Update | None:
        return self.accept_reply(self.flying[client], frame)

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Send broadcasts to their sites and yield updates in order of arrival."""
        sites, patience = self.sites, self.sites.round_policy
        for broadcast in broadcasts:
            self.flying[broadcast.client] = broadcast
            request = encode_broadcast(broadcast, self.wire_context, "train", self._budget(broadcast.client))
            self.pending.add(broadcast.client, request, str(broadcast.round + 1))
        wait, done = RoundWait(sites, self.pending.round, patience.min_updates, patience.round_timeout), 0
        asked, refused = len(self.pending.requests), sites.counts["refused"]
        while self.pending.requests:
            for client in self.pending.requests.keys() & sites.barred:
                self.pending.drop(client)
                self.flying.pop(client)
                self.server.clients.drop_sent(client)
            sites.await_replies(self.pending.requests)
            sites.check_stopped()
            answers = self.pending.step()
            for client, update in answers:
                broadcast = self.flying.pop(client)
                if update is not None:
                    self.norms[client] = tensor_norms(update)
                if update is None or self.too_large(self.norms, [client], [broadcast]):
                    self.norms.pop(client, None)
                    self.server.clients.drop_sent(client)
                else:
                    done += 1
                    yield update
            if done >= patience.min_updates or wait.is_over(self.pending.requests, done, bool(answers)):
                break
        self._check_enough(self.pending.round, done, asked, refused)
