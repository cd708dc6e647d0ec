"""Connection to the sites' SuperNodes: sends messages, and ties each reply to its run and attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unskew.deployment.common.agreement import PROTOCOL
from unskew.deployment.flower.grid_bridge import GridBridge
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, printable

NODES = 0.5
"""Seconds between two polls for connected SuperNodes."""


class SiteConnection:
    """Messages to and from SuperNodes.

    Args:
        link: Bridge to Flower's grid.
        reopen: Restores the bridge after a failure of the SuperLink.
        run: Identifier of the run.
        header: Header of every message: digest of the experiment and data schema.
    """

    def __init__(self, link: GridBridge, reopen: Callable[[], None], run: str, header: Mapping[str, Any]):
        self.link = link
        self.reopen = reopen
        self.run = run
        self.header = header
        self._attempts = 0
        self._sent: dict[str, int] = {}
        self._nodes: set[int] = set()
        self._polled = 0.0

    def nodes(self, seconds: float | None = None) -> set[int]:
        """Return the connected nodes, polled again if the last poll is more than ``seconds`` ago (default: ``NODES``)."""
        if time.monotonic() - self._polled > (NODES if seconds is None else seconds):
            self._nodes, self._polled = set(self.link.nodes()), time.monotonic()
        return self._nodes

    def poll_soon(self) -> None:
        """Poll for connected nodes at the next call of ``nodes``."""
        self._polled = 0.0

    def push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
        """Send a message to a node and return the message's identifier.

        Args:
            node: Flower's identifier of the node.
            frame: Message to send.
            round: Label of the round in Flower's logs.
            seconds: Time to live of the message.
        """
        self._attempts += 1
        config = {**frame.config, **self.header, "protocol": PROTOCOL, "run": self.run, "attempt": self._attempts}
        identity = self.link.push(node, Frame(frame.kind, config, frame.metrics, frame.arrays), round, seconds)
        self._sent[identity] = self._attempts
        return identity

    def pull(self, identities: Sequence[str]) -> list[tuple[str, Frame]]:
        """Return replies that have arrived, with the identifiers of their requests."""
        return self.link.pull(identities) if identities else []

    def attempt(self, identity: str) -> int:
        """Return the attempt number of a message; -1 for a second reply to it."""
        return self._sent.pop(identity, -1)

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
        belongs = (frame.config.get("run"), frame.config.get("attempt")) == (self.run, attempt)
        if frame.kind not in ("forgotten", "outdated") and not belongs:
            raise InvalidMessageError("it belongs to another request")
        return frame
