"""The run's end of the bridge to Flower's grid: which sites are there, what is sent to them, and what comes back."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unskew.deployment.wire.frames import Frame, FrameError, receive, send
from unskew.errors import EngineError

AT_ONCE = 64 << 20
"""Bytes of answers that are taken at once."""


class LinkClosedError(EngineError):
    """Flower's app has gone, as when the SuperLink was stopped."""


class GridBridge:
    """A Unix socket in a folder of its own that only this user can enter; Flower's app at the server connects to it.

    Args:
        largest: Bytes of a message that are taken at most.
    """

    def __init__(self, largest: int):
        self.largest = largest
        self.folder = Path(tempfile.mkdtemp(prefix="unskew-"))  # a path in it is short enough for a socket
        self.path = self.folder / "run.sock"
        self.token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._listener.listen(1)
        self._app: socket.socket | None = None
        self._sizes: dict[str, int] = {}

    def connect(self, seconds: float) -> None:
        """Wait for Flower's app.

        Raises:
            LinkClosedError: The app does not connect in time.
        """
        self.disconnect()
        end = time.monotonic() + seconds
        while True:
            self._listener.settimeout(max(0.1, end - time.monotonic()))
            try:
                app, _ = self._listener.accept()
                app.settimeout(10.0)
                hello = receive(app, 1 << 20)
            except (TimeoutError, FrameError, OSError) as error:
                if time.monotonic() > end:
                    raise LinkClosedError(
                        f"Flower's app has not begun on the SuperLink within {seconds:g} s; flwr list shows its runs, and "
                        "the SuperLink's log tells why. It must run on this machine as the same user."
                    ) from error
                continue
            if secrets.compare_digest(str(hello.config.get("token", "")), self.token):
                app.settimeout(600.0)
                self._app = app
                return
            app.close()  # the app of another run

    def disconnect(self) -> None:
        """End Flower's app."""
        if self._app is not None:
            self._app.close()
            self._app = None

    def close(self) -> None:
        """End Flower's app and remove the socket."""
        self.disconnect()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def nodes(self) -> list[int]:
        """The SuperNodes that are connected."""
        (answer,) = self._ask(Frame("nodes"))
        return [int(node) for node in answer.config["ids"]]

    def push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
        """Send a message to a site; gives its identity, by which its answer is known.

        Args:
            node: Whom.
            frame: What.
            round: What Flower's logs call it.
            seconds: After which Flower forgets it.
        """
        about = {"to.kind": frame.kind, "to.node": str(node), "to.round": round, "to.seconds": seconds}
        (answer,) = self._ask(Frame("push", {**frame.config, **about}, frame.figures, frame.arrays))
        identity = str(answer.config["ids"][0])
        self._sizes[identity] = frame.size
        return identity

    def pull(self, identities: Sequence[str]) -> list[tuple[str, Frame]]:
        """Answers that have come, each with the identity of what it answers; the rest of many large ones another time.

        An answer is about as large as what it answers. So of large ones few are asked for at once: neither Flower's app nor
        this process holds more of them than ``AT_ONCE`` bytes, or one.
        """
        replies: list[tuple[str, Frame]] = []
        group: list[str] = []
        size = got = 0
        for index, identity in enumerate(identities, 1):
            group.append(identity)
            size += self._sizes.get(identity, 0)
            if index < len(identities) and size + self._sizes.get(identities[index], 0) <= AT_ONCE:
                continue
            frames = self._ask(Frame("pull", {"ids": group}))
            replies += [(str(frame.config.pop("to.id", "")), frame) for frame in frames]
            got += sum(frame.size for frame in frames)
            if got > AT_ONCE // 2:
                break
            group, size = [], 0
        for identity, _ in replies:
            self._sizes.pop(identity, None)
        return replies

    def _ask(self, frame: Frame) -> list[Frame]:
        if self._app is None:
            raise LinkClosedError("Flower's app is not connected.")
        try:
            send(self._app, frame)
            count = int(receive(self._app, self.largest).config["count"])
            return [receive(self._app, self.largest) for _ in range(count)]
        except (OSError, FrameError, KeyError) as error:
            self.disconnect()
            raise LinkClosedError(f"Flower's app on the SuperLink has ended ({error}).") from error
