"""Sites that come: before the first round, and later where a run began without some of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import unskew
from unskew.deployment.arrays import Nonsense, plainly
from unskew.deployment.link import LinkLost
from unskew.deployment.messages import number, text, whole
from unskew.deployment.preparing import MOST
from unskew.deployment.site_config import NAME
from unskew.deployment.thin.frames import Frame
from unskew.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from unskew.deployment.sites import Sites

POLL = 0.2
"""Seconds between two looks at who has come."""
SKEW = 300.0
"""Seconds by which a site's clock may differ before that is said."""
AGAIN = 30.0
"""Seconds after which a node that was not admitted is asked again: its site may have been corrected."""


def versions() -> dict[str, str]:
    """Return what the bits of a result depend on: the versions of unskew and PyTorch, and the CPU's vector instructions."""
    return {
        "unskew": unskew.__version__,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


@dataclass
class Door:
    """Asks each node that connects which client it is.

    Attributes:
        sites: Those that are known.
        clients: How many the experiment has.
        seconds: After which Flower forgets the question.
        check: Validates what a site reports of its data; raises ``Nonsense`` or ``ConfigError``.
        exact: Whether sites with other versions or CPU instructions are rejected, instead of reported.
        rejected: By node: why its site was not admitted.
    """

    sites: Sites
    clients: int
    seconds: float
    check: Callable[[int, Frame], Any] = lambda client, frame: None
    exact: bool = False
    rejected: dict[int, str] = field(default_factory=dict)
    _again: dict[int, float] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)
    _asked: dict[str, int] = field(default_factory=dict)

    def step(self) -> dict[int, Frame]:
        """Return what each site reports that was admitted since the last call; other sites are reported and asked again."""
        sites = self.sites
        for node in [node for node, when in self._again.items() if time.monotonic() > when]:
            del self._again[node]
            self._known.discard(node)
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
            except (ConfigError, Nonsense) as error:
                reason = str(error) if isinstance(error, ConfigError) else f"A site's report is not valid: {error}."
                if self.rejected.get(node) != reason:
                    sites.tell(f"A site is not admitted. {reason}")
                self.rejected[node], self._again[node] = reason, time.monotonic() + AGAIN
                continue
            self.rejected.pop(node, None)
            sites.nodes[client], sites.names[client], found[client] = node, str(frame.config["name"]), frame
        return found

    def _greeted(self, frame: Frame) -> int:
        """Return the number of the client that a site reports to be.

        Raises:
            ConfigError: If the site rejects the run, or its number is not one of a client without a site.
            Nonsense: If its report is not valid.
        """
        sites = self.sites
        if frame.kind != "facts":
            raise ConfigError(f"A site refuses the run: {plainly(frame.config.get('reason', frame.kind))}")
        client, name = whole(frame.config, "client"), text(frame.config, "name")
        clock, examples = number(frame.config, "clock"), whole(frame.config, "examples")
        if not re.fullmatch(NAME, name):
            raise Nonsense("its name has other characters than letters, digits, '-', '_' and '.', or more than 64")
        if not 0 < examples <= MOST:
            raise Nonsense(f"{name} reports {examples} samples; a site has from 1 to {MOST}")
        if client >= self.clients:
            raise ConfigError(f"A site says that it is client {client}, but the experiment has {self.clients}, from 0.")
        if client in sites.names:
            raise ConfigError(
                f"Two sites say that they are client {client}: {sites.names[client]} and {name}. Give each a number of its "
                "own in its site.yaml."
            )
        self.check(client, frame)
        self._compare(name, frame)
        apart = abs(clock - time.time())
        if apart > SKEW:
            sites.tell(f"{name}: its clock differs by {apart:.0f} s from the one here; certificates may seem expired.")
        return client

    def _compare(self, name: str, frame: Frame) -> None:
        """Report or reject other versions than the server's.

        Raises:
            ConfigError: If there are some and ``exact`` is set.
        """
        other = {k: plainly(frame.config.get(k))[:40] for k, v in versions().items() if frame.config.get(k) != v}
        if not other:
            return
        found = ", ".join(f"{k} {theirs} (here {versions()[k]})" for k, theirs in other.items())
        if self.exact:
            raise ConfigError(f"{name} has {found}; install the same versions, or leave out --exact.")
        self.sites.tell(f"{name} has {found}, so results may differ from a simulation here in the last bits.")


def gather(door: Door, quorum: int) -> dict[int, Frame]:
    """Wait until so many clients of the experiment have a site; gives what each says it holds.

    Raises:
        EngineError: They do not come.
        ConfigError: None of them can take part.
    """
    end = time.monotonic() + door.seconds
    found: dict[int, Frame] = {}
    while True:
        found |= door.step()
        if len(found) >= quorum:
            return dict(sorted(found.items()))
        if len(door.rejected) >= door.clients:
            raise ConfigError(next(iter(door.rejected.values())))
        if time.monotonic() > end:
            missing = [str(k) for k in range(door.clients) if k not in found]
            rejected = "".join(f" Not admitted: {reason}" for reason in [*door.rejected.values()][:5])
            raise EngineError(
                f"After {door.seconds:g} s {len(found)} of {quorum} sites are there; missing are the clients "
                f"{', '.join(missing[:20])}. flwr supernode list shows who is connected; unskew deploy check tells at a "
                f"site what is wrong.{rejected}"
            )
        time.sleep(POLL)
