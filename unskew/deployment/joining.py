"""Sites that come: before the first round, and later where a run began without some of them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unskew.deployment.arrays import Nonsense, plainly
from unskew.deployment.link import LinkLost
from unskew.deployment.messages import number, text, whole
from unskew.deployment.site_config import NAME
from unskew.deployment.thin.frames import Frame
from unskew.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from unskew.deployment.sites import Sites

POLL = 0.2
"""Seconds between two looks at who has come."""
SKEW = 300.0
"""Seconds by which a site's clock may differ before that is said."""


@dataclass
class Door:
    """Asks each node that connects which client it is.

    Attributes:
        sites: Those that are known.
        clients: How many the experiment has.
        seconds: After which Flower forgets the question.
        begun: Whether the run has begun: then a site that cannot take part is told of, and does not end the run.
    """

    sites: Sites
    clients: int
    seconds: float
    begun: bool = False
    _known: set[int] = field(default_factory=set)
    _asked: dict[str, int] = field(default_factory=dict)

    def step(self) -> dict[int, Frame]:
        """Who has come since the last look: what each says it holds.

        Raises:
            ConfigError: A site cannot take part, before the run has begun.
        """
        sites = self.sites
        try:
            for node in sites.connected() - self._known:
                self._known.add(node)
                self._asked[sites.push(node, Frame("hello"), "hello", self.seconds)] = node
            answers = sites.link.pull(list(self._asked)) if self._asked else []
        except LinkLost as error:
            sites.tell(str(error))
            sites.reconnect()
            self._known, self._asked = set(sites.nodes.values()), {}
            return {}
        found = {}
        for identity, frame in answers:
            node = self._asked.pop(identity)
            if frame.kind == "failed":
                self._known.discard(node)  # it went before it could answer
                continue
            try:
                client = self._greeted(frame)
            except ConfigError as error:
                if not self.begun:
                    raise
                sites.tell(f"A site that came later cannot take part. {error}")
                continue
            sites.nodes[client], sites.names[client], found[client] = node, str(frame.config["name"]), frame
        return found

    def _greeted(self, frame: Frame) -> int:
        """The client that a site says it is.

        Raises:
            ConfigError: It refuses the run, or is none of its clients, or one that has a site.
        """
        sites = self.sites
        if frame.kind != "facts":
            raise ConfigError(f"A site refuses the run: {plainly(frame.config.get('reason', frame.kind))}")
        try:
            client, name, clock = (
                whole(frame.config, "client"),
                text(frame.config, "name"),
                number(frame.config, "clock"),
            )
            if not re.fullmatch(NAME, name):
                raise Nonsense("its name has other characters than letters, digits, '-', '_' and '.'")
        except Nonsense as error:
            raise ConfigError(f"A site cannot be understood: {error}.") from error
        if client >= self.clients:
            raise ConfigError(f"A site says that it is client {client}, but the experiment has {self.clients}, from 0.")
        if client in sites.names:
            raise ConfigError(
                f"Two sites say that they are client {client}: {sites.names[client]} and {name}. Give each a number of its "
                "own in its site.yaml."
            )
        apart = abs(clock - time.time())
        if apart > SKEW:
            sites.tell(f"{name}: its clock differs by {apart:.0f} s from the one here; certificates may seem expired.")
        return client


def gather(door: Door, quorum: int) -> dict[int, Frame]:
    """Wait until so many clients of the experiment have a site; gives what each says it holds.

    Raises:
        EngineError: They do not come.
        ConfigError: One cannot take part.
    """
    end = time.monotonic() + door.seconds
    found: dict[int, Frame] = {}
    while True:
        found |= door.step()
        if len(found) >= quorum:
            door.begun = True
            return dict(sorted(found.items()))
        if time.monotonic() > end:
            missing = [str(k) for k in range(door.clients) if k not in found]
            raise EngineError(
                f"After {door.seconds:g} s {len(found)} of {quorum} sites are there; missing are the clients "
                f"{', '.join(missing[:20])}. flwr supernode list shows who is connected; unskew deploy check tells at a "
                "site what is wrong."
            )
        time.sleep(POLL)
