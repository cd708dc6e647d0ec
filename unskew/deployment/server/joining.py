"""Admission of sites: before the first round, and later if a run started without all of them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unskew.deployment.common.agreement import NAME, SKEW, software_versions
from unskew.deployment.flower.grid_bridge import LinkClosedError
from unskew.deployment.secagg.roster import is_signed
from unskew.deployment.server.data_exchange import MOST
from unskew.deployment.server.round_requests import FAILURES, retry_delay
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.fields import read_integer, read_number, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, printable
from unskew.errors import ConfigError, EngineError, UnskewError

POLL = 0.2
"""Seconds between two checks for new sites."""
REPORT = 30.0
"""Seconds between two reports on missing sites."""
AGAIN = 30.0
"""Seconds after which a rejected node is asked again, because its site may have been corrected."""


@dataclass
class JoiningNode:
    """SuperNode whose site is asked to join.

    Attributes:
        asked: Whether it was asked, and is not to be asked again for now.
        again: Monotonic time in seconds from which it may be asked again; 0 if it has not failed.
        tries: Number of failed messages since it has connected.
        failure: Reason why the last message failed; empty if it did not.
        rejected: Reason why its site was rejected; empty if it was not.
    """

    asked: bool = False
    again: float = 0.0
    tries: int = 0
    failure: str = ""
    rejected: str = ""


@dataclass
class SiteRegistry:
    """Registers sites: asks each connected node which client it is and validates its report.

    Attributes:
        sites: Sites of the run; admitted ones are added.
        rounds: Number of rounds of the run.
        seconds: Time to live of a message, and timeout of ``wait_for_sites``.
        check: Validates a site's data report; raises ``InvalidMessageError`` or ``ConfigError``.
        exact: Whether to reject sites with other versions or CPU instructions, instead of warning.
        report: Called with progress messages.
        roster: Public signing keys, by client; each site must prove its client number with its key. Empty skips this.
        challenge: Random text that a site signs as this proof.
        nodes: State of each SuperNode that was connected.
    """

    sites: SiteManager
    rounds: int
    seconds: float
    check: Callable[[int, Frame], Any] = lambda client, frame: None
    exact: bool = False
    report: Callable[[str], None] = print
    roster: Mapping[int, Any] = field(default_factory=dict)
    challenge: str = field(default_factory=lambda: secrets.token_hex(16))
    nodes: dict[int, JoiningNode] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)

    def step(self) -> dict[int, Frame]:
        """Ask new nodes, and retry failed or rejected ones.

        Returns:
            The reports of the sites that were admitted in this call, by client.
        """
        sites = self.sites
        try:
            here = sites.connected()
            for node, state in self.nodes.items():
                if state.again and node not in here:  # a node that reconnects is asked immediately
                    state.asked, state.again, state.tries = False, 0.0, 0
            for node in here:
                state = self.nodes.setdefault(node, JoiningNode())
                if not state.asked and time.monotonic() >= state.again:
                    state.asked = True
                    hello = Frame("hello", {"challenge": self.challenge})
                    self._asked[sites.connection.push(node, hello, "hello", self.seconds)] = node
            answers = sites.connection.pull(list(self._asked))
        except LinkClosedError as error:
            sites.warn(str(error))
            sites.connection.reopen()
            self._asked = {}
            for node, state in self.nodes.items():
                state.asked = node in sites.nodes.values()
            return {}
        joined = {}
        for identity, frame in answers:
            if identity not in self._asked:
                continue  # a second reply to the same message
            node = self._asked.pop(identity)
            state = self.nodes[node]
            if frame.kind == "failed":
                self._failed(state, printable(frame.config.get("reason")))
                continue
            try:
                client = self._greeted(frame)
            except Exception as error:  # whatever a site replies, the others are admitted
                text = error if isinstance(error, UnskewError) else f"it cannot be read ({type(error).__name__})"
                reason = str(error) if isinstance(error, ConfigError) else f"The report of a site is invalid: {text}."
                if not state.rejected:  # once: a site could send another reason each time
                    sites.warn(f"A site was rejected. {reason}")
                    sites.log("rejected", node=str(node), reason=reason)
                state.asked, state.again, state.rejected = False, time.monotonic() + AGAIN, reason
                continue
            state.rejected = state.failure = ""
            joined[client] = frame
            version, key = (printable(frame.config.get(name, "")) for name in ("unskew", "key"))
            sites.admit(client, node, str(frame.config["name"]), version[:40], key[:80])
        return joined

    def _failed(self, state: JoiningNode, reason: str) -> None:
        """Schedule another request to a node after a pause; after too many failures, only when it reconnects."""
        state.tries += 1
        state.again = time.monotonic() + retry_delay(state.tries)
        state.asked = state.tries > FAILURES
        again = "only after its SuperNode reconnects" if state.asked else f"after {retry_delay(state.tries):g} s"
        if state.failure != reason or state.asked:
            self.report(
                f"A SuperNode is connected, but its site does not reply: {reason.rstrip('.')}. Retrying {again}."
            )
        state.failure = reason

    def missing(self, found: Collection[int]) -> str:
        """Describe which sites are connected, which are missing, and why."""
        names = ", ".join(self.sites.name(k) for k in sorted(found)) or "none"
        absent = ", ".join([str(k) for k in range(len(self.sites.sites)) if k not in found][:20])
        nodes = self.sites.nodes
        silent = self.sites.connected(REPORT) - {nodes[k] for k in found}
        states = [self.nodes.get(node, JoiningNode()) for node in silent]
        texts = [f"Connected: {names}. Missing clients: {absent}."]
        if count := sum(not state.rejected for state in states):
            texts.append(f"{count} SuperNodes are connected, but their sites have not replied.")
        texts += sorted({f"Last failure: {state.failure}" for state in states if state.failure})[:3]
        texts += sorted({f"Rejected: {state.rejected}" for state in states if state.rejected})[:3]
        return " ".join(text.rstrip(".") + "." for text in texts)

    def _greeted(self, frame: Frame) -> int:
        """Validate a site's first reply and return its client number."""
        sites = self.sites
        if frame.kind != "client_info":
            raise ConfigError(f"A site rejected the run: {printable(frame.config.get('reason', frame.kind))}")
        client, name = read_integer(frame.config, "client"), read_text(frame.config, "name")
        clock, num_samples = read_number(frame.config, "clock", 0.0, 1e12), read_integer(frame.config, "num_samples")
        if not re.fullmatch(NAME, name):
            raise InvalidMessageError(
                "its name contains characters other than letters, digits, '-', '_' and '.', or is longer than 64"
            )
        if not 0 < num_samples <= MOST:
            raise InvalidMessageError(f"{name} reports {num_samples} samples; a site must have 1 to {MOST}")
        clients = len(sites.sites)
        if client >= clients:
            raise ConfigError(f"A site reports to be client {client}, but the experiment has {clients}, from 0.")
        proof = ["hello", sites.run, self.challenge, client]
        if self.roster and not is_signed(self.roster, client, proof, frame.config.get("signature")):
            raise ConfigError(
                f"{name} reports to be client {client}, but its signature does not match the roster's key of this client. "
                "Compare signing.pub and roster.txt at the site with the server's roster.txt."
            )
        if other := sites.sites[client].site:
            raise ConfigError(
                f"Two sites report to be client {client}: {other} and {name}. Set a different client number in each "
                "site.yaml."
            )
        agreed = read_integer(frame.config, "rounds")
        if agreed < self.rounds:
            raise ConfigError(
                f"{name} has agreed to {agreed} rounds, but the run has {self.rounds}. Install an experiment with that "
                "number of rounds at the site, or run fewer."
            )
        self.check(client, frame)
        self._compare(name, frame)
        clock_difference = abs(clock - time.time())
        if clock_difference > SKEW:
            sites.warn(
                f"{name}: its clock differs by {clock_difference:.0f} s from the server's; certificates may appear expired."
            )
        return client

    def _compare(self, name: str, frame: Frame) -> None:
        """Warn about, or with ``exact`` reject, software versions that differ from the server's."""
        other = {
            k: printable(frame.config.get(k))[:40] for k, v in software_versions().items() if frame.config.get(k) != v
        }
        if not other:
            return
        differences = ", ".join(
            f"{k} {other_version} (here {software_versions()[k]})" for k, other_version in other.items()
        )
        if self.exact:
            raise ConfigError(f"{name} has {differences}; install the same versions, or remove --exact.")
        self.sites.warn(f"{name} has {differences}, so results may differ from a simulation here in the last bits.")


def wait_for_sites(registry: SiteRegistry, quorum: int) -> dict[int, Frame]:
    """Wait until enough clients of the experiment have a connected site.

    Args:
        registry: Registry of the sites.
        quorum: Number of clients to wait for.

    Returns:
        The report of each site, by client.

    Raises:
        EngineError: If too few sites connect in time.
        ConfigError: If at least as many sites were rejected as the experiment has clients.
    """
    began = reported = time.monotonic()
    present: dict[int, Frame] = {}
    while True:
        present |= registry.step()
        if len(present) >= quorum:
            return dict(sorted(present.items()))
        connected = registry.sites.connected()
        rejected = [state.rejected for node, state in registry.nodes.items() if state.rejected and node in connected]
        if len(rejected) >= len(registry.sites.sites):
            raise ConfigError(rejected[0])
        registry.sites.check_stopped()
        now = time.monotonic()
        if now > began + registry.seconds:
            raise EngineError(
                f"{len(present)} of {quorum} sites are connected after {registry.seconds:g} s. {registry.missing(present)} "
                "Run unskew deploy check at a site to find the cause."
            )
        if now > reported + REPORT:
            reported = now
            registry.report(f"{len(present)} of {quorum} sites after {now - began:.0f} s. {registry.missing(present)}")
        time.sleep(POLL)
