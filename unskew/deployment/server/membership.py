"""Membership of sites in runs with a quorum: which sites are present, have joined or have left."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from unskew.data.federation import Federation
from unskew.deployment.server import round_requests
from unskew.deployment.server.data_exchange import remote_client
from unskew.deployment.server.joining import SiteRegistry
from unskew.deployment.server.sites import SiteManager
from unskew.errors import ConfigError, EngineError
from unskew.methods.fedavg import server_rule
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import Method


@dataclass
class Membership:
    """Presence of sites between rounds.

    A new site reports its data statistics and takes part from the next round.

    Attributes:
        sites: Connected sites.
        registry: Registry that admits new sites.
        federation: Data as the server sees them; updated when a site joins.
        quorum: Number of sites that a round requires.
        count: Number of sites present when the last round started.
    """

    sites: SiteManager
    registry: SiteRegistry
    federation: Federation
    quorum: int
    count: int = 0

    def there(self) -> set[int]:
        """Return the clients whose site is connected and not excluded."""
        nodes = self.sites.connected()
        return {k for k, node in self.sites.nodes.items() if node in nodes} - {*self.sites.excluded}

    def away(self) -> set[int]:
        """Return the clients whose site is missing or excluded."""
        return {*range(len(self.sites.sites))} - self.there()

    def wait(self) -> None:
        """Admit new sites, and wait until enough are present.

        Raises:
            EngineError: If too many sites are excluded to reach the quorum.
        """
        heard = time.monotonic()
        while True:
            self.sites.check_stopped(between_rounds=True)
            self._welcome()
            self.count = len(self.there())
            if self.count >= self.quorum:
                return
            if len(self.sites.sites) - len(self.sites.excluded) < self.quorum:
                raise EngineError(f"Too many sites are excluded to reach the quorum of {self.quorum} (--quorum).")
            if time.monotonic() - heard > round_requests.SILENCE:
                heard = time.monotonic()
                self.sites.warn(
                    f"{self.count} of at least {self.quorum} sites are connected. {self.registry.missing(self.there())}"
                )
            time.sleep(round_requests.POLL)

    def _welcome(self) -> None:
        clients: Any = self.federation.clients
        for client, frame in self.registry.step().items():
            clients[client] = remote_client(client, frame, self.federation)  # validated by the registry
            self.sites.warn(f"{self.sites.name(client)} has joined the run.")


def check_late_joining(method: Method, spec: ModelSpec, federation_info: FederationInfo) -> None:
    """Validate that a method needs no information on all sites before the first round.

    Args:
        method: Method of the run.
        spec: Layout of the model.
        federation_info: Information on the federation.

    Raises:
        ConfigError: If the method needs such information.
    """

    class Asked(Exception):
        pass

    def asks(*_: object) -> NoReturn:
        raise Asked

    blank = replace(federation_info, size=asks, sizes=asks, class_counts=asks)
    early = [rule.name for rule in method.data]
    early += [rule.name for rule in method.rules if callable(rule.weights)]
    server = server_rule(method)
    halves = [(rule.name, rule.server_init) for rule in method.halves]
    for name, begin in (*halves, (server.name, server.init)):
        try:
            begin(spec.flatten(), blank)
        except Asked:
            early.append(name)
    if early:
        raise ConfigError(
            f"{early[0]} requires information on all sites' data before the first round, so no site can join later. Remove "
            "--quorum, or, if the method needs only the numbers of samples, set client_weighting: uniform."
        )
