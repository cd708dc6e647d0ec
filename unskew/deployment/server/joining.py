"""Sites that come: before the first round, and later where a run began without some of them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from unskew.deployment.flower.grid_bridge import LinkClosedError
from unskew.deployment.secagg.roster import is_signed
from unskew.deployment.server.data_exchange import MOST
from unskew.deployment.server.sites import FAILURES, retry_delay
from unskew.deployment.site.config import NAME
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import read_integer, read_number, read_text
from unskew.deployment.wire.tensor_codec import InvalidMessageError, printable
from unskew.errors import ConfigError, EngineError
from unskew.version import __version__

if TYPE_CHECKING:
    from unskew.deployment.server.sites import SiteManager

POLL = 0.2
"""Seconds between two looks at who has come."""
REPORT = 30.0
"""Seconds between two reports on who is missing."""
SKEW = 300.0
"""Seconds by which a site's clock may differ before that is said."""
AGAIN = 30.0
"""Seconds after which a node that was not admitted is asked again: its site may have been corrected."""


def software_versions() -> dict[str, str]:
    """Return what the bits of a result depend on: the versions of unskew and PyTorch, and the CPU's vector instructions."""
    return {
        "unskew": __version__,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


@dataclass
class SiteRegistry:
    """Asks each node that connects which client it is.

    Attributes:
        sites: Those that are known.
        clients: How many the experiment has.
        seconds: After which Flower forgets the question.
        check: Validates what a site reports of its data; raises ``InvalidMessageError`` or ``ConfigError``.
        roster: Public signing keys, by client: with them each site must prove its number. Empty: no proof is asked for.
        exact: Whether sites with other versions or CPU instructions are rejected, instead of reported.
        rejected: By node: why its site was not admitted.
        report: Prints who is waited for.
        failures: By node: why the last message to it failed.
    """

    sites: SiteManager
    clients: int
    seconds: float
    check: Callable[[int, Frame], Any] = lambda client, frame: None
    exact: bool = False
    report: Callable[[str], None] = print
    roster: Mapping[int, Any] = field(default_factory=dict)
    challenge: str = field(default_factory=lambda: secrets.token_hex(16))
    rejected: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)
    _asked: dict[str, int] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=dict)
    _again: dict[int, float] = field(default_factory=dict)

    def step(self) -> dict[int, Frame]:
        """Return what each site reports that was admitted since the last call; other sites are reported and asked again."""
        sites = self.sites
        try:
            here = sites.connected()
            for node in self._again.keys() - here:  # when it comes back it is asked at once
                del self._again[node]
                self._tries.pop(node, None)
                self._known.discard(node)
            for node in here - self._known:
                if time.monotonic() < self._again.get(node, 0.0):
                    continue
                self._known.add(node)
                self._asked[sites.push(node, Frame("hello", {"challenge": self.challenge}), "hello", self.seconds)] = (
                    node
                )
            answers = sites.link.pull(list(self._asked)) if self._asked else []
        except LinkClosedError as error:
            sites.warn(str(error))
            sites.reconnect()
            self._known, self._asked = set(sites.nodes.values()), {}
            return {}
        joined = {}
        for identity, frame in answers:
            node = self._asked.pop(identity)
            if frame.kind == "failed":
                self._failed(node, printable(frame.config.get("reason")))
                continue
            try:
                client = self._greeted(frame)
            except (ConfigError, InvalidMessageError) as error:
                reason = str(error) if isinstance(error, ConfigError) else f"A site's report is not valid: {error}."
                if self.rejected.get(node) != reason:
                    sites.warn(f"A site is not admitted. {reason}")
                    sites.log("rejected", node=str(node), reason=reason)
                self.rejected[node], self._again[node] = reason, time.monotonic() + AGAIN
                self._known.discard(node)
                continue
            self.rejected.pop(node, None)
            sites.nodes[client], sites.names[client], joined[client] = node, str(frame.config["name"]), frame
            self.failures.pop(node, None)
            contact = sites.contact(client)
            contact.connected, contact.since = True, time.time()
            contact.seen, contact.error = contact.since, ""
            contact.version = printable(frame.config.get("unskew", ""))[:40]
            contact.key = printable(frame.config.get("key", ""))[:80]
            sites.log("joined", client, version=contact.version)
        return joined

    def _failed(self, node: int, reason: str) -> None:
        """Ask a node again after a pause, a limited number of times until it connects anew."""
        tries = self._tries[node] = self._tries.get(node, 0) + 1
        self._again[node] = time.monotonic() + retry_delay(tries)
        again = f"It is asked again after {retry_delay(tries):g} s"
        if tries > FAILURES:
            again = "It is not asked again until its SuperNode reconnects"
        else:
            self._known.discard(node)
        if self.failures.get(node) != reason or tries > FAILURES:
            self.report(f"A SuperNode is connected, but its site does not answer: {reason.rstrip('.')}. {again}.")
        self.failures[node] = reason

    def missing(self, found: Collection[int]) -> str:
        """Return who is connected and who is missing, and why, in sentences."""
        names = ", ".join(self.sites.name(k) for k in sorted(found)) or "none"
        absent = ", ".join([str(k) for k in range(self.clients) if k not in found][:20])
        silent = self.sites.connected(REPORT) - {self.sites.nodes[k] for k in found}
        texts = [f"Connected: {names}. Missing are the clients {absent}."]
        if silent - self.rejected.keys():
            texts.append(
                f"{len(silent - self.rejected.keys())} SuperNodes are connected, but their sites have not answered."
            )
        for what, reasons in (("Last failure", self.failures), ("Not admitted", self.rejected)):
            texts += [f"{what}: {reason}" for reason in sorted({reasons[node] for node in silent & reasons.keys()})[:3]]
        return " ".join(text.rstrip(".") + "." for text in texts)

    def _greeted(self, frame: Frame) -> int:
        """Return the number of the client that a site reports to be."""
        sites = self.sites
        if frame.kind != "facts":
            raise ConfigError(f"A site rejects the run: {printable(frame.config.get('reason', frame.kind))}")
        client, name = read_integer(frame.config, "client"), read_text(frame.config, "name")
        clock, examples = read_number(frame.config, "clock"), read_integer(frame.config, "examples")
        if not re.fullmatch(NAME, name):
            raise InvalidMessageError(
                "its name has other characters than letters, digits, '-', '_' and '.', or more than 64"
            )
        if not 0 < examples <= MOST:
            raise InvalidMessageError(f"{name} reports {examples} samples; a site has from 1 to {MOST}")
        if client >= self.clients:
            raise ConfigError(f"A site says that it is client {client}, but the experiment has {self.clients}, from 0.")
        proof = ["hello", sites.run, self.challenge, client]
        if self.roster and not is_signed(self.roster, client, proof, frame.config.get("signature")):
            raise ConfigError(
                f"{name} reports to be client {client}, but has not signed that with the key that the roster names for this "
                "client. Compare signing.pub and roster.txt at the site with the server's roster.txt."
            )
        if client in sites.names:
            raise ConfigError(
                f"Two sites say that they are client {client}: {sites.names[client]} and {name}. Give each a number of its "
                "own in its site.yaml."
            )
        self.check(client, frame)
        self._compare(name, frame)
        apart = abs(clock - time.time())
        if apart > SKEW:
            sites.warn(f"{name}: its clock differs by {apart:.0f} s from the one here; certificates may seem expired.")
        return client

    def _compare(self, name: str, frame: Frame) -> None:
        """Report or reject other versions than the server's."""
        other = {
            k: printable(frame.config.get(k))[:40] for k, v in software_versions().items() if frame.config.get(k) != v
        }
        if not other:
            return
        differences = ", ".join(
            f"{k} {other_version} (here {software_versions()[k]})" for k, other_version in other.items()
        )
        if self.exact:
            raise ConfigError(f"{name} has {differences}; install the same versions, or leave out --exact.")
        self.sites.warn(f"{name} has {differences}, so results may differ from a simulation here in the last bits.")


def wait_for_sites(door: SiteRegistry, quorum: int) -> dict[int, Frame]:
    """Wait until so many clients of the experiment have a site; gives what each says it holds.

    Args:
        door: Registry of the sites.
        quorum: Number of clients to wait for.

    Raises:
        EngineError: Too few sites connect in time.
        ConfigError: No site that connected can take part.
    """
    began = reported = time.monotonic()
    present: dict[int, Frame] = {}
    while True:
        present |= door.step()
        if len(present) >= quorum:
            return dict(sorted(present.items()))
        if len(door.rejected) >= door.clients:
            raise ConfigError(next(iter(door.rejected.values())))
        door.sites.check_stopped()
        now = time.monotonic()
        if now > began + door.seconds:
            raise EngineError(
                f"After {door.seconds:g} s {len(present)} of {quorum} sites are there. {door.missing(present)} unskew deploy "
                "check tells at a site what is wrong."
            )
        if now > reported + REPORT:
            reported = now
            door.report(f"{len(present)} of {quorum} sites after {now - began:.0f} s. {door.missing(present)}")
        time.sleep(POLL)
