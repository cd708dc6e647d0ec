"""Sites of a run: their state, what is logged and counted of them, and the operator's commands."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from unskew.deployment.common.audit_log import AuditLog
from unskew.deployment.server.config import RoundPolicy
from unskew.deployment.server.connection import SiteConnection
from unskew.errors import ConfigError
from unskew.simulation.round_loop import RunInterrupted


@dataclass
class Site:
    """State of one client's site. Times are in seconds since 1970.

    Attributes:
        client: Number of the client.
        node: Flower's identifier of its SuperNode; None until the site has joined.
        site: Name of the site; empty until it has joined.
        version: Version of unskew at the site; ``key``: fingerprint of its node key, as the site reports it.
        connected: Whether its SuperNode is connected; ``since``: time of the last change of this state.
        seen: Time of its last reply; ``updates_received``: number of rounds in which it trained.
        error: Reason why the last message to it failed.
        faults: Number of invalid replies.
        barred: Whether the operator has excluded it.
        awaited: Whether its reply is awaited.
    """

    client: int
    node: int | None = None
    site: str = ""
    version: str = ""
    key: str = ""
    connected: bool = False
    since: float = field(default_factory=time.time)
    seen: float | None = None
    updates_received: int = 0
    error: str = ""
    faults: int = 0
    barred: bool = False
    awaited: bool = False

    @property
    def name(self) -> str:
        """Name of the client in messages: its site, if known, and its number."""
        return f"{self.site} (client {self.client})" if self.site else f"client {self.client}"

    def describe(self) -> str:
        """Return the state of the connection and the last failure, as part of a sentence."""
        state = "connected" if self.connected else f"not connected for {time.time() - self.since:.0f} s"
        return f"{state}; last failure: {self.error}" if self.error else state

    def connect(self, connected: bool) -> None:
        """Store whether the SuperNode is connected."""
        if self.connected != connected:
            self.connected, self.since = connected, time.time()

    def replied(self, trained: bool = False) -> None:
        """Store the time of a reply.

        Args:
            trained: Whether the site has trained in this round.
        """
        self.seen, self.error = time.time(), ""
        self.updates_received += trained


class SiteManager:
    """Sites of a run: who has joined, who is excluded, and what happened.

    Args:
        connection: Connection to the sites' SuperNodes.
        total: Number of clients.
        round_policy: Waiting time and required updates of a round.
        warn: Called with warnings for the user.
        audit: Audit log, or None.
        barred: Clients that the operator has excluded.

    Attributes:
        counts: Number of late replies, of rejected ones (``refused``), and of messages that were sent again.
        round: Current round, from 1; 0 before the first.
        phase: Kind of the last request.
        last_warning: Last warning for the user.
        stopping: When the run stops at the operator's request; empty if it does not.
    """

    def __init__(
        self,
        connection: SiteConnection,
        total: int,
        round_policy: RoundPolicy,
        warn: Callable[[str], None],
        audit: AuditLog | None = None,
        barred: Iterable[int] = (),
    ):
        self.connection = connection
        self.sites = [Site(client, barred=client in barred) for client in range(total)]
        self.round_policy = round_policy
        self.audit = audit
        self.counts = {"late": 0, "refused": 0, "resent": 0}
        self.round = 0
        self.phase = "gathering"
        self.last_warning = ""
        self.stopping: Literal["", "after this round", "now"] = ""
        self._warn = warn

    @property
    def run(self) -> str:
        """Identifier of the run."""
        return self.connection.run

    @property
    def nodes(self) -> dict[int, int]:
        """SuperNode of each client whose site has joined."""
        return {site.client: site.node for site in self.sites if site.node is not None}

    @property
    def barred(self) -> set[int]:
        """Clients that the operator has excluded."""
        return {site.client for site in self.sites if site.barred}

    @property
    def excluded(self) -> list[int]:
        """Clients that the operator has excluded, or that sent too many invalid replies."""
        most = self.round_policy.max_invalid_replies
        return [site.client for site in self.sites if site.barred or site.faults >= most]

    def name(self, client: int) -> str:
        """Return how messages name a client: its site, if known, and its number, which may be that of another experiment."""
        return self.sites[client].name if client < len(self.sites) else f"client {client}"

    def warn(self, text: str) -> None:
        """Warn the user."""
        self.last_warning = text
        self._warn(text)

    def warn_with(self, warn: Callable[[str], None]) -> None:
        """Send further warnings to another function."""
        self._warn = warn

    def log(self, event: str, client: int | None = None, **fields: Any) -> None:
        """Append an event to the audit log, with the client's site and node key.

        Args:
            event: Name of the event.
            client: Number of the client, or None.
            **fields: Further fields.
        """
        if self.audit is not None:
            about = {} if client is None else {"site": self.sites[client].site, "key": self.sites[client].key}
            self.audit.add(event, self.round, client=client, **about, **fields)

    def admit(self, client: int, node: int, name: str, version: str, key: str) -> None:
        """Add a site to the run.

        Args:
            client: Number of its client.
            node: Flower's identifier of its SuperNode.
            name: Name of the site.
            version: Version of unskew at the site.
            key: Fingerprint of its node key.
        """
        site = self.sites[client]
        site.node, site.site, site.version, site.key = node, name, version, key
        site.connected, site.since = True, time.time()
        site.replied()
        self.log("joined", client, version=version)

    def connected(self, seconds: float | None = None) -> set[int]:
        """Return the connected nodes, see ``SiteConnection.nodes``, and store which sites are connected."""
        nodes = self.connection.nodes(seconds)
        for site in self.sites:
            if site.node is not None:
                site.connect(site.node in nodes)
        return nodes

    def await_replies(self, clients: Iterable[int], phase: str | None = None) -> None:
        """Store which clients' replies are awaited.

        Args:
            clients: Numbers of the clients.
            phase: Kind of the request; None keeps that of the last one.
        """
        self.phase = self.phase if phase is None else phase
        awaited = {*clients}
        for site in self.sites:
            site.awaited = site.client in awaited

    def fault(self, client: int, reason: str, last: bool = False) -> None:
        """Count an invalid reply of a site and warn; too many exclude the site.

        Args:
            client: Number of the client.
            reason: Reason why the reply is invalid.
            last: Whether to exclude the site at once.
        """
        site, most = self.sites[client], self.round_policy.max_invalid_replies
        site.faults = most if last else site.faults + 1
        self.count("refused")
        what = f"fault {site.faults} of {most}, then it is excluded"
        self.warn(
            f"{site.name}: {reason.rstrip('.')}; {'it is excluded from the run' if site.faults == most else what}."
        )
        self.log("rejected", client, reason=reason)
        if site.faults == most:
            self.log("excluded", client, reason=f"{most} invalid replies")

    def count(self, event: str, number: int = 1) -> None:
        """Add to one of the ``counts``.

        Args:
            event: Name of the count.
            number: Number to add.
        """
        self.counts[event] += number

    def resent(self, client: int, reason: str, failed: bool = False) -> None:
        """Count a message that is sent again.

        Args:
            client: Number of the client.
            reason: Reason why it is sent again.
            failed: Whether the message failed; the reason is then shown until the site replies.
        """
        if failed:
            self.sites[client].error = reason
        self.count("resent")
        self.log("resent", client, reason=reason)

    def status(self) -> dict[str, Any]:
        """Return the data that ``unskew deploy status`` and ``sites`` show, as JSON values."""
        excluded, sites = self.excluded, []
        for site in self.sites:
            values = {name: value for name, value in asdict(site).items() if name not in ("node", "barred")}
            sites.append({**values, "excluded": site.client in excluded})
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
        matches = [site for site in self.sites if which in (site.site or None, str(site.client))]
        if len(matches) != 1:
            raise ConfigError(
                f"{which!r} matches {len(matches)} sites of this run; list them with unskew deploy sites."
            )
        (site,) = matches
        least = max(1, self.round_policy.min_updates)
        if len(self.sites) - len({*self.excluded, site.client}) < least:
            raise ConfigError(
                f"A round requires {least} sites, so {site.name} cannot be excluded; stop the run instead."
            )
        site.barred = True
        save(self.barred)
        self.log("excluded", site.client, reason="by the operator")
        return site.name

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
