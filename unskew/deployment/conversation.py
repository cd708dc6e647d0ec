"""What sites are asked and have not answered yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unskew.deployment.arrays import Nonsense, plainly
from unskew.deployment.link import LinkLost
from unskew.deployment.thin.frames import Frame

if TYPE_CHECKING:
    from unskew.deployment.sites import Sites

FAILURES = 10
"""Times that a message is sent again because Flower could not deliver it or its app ended, before that is a fault."""
SELDOM = 5.0
"""Seconds between two looks at who is connected while every message is on its way."""
PAUSE, LONGEST = 1.0, 60.0
"""Seconds before a message is sent again: after the first failure, doubled after each further one, and at most."""


def pause(failures: int) -> float:
    """Return the seconds to wait before a message is sent again, so that Flower's slow processes do not pile up.

    >>> [pause(n) for n in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(PAUSE * 2.0 ** (failures - 1), LONGEST)


@dataclass
class Conversation:
    """Messages to sites, each sent again until it is answered or its site has failed too often.

    Attributes:
        sites: The sites.
        round: What logs call it.
        take: Checks an answer and makes something of it; None: nothing can be made of it, and that is no fault.
        seconds: After which Flower forgets a message.
        requests: By client: what is not answered yet.
        failures: How often the message to a client has failed.
    """

    sites: Sites
    round: str
    take: Callable[[int, Frame], Any]
    seconds: float = 86400.0
    requests: dict[int, Frame] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)
    _waiting: set[int] = field(default_factory=set)
    _again: dict[int, float] = field(default_factory=dict)

    def step(self) -> list[tuple[int, Any]]:
        """Send what is to be sent, and take the answers that have come; with None from who will not answer."""
        sites = self.sites
        try:
            unsent = sorted(self.requests.keys() - self._waiting)
            here = sites.connected() if unsent else sites.connected(SELDOM)
            for client in unsent:
                if sites.nodes.get(client) not in here:
                    self._again.pop(client, None)  # one that comes back is asked at once
                elif time.monotonic() >= self._again.get(client, 0.0):
                    identity = sites.push(sites.nodes[client], self.requests[client], self.round, self.seconds)
                    self._asked[identity] = client
                    self._waiting.add(client)
            answers = sites.link.pull(list(self._asked)) if self._asked else []
        except LinkLost as error:
            sites.tell(f"{error} Waiting for the SuperLink to come back.")
            sites.reconnect()
            sites.counts["resent"] += len(self._asked)
            self._asked, self._waiting = {}, set()
            return []
        found = []
        for identity, frame in answers:
            client = self._asked.pop(identity)
            attempt = sites.attempt(identity)
            if frame.kind == "failed":
                self._failed(client, frame)
                if client in self.requests:
                    continue
                found.append((client, None))
                continue
            if client not in self.requests:
                continue  # it was dropped meanwhile
            kind = self.requests[client].kind
            self.drop(client)
            contact = sites.contact(client)
            contact.seen, contact.error = time.time(), ""
            contact.answered += kind == "train"
            try:
                found.append((client, self.take(client, sites.checked(frame, attempt))))
            except Nonsense as error:
                sites.fault(client, f"its answer was refused, because {error}")
                found.append((client, None))
        return found

    def _failed(self, client: int, frame: Frame) -> None:
        """It is asked again when it is back, after growing pauses, but not for ever."""
        self._waiting.discard(client)
        reason = plainly(frame.config.get("reason"))
        self.sites.counts["resent"] += 1
        self.sites.contact(client).error = reason
        self.sites.log("resent", client, reason=reason)
        self.sites.look_again()
        self.failures[client] = self.failures.get(client, 0) + 1
        self._again[client] = time.monotonic() + pause(self.failures[client])
        if self.failures[client] > FAILURES and client in self.requests:
            self.sites.fault(client, f"its SuperNode fails: {reason}")
            self.drop(client)

    def drop(self, client: int) -> None:
        """Wait for a client no longer."""
        self._waiting.discard(client)
        del self.requests[client]
