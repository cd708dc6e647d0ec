"""Connections to the sites of a run: requests with retries, and waiting for the replies of a round."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from unskew.deployment.common.agreement import PROTOCOL
from unskew.deployment.flower.grid_bridge import GridBridge, LinkClosedError
from unskew.deployment.server.audit_log import AuditLog
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, printable
from unskew.errors import ConfigError, EngineError, UnskewError
from unskew.simulation.round_loop import RunInterrupted

POLL = 0.2
NODES = 0.5
"""Seconds between two polls for replies (``POLL``) and for connected SuperNodes (``NODES``)."""
SILENCE = 300.0
"""Seconds without a reply after which the user is told which sites are missing."""
OnTimeout = Literal["wait", "continue", "abort"]
"""Actions after the timeout if fewer updates than required have arrived."""
Seconds = Annotated[float, Field(gt=0, lt=1e9)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


FAILURES = 10
"""Number of times that a failed message (not delivered, or its app ended) is sent again before this counts as a fault."""
SELDOM = 5.0
"""Seconds between two polls for connected SuperNodes while all messages are sent."""
PAUSE, LONGEST = 1.0, 60.0
"""Seconds before a failed message is sent again: after the first failure, doubled after each further one, and at most."""
NO_REPLY = 120.0
"""Seconds without a reply after which a message is sent again, doubled each time, so that slow sites get few copies.
A SuperNode may pull a message and die; Flower does not report this if the SuperNode is back within a heartbeat."""


@dataclass(frozen=True)
class RoundPolicy:
    """Waiting time of a round and number of updates required.

    Attributes:
        round_timeout: Seconds to wait for updates; None waits until all sites have replied.
        min_updates: Number of updates that a round requires.
        on_timeout: Action if too few updates have arrived by then: ``wait``, ``continue`` without them, or ``abort``.
        max_invalid_replies: Number of invalid replies after which a site is excluded.
    """

    round_timeout: Seconds | None = None
    min_updates: Count = 1
    on_timeout: OnTimeout = "wait"
    max_invalid_replies: Count = 3


@dataclass
class Contact:
    """State of the connection to one client's site. Times are in seconds since 1970.

    Attributes:
        version: Version of unskew at the site; ``key``: fingerprint of its node key, as the site reports it.
        connected: Whether its SuperNode is connected; ``since``: time of the last change of this state.
        seen: Time of its last reply; ``answered``: number of rounds in which it trained.
        error: Reason why the last message to it failed.
    """

    version: str = ""
    key: str = ""
    connected: bool = False
    since: float = field(default_factory=time.time)
    seen: float | None = None
    answered: int = 0
    error: str = ""

    def describe(self) -> str:
        """Return the state of the connection and the last failure, as part of a sentence."""
        state = "connected" if self.connected else f"not connected for {time.time() - self.since:.0f} s"
        return f"{state}; last failure: {self.error}" if self.error else state


@dataclass
class SiteManager:
    """Sends requests to sites and collects replies, each tied to its run, round, client and attempt.

    Attributes:
        link: Bridge to Flower's grid.
        reconnect: Restores the bridge after a failure of the SuperLink.
        run: Identifier of the run.
        about: Header of every message: digest of the experiment and data schema.
        round_policy: Waiting time and required updates of a round.
        warn: Called with warnings for the user.
        contacts: State of the connection to each client's site.
        audit: Audit log, or None.
        total: Number of clients; ``round``: current round, from 1 (0 before the first); ``phase``: kind of the last request.
        barred: Clients that the operator has excluded.
        pending: Clients whose reply is awaited.
    """

    link: GridBridge
    reconnect: Callable[[], None]
    run: str
    about: Mapping[str, Any]
    round_policy: RoundPolicy
    warn: Callable[[str], None]
    nodes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    faults: dict[int, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"late": 0, "refused": 0, "resent": 0})
    contacts: dict[int, Contact] = field(default_factory=dict)
    audit: AuditLog | None = None
    total: int = 0
    round: int = 0
    phase: str = "gathering"
    barred: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    last_warning: str = ""
    stopping: Literal["", "after this round", "now"] = ""
    _sent: dict[str, int] = field(default_factory=dict)
    _attempts: int = 0
    _connected: set[int] = field(default_factory=set)
    _looked: float = 0.0

    def name(self, client: int) -> str:
        """Return how messages name a client: its site, if known, and its number."""
        return f"{self.names[client]} (client {client})" if client in self.names else f"client {client}"

    @property
    def excluded(self) -> list[int]:
        """Clients that the operator has excluded, or that sent too many invalid replies."""
        return sorted(
            self.barred | {k for k, count in self.faults.items() if count >= self.round_policy.max_invalid_replies}
        )

    def fault(self, client: int, reason: str, last: bool = False) -> None:
        """Count an invalid reply of a site and warn; too many exclude the site.

        Args:
            client: Number of the client.
            reason: Reason why the reply is invalid.
            last: Whether to exclude the site at once.
        """
        most = self.round_policy.max_invalid_replies
        count = self.faults[client] = most if last else self.faults.get(client, 0) + 1
        self.counts["refused"] += 1
        what = "it is excluded from the run" if count == most else f"fault {count} of {most}, then it is excluded"
        self.warn(f"{self.name(client)}: {reason.rstrip('.')}; {what}.")
        self.log("rejected", client, reason=reason)
        if count == most:
            self.log("excluded", client, reason=f"{most} invalid replies")

    def log(self, event: str, client: int | None = None, **fields: Any) -> None:
        """Append an event to the audit log, with the client's site and node key.

        Args:
            event: Name of the event.
            client: Number of the client, or None.
            **fields: Further fields.
        """
        if self.audit is not None:
            contact = self.contacts.get(-1 if client is None else client, Contact())
            site = None if client is None else self.names.get(client)
            self.audit.add(event, self.round, client=client, site=site, key=contact.key, **fields)

    def contact(self, client: int) -> Contact:
        """Return the state of the connection to a client's site."""
        return self.contacts.setdefault(client, Contact())

    def status(self) -> dict[str, Any]:
        """Return the data that ``unskew deploy status`` and ``sites`` show, as JSON values."""
        excluded, sites = self.excluded, []
        for k in range(self.total):
            counts = {"faults": self.faults.get(k, 0), "excluded": k in excluded, "awaited": k in self.pending}
            sites.append({"client": k, "site": self.names.get(k, ""), **vars(self.contact(k)), **counts})
        known = ("run", "round", "phase", "stopping", "last_warning")
        return {**{name: getattr(self, name) for name in known}, "sites": sites}

    def stop(self, now: bool) -> None:
        """Request the end of the run, after the current round or immediately; called from another thread."""
        self.stopping = "now" if now else "after this round"
        self.log("stop requested", reason=self.stopping)

    def exclude(self, which: str, save: Callable[[set[int]], None]) -> str:
        """Exclude a site by its name or client number; called from another thread.

        Args:
            which: Name or client number of the site.
            save: Stores the excluded clients.

        Returns:
            How messages name the site.

        Raises:
            ConfigError: If no site or several sites match, or too few sites would remain.
        """
        matches = [k for k in range(self.total) if which in (self.names.get(k), str(k))]
        if len(matches) != 1:
            raise ConfigError(
                f"{which!r} matches {len(matches)} sites of this run; list them with unskew deploy sites."
            )
        least = max(1, self.round_policy.min_updates)
        if self.total - len({*self.excluded, matches[0]}) < least:
            raise ConfigError(
                f"A round requires {least} sites, so {self.name(matches[0])} cannot be excluded; stop the run instead."
            )
        self.barred.add(matches[0])
        save(self.barred)
        self.log("excluded", matches[0], reason="by the operator")
        return self.name(matches[0])

    def check_stopped(self, between_rounds: bool = False) -> None:
        """Interrupt the run if the operator requested it and no work of a round would be lost.

        Args:
            between_rounds: Whether no round is in progress.

        Raises:
            RunInterrupted: If the operator requested the end of the run.
        """
        if self.stopping == "now" or (self.stopping and (between_rounds or not self.round)):
            self.log("stopped")
            raise RunInterrupted(signal.SIGTERM)

    def connected(self, seconds: float | None = None) -> set[int]:
        """Return the connected nodes, polled again if the last poll is more than ``seconds`` ago (default: ``NODES``)."""
        if time.monotonic() - self._looked > (NODES if seconds is None else seconds):
            self._connected, self._looked = set(self.link.nodes()), time.monotonic()
            for client, node in self.nodes.items():
                contact = self.contact(client)
                if contact.connected != (node in self._connected):
                    contact.connected, contact.since = not contact.connected, time.time()
        return self._connected

    def push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
        """Send a message to a node and return the message's identifier.

        Args:
            node: Flower's identifier of the node.
            frame: Message to send.
            round: Label of the round in Flower's logs.
            seconds: Time to live of the message.
        """
        self._attempts += 1
        config = {**frame.config, **self.about, "protocol": PROTOCOL, "run": self.run, "attempt": self._attempts}
        identity = self.link.push(node, Frame(frame.kind, config, frame.figures, frame.arrays), round, seconds)
        self._sent[identity] = self._attempts
        return identity

    def ask(
        self,
        requests: Mapping[int, Frame],
        round: str,
        take: Callable[[int, Frame], Any],
        strict: bool = False,
        least: int = 1,
        without: str = "the round continues without it",
    ) -> Iterator[tuple[int, Any]]:
        """Send each client its request and yield the results of ``take`` as replies arrive.

        Args:
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
        deadline = None if strict else self.round_policy.round_timeout
        wanted = {k: frame for k, frame in requests.items() if k not in self.excluded}
        talk = PendingRequests(self, round, take, deadline or 86400.0, wanted)
        self.phase = next((frame.kind for frame in wanted.values()), self.phase)
        wait, done = RoundWait(self, round, max(self.round_policy.min_updates, least), deadline), 0
        while talk.requests:
            answers = talk.step()
            for client, reply in answers:
                if reply is not None:
                    done += 1
                    yield client, reply
            for client in talk.requests.keys() & self.barred:
                talk.drop(client)
            self.pending = {*talk.requests}
            self.check_stopped()
            if wait.is_over(talk.requests, done, bool(answers)):
                break
        if talk.requests:
            self.counts["late"] += len(talk.requests)
            names = ", ".join(self.name(client) for client in sorted(talk.requests)[:10])
            self.warn(f"Round {round}: no reply from {names} within {deadline:g} s; {without}.")
        self.pending = set()

    def attempt(self, identity: str) -> int:
        """Return the attempt number of a message; -1 for a second reply to it."""
        return self._sent.pop(identity, -1)

    def look_again(self) -> None:
        """Poll for connected nodes at the next call of ``connected``."""
        self._looked = 0.0

    def checked(self, frame: Frame, attempt: int) -> Frame:
        """Return a reply after validating that it belongs to its request.

        Args:
            frame: Reply of a site.
            attempt: Attempt number of the request.

        Raises:
            InvalidMessageError: If the reply belongs to another request, or the site rejected the request.
        """
        if frame.kind == "refused":
            raise InvalidMessageError(
                f"the site rejected the request: {printable(frame.config.get('reason', 'no reason'))}"
            )
        if frame.kind not in ("forgotten", "outdated") and (frame.config.get("run"), frame.config.get("attempt")) != (
            self.run,
            attempt,
        ):
            raise InvalidMessageError("it belongs to another request")
        return frame


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
        self.told = False

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
            if not self.told:
                self.told = True
                sites.warn(f"{came} in time; still waiting.")
        if heard:
            self.heard = now
        if now - self.heard > SILENCE:
            self.heard = now
            names = "; ".join(f"{sites.name(client)}, {sites.contact(client).describe()}" for client in left[:10])
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

    def step(self) -> list[tuple[int, Any]]:
        """Send due messages and collect replies.

        Returns:
            Clients and results; the result is None if the client will not send one.
        """
        sites = self.sites
        try:
            waits = self._lost()
            unsent = sorted(self.requests.keys() - self._waiting.keys())
            here = sites.connected() if unsent else sites.connected(SELDOM)
            for client in unsent:
                if sites.nodes.get(client) not in here:
                    self._again.pop(client, None)  # a node that reconnects is asked immediately
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
        replies = []
        for identity, frame in answers:
            client, request = self._asked.pop(identity, (-1, frame))
            attempt = sites.attempt(identity)
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
            contact = sites.contact(client)
            contact.seen, contact.error = time.time(), ""
            contact.answered += kind == "train"
            try:
                replies.append((client, self.take(client, sites.checked(frame, attempt))))
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
        here = self.sites.connected(SELDOM)
        now = time.monotonic()
        waits = {}
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
        """Schedule a failed message to be sent again after a growing pause; too many failures are a fault."""
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
        """Stop waiting for a client's reply."""
        self._waiting.pop(client, None)
        del self.requests[client]
