"""The sites of a run as the server knows them: who is there, who answers, who has sent nonsense."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unskew.deployment.agreement import PROTOCOL
from unskew.deployment.arrays import Nonsense
from unskew.deployment.link import Link, LinkLost
from unskew.deployment.thin.frames import Frame
from unskew.errors import ConfigError, EngineError

POLL = 0.2
NODES = 2.0
"""Seconds between two looks at answers, and at which SuperNodes are connected."""
SILENCE = 300.0
"""Seconds without an answer after which the user is told who is waited for."""
FAILURES = 10
"""Times that a message is sent again because Flower could not deliver it or its app ended, before that is a fault."""
SKEW = 300.0
"""Seconds by which a site's clock may differ before that is said."""
Short = Literal["wait", "go", "stop"]
"""What is done when fewer updates than needed have come by the deadline."""


@dataclass(frozen=True)
class Patience:
    """How long a round waits, and for how many.

    Attributes:
        deadline: Seconds; None waits until all have answered.
        least: Updates that a round needs.
        short: What is done when fewer have come by the deadline: ``wait`` for them, ``go`` on without, or ``stop``.
        faults: Messages that could not be used, after which a site is excluded.
    """

    deadline: float | None = None
    least: int = 1
    short: Short = "wait"
    faults: int = 3


@dataclass
class Sites:
    """Sends messages to sites and gathers the answers, each for its run, round, client and attempt.

    Attributes:
        link: The bridge to Flower's grid.
        reconnect: Brings the bridge back after the SuperLink was gone.
        run: The run's identity.
        about: What every message says: the experiment's digest and what the data are.
        patience: How long it waits.
        tell: Tells the user something.
    """

    link: Link
    reconnect: Callable[[], None]
    run: str
    about: Mapping[str, Any]
    patience: Patience
    tell: Callable[[str], None]
    nodes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    faults: dict[int, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"late": 0, "refused": 0, "resent": 0})
    _sent: dict[str, int] = field(default_factory=dict)
    _attempts: int = 0
    _connected: set[int] = field(default_factory=set)
    _looked: float = 0.0

    def name(self, client: int) -> str:
        """What a site is called."""
        return f"{self.names[client]} (client {client})" if client in self.names else f"client {client}"

    @property
    def excluded(self) -> list[int]:
        """Clients whose messages could not be used too often."""
        return [client for client, count in self.faults.items() if count >= self.patience.faults]

    def fault(self, client: int, reason: str) -> None:
        """Count a message of a site that cannot be used; too many exclude it."""
        self.faults[client] = self.faults.get(client, 0) + 1
        self.counts["refused"] += 1
        count, most = self.faults[client], self.patience.faults
        what = "it is excluded from the run" if count == most else f"{count} of {most}, then it is excluded"
        self.tell(f"{self.name(client)}: {reason.rstrip('.')}; {what}.")

    def connected(self, at_once: bool = False) -> set[int]:
        """The nodes that Flower sees, looked up every other second."""
        if at_once or time.monotonic() - self._looked > NODES:
            self._connected, self._looked = set(self.link.nodes()), time.monotonic()
        return self._connected

    def gather(self, clients: int, seconds: float, hello: Frame) -> dict[int, Frame]:
        """Wait until every client of the experiment has a site, and ask each what it holds.

        Raises:
            EngineError: Some do not come.
            ConfigError: Two sites say that they are the same client, or one refuses.
        """
        end = time.monotonic() + seconds
        found: dict[int, Frame] = {}
        asked: dict[str, int] = {}
        known: set[int] = set()
        while len(found) < clients:
            try:
                for node in self.connected() - known:
                    known.add(node)
                    asked[self._push(node, hello, "hello", seconds)] = node
                answers = self.link.pull(list(asked)) if asked else []
            except LinkLost as error:
                self.tell(str(error))
                self.reconnect()
                known, asked = set(self.nodes.values()), {}
                continue
            for identity, frame in answers:
                node = asked.pop(identity)
                if frame.kind == "failed":
                    known.discard(node)  # it went before it could answer
                    continue
                client = self._greeted(frame, clients)
                if client in found:
                    raise ConfigError(
                        f"Two sites say that they are client {client}: {self.names[client]} and {frame.config['name']}. Give "
                        "each a number of its own in its site.yaml."
                    )
                self.nodes[client], self.names[client], found[client] = node, str(frame.config["name"]), frame
            if time.monotonic() > end:
                missing = [str(k) for k in range(clients) if k not in found]
                raise EngineError(
                    f"After {seconds:g} s {len(found)} of {clients} sites are there; missing are the clients "
                    f"{', '.join(missing[:20])}. flwr supernode list shows who is connected; unskew deploy check tells at a "
                    "site what is wrong."
                )
            time.sleep(POLL)
        return dict(sorted(found.items()))

    def _greeted(self, frame: Frame, clients: int) -> int:
        """The client that a site says it is.

        Raises:
            ConfigError: It refuses the run, or is none of its clients.
        """
        if frame.kind != "facts":
            raise ConfigError(f"A site refuses the run: {frame.config.get('reason', frame.kind)}")
        client, name = frame.config.get("client"), frame.config.get("name")
        if not isinstance(client, int) or not 0 <= client < clients or not isinstance(name, str):
            raise ConfigError(f"A site says that it is client {client}, but the experiment has {clients}, from 0.")
        apart = abs(float(frame.config.get("clock", 0.0)) - time.time())
        if apart > SKEW:
            self.tell(f"{name}: its clock differs by {apart:.0f} s from the one here; certificates may seem expired.")
        return client

    def _push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
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
    ) -> Iterator[tuple[int, Any]]:
        """Send each client its message, and give what ``take`` makes of the answers, as they come.

        Args:
            requests: By client.
            round: What logs call it.
            take: Checks an answer.
            strict: Whether all must answer, without a deadline.
            least: Answers that are needed, if that is more than the patience says.

        Raises:
            EngineError: Too few have answered, and the run is to stop then.
        """
        patience = self.patience
        least = max(patience.least, least)
        deadline = None if strict else patience.deadline
        end = None if deadline is None else time.monotonic() + deadline
        left = {k for k in requests if k not in self.excluded}
        asked: dict[str, int] = {}
        waiting: set[int] = set()
        failures: dict[int, int] = {}
        done, told, heard = 0, False, time.monotonic()
        while left:
            try:
                for client in sorted(left - waiting):
                    if self.nodes.get(client) in self.connected():
                        asked[self._push(self.nodes[client], requests[client], round, deadline or 86400.0)] = client
                        waiting.add(client)
                answers = self.link.pull(list(asked)) if asked else []
            except LinkLost as error:
                self.tell(f"{error} Waiting for the SuperLink to come back.")
                self.reconnect()
                self.counts["resent"] += len(asked)
                asked, waiting = {}, set()
                continue
            for identity, frame in answers:
                client, attempt = asked.pop(identity), self._sent.pop(identity)
                if client not in left:
                    continue
                if frame.kind == "failed":
                    waiting.discard(client)  # asked again when it is back
                    self.counts["resent"] += 1
                    self._looked = 0.0
                    failures[client] = failures.get(client, 0) + 1
                    if failures[client] > FAILURES:
                        self.fault(client, f"its SuperNode fails: {frame.config.get('reason')}")
                        left.discard(client)
                    continue
                try:
                    made = take(client, self._checked(frame, attempt))
                except Nonsense as error:
                    self.fault(client, f"its answer was refused, because {error}")
                    left.discard(client)
                    continue
                left.discard(client)
                if made is not None:
                    done += 1
                    yield client, made
            if end is not None and left and time.monotonic() > end:
                if done >= least or patience.short == "go":
                    break
                if patience.short == "stop":
                    raise EngineError(
                        f"Round {round}: {done} of at least {least} updates came within {deadline:g} s, so the run "
                        "stops (short: stop). Resume it when the sites are back."
                    )
                if not told:
                    told = True
                    self.tell(f"Round {round}: {done} of at least {least} updates came in time; waiting for more.")
            heard = time.monotonic() if answers else heard
            if left and time.monotonic() - heard > SILENCE:
                heard = time.monotonic()
                names = ", ".join(self.name(client) for client in sorted(left)[:10])
                self.tell(f"Round {round}: nothing for {SILENCE:g} s; waiting for {names}. --deadline limits that.")
            if left:
                time.sleep(POLL)
        if left:
            self.counts["late"] += len(left)
            names = ", ".join(self.name(client) for client in sorted(left)[:10])
            self.tell(f"Round {round}: no update from {names} within {deadline:g} s; the round goes on without.")

    def _checked(self, frame: Frame, attempt: int) -> Frame:
        """An answer that belongs to what was asked.

        Raises:
            Nonsense: It does not, or the site has refused.
        """
        if frame.kind == "refused":
            raise Nonsense(f"it says: {frame.config.get('reason', 'nothing')}")
        if frame.kind != "forgotten" and (frame.config.get("run"), frame.config.get("attempt")) != (self.run, attempt):
            raise Nonsense("it answers something else than what was asked")
        return frame
