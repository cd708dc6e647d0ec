"""Requests to sites without a reply yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unskew.deployment.flower.grid_bridge import LinkClosedError
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, printable

if TYPE_CHECKING:
    from unskew.deployment.server.sites import SiteManager

FAILURES = 10
"""Times that a message is sent again because Flower could not deliver it or its app ended, before that is a fault."""
SELDOM = 5.0
"""Seconds between two looks at who is connected while every message is on its way."""
PAUSE, LONGEST = 1.0, 60.0
"""Seconds before a message is sent again: after the first failure, doubled after each further one, and at most."""
NO_REPLY = 120.0
"""Seconds without a reply after which a message is sent again: its SuperNode may have pulled it and died, which Flower does
not report if the SuperNode is back within a heartbeat. Doubled each time, so a site that computes for hours gets few."""


def retry_delay(failures: int) -> float:
    """Return the seconds to wait before a message is sent again, so that Flower's slow processes do not pile up.

    >>> [retry_delay(n) for n in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(PAUSE * 2.0 ** (failures - 1), LONGEST)


@dataclass
class PendingRequest:
    """A message that is not answered yet.

    Attributes:
        node: Flower's number of the SuperNode it was sent to.
        due: Monotonic time in seconds at which it is sent again.
        wait: Seconds from its sending to that time.
        offline: Whether the SuperNode was seen disconnected since.
    """

    node: int
    due: float
    wait: float = NO_REPLY
    offline: bool = False


@dataclass
class PendingRequests:
    """Messages to sites, each sent again until it is answered or its site has failed too often.

    Attributes:
        sites: The sites.
        round: What logs call it.
        take: Checks an answer and makes something of it; None: nothing can be made of it, and that is no fault.
        seconds: After which Flower forgets a message.
        requests: By client: what is not answered yet.
        failures: How often the message to a client has failed.

    A message can be on its way more than once: sites answer a repeated one as they answered the first, and the first reply
    that comes is used.
    """

    sites: SiteManager
    round: str
    take: Callable[[int, Frame], Any]
    seconds: float = 86400.0
    requests: dict[int, Frame] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    _asked: dict[str, tuple[int, Frame]] = field(default_factory=dict)
    _waiting: dict[int, PendingRequest] = field(default_factory=dict)
    _again: dict[int, float] = field(default_factory=dict)

    def step(self) -> list[tuple[int, Any]]:
        """Send what is to be sent, and take the answers that have come; with None from who will not answer."""
        sites = self.sites
        try:
            waits = self._lost()
            unsent = sorted(self.requests.keys() - self._waiting.keys())
            here = sites.connected() if unsent else sites.connected(SELDOM)
            for client in unsent:
                if sites.nodes.get(client) not in here:
                    self._again.pop(client, None)  # one that comes back is asked at once
                elif time.monotonic() >= self._again.get(client, 0.0):
                    request = self.requests[client]
                    identity = sites.push(sites.nodes[client], request, self.round, self.seconds)
                    self._asked[identity] = (client, request)
                    wait = waits.get(client, NO_REPLY)
                    self._waiting[client] = PendingRequest(sites.nodes[client], time.monotonic() + wait, wait)
            answers = sites.link.pull(list(self._asked)) if self._asked else []
        except LinkClosedError as error:
            sites.warn(f"{error} Waiting for the SuperLink to come back.")
            sites.reconnect()
            sites.counts["resent"] += len(self._asked)
            self._asked, self._waiting = {}, {}
            return []
        found = []
        for identity, frame in answers:
            client, request = self._asked.pop(identity)
            attempt = sites.attempt(identity)
            if self.requests.get(client) is not request:
                continue  # the client was dropped, or has answered another copy of the message
            if frame.kind == "failed":
                if any(other is request for _, other in self._asked.values()):
                    continue  # another copy of the message is on its way
                self._failed(client, frame)
                if client in self.requests:
                    continue
                found.append((client, None))
                continue
            kind = self.requests[client].kind
            self.drop(client)
            contact = sites.contact(client)
            contact.seen, contact.error = time.time(), ""
            contact.answered += kind == "train"
            try:
                found.append((client, self.take(client, sites.checked(frame, attempt))))
            except InvalidMessageError as error:
                sites.fault(client, f"its answer was refused, because {error}")
                found.append((client, None))
        return found

    def _lost(self) -> dict[int, float]:
        """Forget the sending of messages that may be lost, so that they are sent again.

        Returns:
            By client: seconds to wait for the reply to the message that is sent next.
        """
        here, now, waits = self.sites.connected(SELDOM), time.monotonic(), {}
        for client, sent in [*self._waiting.items()]:
            node = self.sites.nodes.get(client)
            back = (sent.offline or node != sent.node) and node in here
            sent.offline = sent.offline or sent.node not in here
            if not back and now < sent.due:
                continue
            reason = "its SuperNode was offline" if back else f"no reply for {sent.wait:.0f} s"
            self.sites.counts["resent"] += 1
            self.sites.log("resent", client, reason=reason)
            waits[client] = 2 * sent.wait
            del self._waiting[client]
        return waits

    def _failed(self, client: int, frame: Frame) -> None:
        """It is asked again when it is back, after growing pauses, but not for ever."""
        self._waiting.pop(client, None)
        reason = printable(frame.config.get("reason"))
        self.sites.counts["resent"] += 1
        self.sites.contact(client).error = reason
        self.sites.log("resent", client, reason=reason)
        self.sites.look_again()
        self.failures[client] = self.failures.get(client, 0) + 1
        self._again[client] = time.monotonic() + retry_delay(self.failures[client])
        if self.failures[client] > FAILURES and client in self.requests:
            self.sites.fault(client, f"its SuperNode fails: {reason}")
            self.drop(client)

    def drop(self, client: int) -> None:
        """Wait for a client no longer."""
        self._waiting.pop(client, None)
        del self.requests[client]
