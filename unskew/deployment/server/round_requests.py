"""Requests of a round: each is sent again until its site replies, within the time that the round allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unskew.deployment.flower.grid_bridge import LinkClosedError
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import printable
from unskew.errors import EngineError, UnskewError

POLL = 0.2
"""Seconds between two polls for replies."""
SILENCE = 300.0
"""Seconds without a reply after which the user is told which sites are missing."""
FAILURES = 10
"""Number of times that a failed message (not delivered, or its app ended) is sent again before this counts as a fault."""
SELDOM = 5.0
"""Seconds between two polls for connected SuperNodes while all messages are sent."""
PAUSE, LONGEST = 1.0, 60.0
"""Seconds before a failed message is sent again: after the first failure, doubled after each further one, and at most."""
NO_REPLY = 120.0
"""Seconds without a reply after which a message is sent again, doubled each time, so that slow sites get few copies.
A SuperNode may pull a message and die; Flower does not report this if the SuperNode is back within a heartbeat."""


class RoundWait:
    """Waiting of one round: reports silent sites and ends at the timeout.

    Args:
        sites: Connected sites.
        round: Label of the round in messages.
        least: Number of updates that the round requires.
        deadline: Timeout in seconds; None waits until all sites have replied.
    """

    def __init__(self, sites: SiteManager, round: str, least: int, deadline: float | None):
        self.sites = sites
        self.round = round
        self.min_updates = least
        self.deadline = deadline
        self.began = self.heard = time.monotonic()
        self.warned = False

    def is_over(self, waiting: Iterable[int], done: int, heard: bool) -> bool:
        """Return whether the round has waited long enough; otherwise sleep until the next poll.

        Args:
            waiting: Clients whose reply is awaited; if there are none, waiting ends.
            done: Number of updates that have arrived.
            heard: Whether a reply has arrived since the last call.

        Raises:
            EngineError: If too few updates have arrived by the timeout and ``on_timeout`` is ``abort``.
        """
        sites = self.sites
        now = time.monotonic()
        left = sorted(waiting)
        if not left:
            return True
        if self.deadline is not None and now > self.began + self.deadline:
            if done >= self.min_updates or sites.round_policy.on_timeout == "continue":
                return True
            came = f"Round {self.round}: {done} of at least {self.min_updates} updates arrived"
            if sites.round_policy.on_timeout == "abort":
                raise EngineError(
                    f"{came} within {self.deadline:g} s, so the run stops (on_timeout: abort). "
                    "Resume it when the sites are back."
                )
            if not self.warned:
                self.warned = True
                sites.warn(f"{came} in time; still waiting.")
        if heard:
            self.heard = now
        if now - self.heard > SILENCE:
            self.heard = now
            names = "; ".join(f"{sites.name(client)}, {sites.sites[client].describe()}" for client in left[:10])
            silent = f"Round {self.round}: no reply for {SILENCE:g} s"
            sites.warn(f"{silent}. Waiting for {names}. Set --round-timeout to limit the wait.")
        time.sleep(POLL)
        return False


def retry_delay(failures: int) -> float:
    """Return the seconds to wait before sending a message again; they grow so that Flower's slow processes do not pile up.

    >>> [retry_delay(n) for n in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(PAUSE * 2.0 ** (failures - 1), LONGEST)


@dataclass
class PendingRequest:
    """A message without a reply so far.

    Attributes:
        node: Flower's identifier of the receiving SuperNode.
        due: Monotonic time in seconds at which the message is sent again.
        wait: Seconds between sending and ``due``.
        offline: Whether the SuperNode was seen disconnected since the message was sent.
    """

    node: int
    due: float
    wait: float = NO_REPLY
    offline: bool = False


@dataclass
class PendingRequests:
    """Messages to sites; each is sent again until its site replies or has failed too often.

    Attributes:
        sites: Connected sites.
        round: Label of the round in messages.
        take: Validates and converts a reply; None means that the site has no result without being at fault.
        seconds: Time to live of a message.
        requests: Requests without a reply, by client.
        failures: Number of failed messages, by client.

    Several copies of a message can be in transit: sites reply to each copy identically, and the first reply is used.
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

    def add(self, client: int, request: Frame, round: str) -> None:
        """Send a client a request at the next step.

        Args:
            client: Number of the client.
            request: Message to send.
            round: Label of the round, also for messages that are sent again.
        """
        self.requests[client] = request
        self.round = round
        self.failures.pop(client, None)

    def step(self) -> list[tuple[int, Any]]:
        """Send due messages and collect replies.

        Returns:
            Clients and results; the result is None if the client will not send one.
        """
        sites, connection, nodes = self.sites, self.sites.connection, self.sites.nodes
        try:
            waits = self._lost()
            unsent = sorted(self.requests.keys() - self._waiting.keys())
            here = sites.connected() if unsent else sites.connected(SELDOM)
            for client in unsent:
                if nodes.get(client) not in here:
                    self._again.pop(client, None)  # a node that reconnects is asked immediately
                elif time.monotonic() >= self._again.get(client, 0.0):
                    request = self.requests[client]
                    identity = connection.push(nodes[client], request, self.round, self.seconds)
                    self._asked[identity] = (client, request)
                    wait = waits.get(client, NO_REPLY)
                    self._waiting[client] = PendingRequest(nodes[client], time.monotonic() + wait, wait)
            answers = connection.pull(list(self._asked))
        except LinkClosedError as error:
            sites.warn(f"{error} Waiting for the SuperLink to come back.")
            connection.reopen()
            sites.count("resent", len(self._asked))
            self._asked, self._waiting = {}, {}
            return []
        replies = []
        for identity, frame in answers:
            client, request = self._asked.pop(identity, (-1, frame))
            attempt = connection.attempt(identity)
            if self.requests.get(client) is not request:
                continue  # the client was dropped, or has replied already, perhaps to another copy of the message
            if frame.kind == "failed":
                if any(other is request for _, other in self._asked.values()):
                    continue  # another copy of the message is in transit
                self._failed(client, frame)
                if client in self.requests:
                    continue
                replies.append((client, None))
                continue
            kind = self.requests[client].kind
            self.drop(client)
            sites.sites[client].replied(trained=kind == "train")
            try:
                # A site may refuse a statistic; ``take`` decides what follows.
                may_refuse = kind == "sums" and frame.kind == "refused"
                reply = frame if may_refuse else connection.checked(frame, attempt)
                replies.append((client, self.take(client, reply)))
            except EngineError:
                raise
            except Exception as error:  # whatever a site replies, the run continues
                reason = error if isinstance(error, UnskewError) else f"it cannot be read ({type(error).__name__})"
                sites.fault(client, f"its reply was rejected because {printable(reason)}")
                replies.append((client, None))
        return replies

    def _lost(self) -> dict[int, float]:
        """Mark messages that may be lost as unsent, so that they are sent again.

        Returns:
            Seconds to wait for a reply to the next copy, by client.
        """
        here, nodes = self.sites.connected(SELDOM), self.sites.nodes
        now = time.monotonic()
        waits = {}
        for client, sent in [*self._waiting.items()]:
            node = nodes.get(client)
            back = (sent.offline or node != sent.node) and node in here
            sent.offline = sent.offline or sent.node not in here
            if not back and now < sent.due:
                continue
            reason = "its SuperNode was offline" if back else f"no reply for {sent.wait:.0f} s"
            self.sites.resent(client, reason)
            waits[client] = 2 * sent.wait
            del self._waiting[client]
        return waits

    def _failed(self, client: int, frame: Frame) -> None:
        """Schedule a failed message to be sent again after a growing pause; too many failures are a fault."""
        self._waiting.pop(client, None)
        reason = printable(frame.config.get("reason"))
        self.sites.resent(client, reason, failed=True)
        self.sites.connection.poll_soon()
        self.failures[client] = self.failures.get(client, 0) + 1
        self._again[client] = time.monotonic() + retry_delay(self.failures[client])
        if self.failures[client] > FAILURES and client in self.requests:
            self.sites.fault(client, f"its SuperNode fails: {reason}")
            self.drop(client)

    def drop(self, client: int) -> None:
        """Stop waiting for a client's reply."""
        self._waiting.pop(client, None)
        del self.requests[client]


def ask_sites(
    sites: SiteManager,
    requests: Mapping[int, Frame],
    round: str,
    take: Callable[[int, Frame], Any],
    strict: bool = False,
    least: int = 1,
    without: str = "the round continues without it",
) -> Iterator[tuple[int, Any]]:
    """Send each client its request and yield the results of ``take`` as replies arrive.

    Args:
        sites: Connected sites.
        requests: Request for each client.
        round: Label of the round in messages and logs.
        take: Validates and converts a reply.
        strict: Whether all sites must reply, without a timeout.
        least: Required number of replies, if larger than ``min_updates``.
        without: Consequence of a missing reply, for the warning.

    Yields:
        Client number and result of ``take``.

    Raises:
        EngineError: If too few sites reply in time and ``on_timeout`` is ``abort``.
    """
    deadline = None if strict else sites.round_policy.round_timeout
    excluded = sites.excluded
    wanted = {client: frame for client, frame in requests.items() if client not in excluded}
    pending = PendingRequests(sites, round, take, deadline or 86400.0, wanted)
    phase = next((frame.kind for frame in wanted.values()), None)
    wait, done = RoundWait(sites, round, max(sites.round_policy.min_updates, least), deadline), 0
    sites.await_replies(pending.requests, phase)
    while pending.requests:
        answers = pending.step()
        for client, reply in answers:
            if reply is not None:
                done += 1
                yield client, reply
        for client in pending.requests.keys() & sites.barred:
            pending.drop(client)
        sites.await_replies(pending.requests)
        sites.check_stopped()
        if wait.is_over(pending.requests, done, bool(answers)):
            break
    if pending.requests:
        sites.count("late", len(pending.requests))
        names = ", ".join(sites.name(client) for client in sorted(pending.requests)[:10])
        sites.warn(f"Round {round}: no reply from {names} within {deadline:g} s; {without}.")
    sites.await_replies(())
