"""The sites of a run as the server knows them: who is there, who answers, who has sent nonsense."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unskew.deployment.agreement import PROTOCOL
from unskew.deployment.arrays import Nonsense, plainly
from unskew.deployment.conversation import Conversation
from unskew.deployment.link import Link
from unskew.deployment.thin.frames import Frame
from unskew.errors import EngineError

POLL = 0.2
NODES = 0.5
"""Seconds between two looks at answers, and at which SuperNodes are connected."""
SILENCE = 300.0
"""Seconds without an answer after which the user is told who is waited for."""
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

    def connected(self) -> set[int]:
        """The nodes that Flower sees, looked up twice a second."""
        if time.monotonic() - self._looked > NODES:
            self._connected, self._looked = set(self.link.nodes()), time.monotonic()
        return self._connected

    def push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
        """Send a message to a node; gives its identity."""
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
        wanted = {k: frame for k, frame in requests.items() if k not in self.excluded}
        talk = Conversation(self, round, take, deadline or 86400.0, wanted)
        done, told, heard = 0, False, time.monotonic()
        while talk.requests:
            answers = talk.step()
            for client, made in answers:
                if made is not None:
                    done += 1
                    yield client, made
            left = sorted(talk.requests)
            if end is not None and left and time.monotonic() > end:
                if done >= least or patience.short == "go":
                    break
                self.check_short(round, done, least)
                if not told:
                    told = True
                    self.tell(f"Round {round}: {done} of at least {least} updates came in time; waiting for more.")
            heard = time.monotonic() if answers else heard
            if left and time.monotonic() - heard > SILENCE:
                heard = time.monotonic()
                self.tell_silence(round, left)
            if left:
                time.sleep(POLL)
        if talk.requests:
            self.counts["late"] += len(talk.requests)
            names = ", ".join(self.name(client) for client in sorted(talk.requests)[:10])
            self.tell(f"Round {round}: no update from {names} within {deadline:g} s; the round goes on without.")

    def check_short(self, round: str, done: int, least: int) -> None:
        """Stop the run if that is what is to be done with too few updates.

        Raises:
            EngineError: It is.
        """
        if self.patience.short == "stop":
            raise EngineError(
                f"Round {round}: {done} of at least {least} updates came within {self.patience.deadline:g} s, so the run "
                "stops (short: stop). Resume it when the sites are back."
            )

    def tell_silence(self, round: str, clients: list[int]) -> None:
        """Say who is waited for."""
        names = ", ".join(self.name(client) for client in clients[:10])
        self.tell(f"Round {round}: nothing for {SILENCE:g} s; waiting for {names}. --deadline limits that.")

    def attempt(self, identity: str) -> int:
        """Which attempt a message was."""
        return self._sent.pop(identity)

    def look_again(self) -> None:
        """Look at once which nodes are connected, when that is asked for next."""
        self._looked = 0.0

    def checked(self, frame: Frame, attempt: int) -> Frame:
        """An answer that belongs to what was asked.

        Raises:
            Nonsense: It does not, or the site has refused.
        """
        if frame.kind == "refused":
            raise Nonsense(f"it says: {plainly(frame.config.get('reason', 'nothing'))}")
        if frame.kind not in ("forgotten", "outdated") and (frame.config.get("run"), frame.config.get("attempt")) != (
            self.run,
            attempt,
        ):
            raise Nonsense("it answers something else than what was asked")
        return frame
