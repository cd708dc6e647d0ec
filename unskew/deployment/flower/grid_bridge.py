"""The run's end of the bridge to Flower's grid: list connected sites, send messages, and receive replies."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unskew.deployment.wire.frames import EncodedFrame, Frame, FrameError, receive, receive_encoded, send
from unskew.errors import EngineError

AT_ONCE = 64 << 20
"""Number of bytes of replies requested at once."""


class LinkClosedError(EngineError):
    """Flower's app has ended, for example because the SuperLink was stopped."""


class GridBridge:
    """Unix socket in a private folder, to which Flower's app at the server connects.

    Args:
        largest: Largest accepted message, in bytes.
    """

    def __init__(self, largest: int):
        self.largest = largest
        self.folder = Path(tempfile.mkdtemp(prefix="unskew-"))  # the path of a socket must be short
        self.path = self.folder / "run.sock"
        self.token = secrets.token_hex(16)
        secret = self.path.with_name("token")  # the arguments of a process are visible to all users
        secret.touch(0o600)
        secret.write_text(self.token)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._listener.listen(1)
        self._app: socket.socket | None = None
        self._sizes: dict[str, int] = {}

    def connect(self, seconds: float) -> None:
        """Wait until Flower's app connects.

        Args:
            seconds: Longest time to wait, in seconds.

        Raises:
            LinkClosedError: If the app does not connect in time.
        """
        self.disconnect()
        end = time.monotonic() + seconds
        while True:
            self._listener.settimeout(max(0.1, end - time.monotonic()))
            try:
                app, _ = self._listener.accept()
                hello = receive(app, 1 << 20, 10.0)
            except (TimeoutError, FrameError, OSError) as error:
                if time.monotonic() > end:
                    raise LinkClosedError(
                        f"Flower's app has not started on the SuperLink within {seconds:g} s. Check its runs with flwr list, "
                        "and the SuperLink's log. It must run on this machine as the same user."
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
        """Return the connected SuperNodes."""
        with self._connected() as app:
            send(app, Frame("nodes"))
            return [int(node) for node in receive(app, self.largest).config["ids"]]

    def push(self, node: int, frame: Frame, round: str, seconds: float) -> str:
        """Send a message to a site and return the message's identifier.

        Args:
            node: Flower's identifier of the node.
            frame: Message to send.
            round: Label of the round in Flower's logs.
            seconds: Time to live of the message.
        """
        with self._connected() as app:
            send(app, Frame("push", {"node": str(node), "round": round, "seconds": seconds}))
            send(app, frame)
            identity = str(receive(app, self.largest).config["id"])
        self._sizes[identity] = frame.size
        return identity

    def pull(self, identities: Sequence[str]) -> list[tuple[str, Frame]]:
        """Return replies that have arrived, with the identifiers of their requests.

        A reply is about as large as its request. Large replies are requested in groups, so that Flower's app and this
        process store at most ``AT_ONCE`` bytes of them, or a single reply; later calls return the remaining ones.
        """
        replies: list[tuple[str, Frame]] = []
        group: list[str] = []
        size = got = 0
        for index, identity in enumerate(identities, 1):
            group.append(identity)
            size += self._sizes.get(identity, 0)
            if index < len(identities) and size + self._sizes.get(identities[index], 0) <= AT_ONCE:
                continue
            with self._connected() as app:
                send(app, Frame("pull", {"ids": group, "largest": self.largest}))
                for arrived in [str(name) for name in receive(app, self.largest).config["ids"]]:
                    reply = receive_encoded(app, self.largest)
                    replies.append((arrived, decode_reply(reply)))
                    got += len(reply.body)
            if got > AT_ONCE // 2:
                break
            group, size = [], 0
        for identity, _ in replies:
            self._sizes.pop(identity, None)
        return replies

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Context manager of a request to Flower's app; every failure ends the connection."""
        if self._app is None:
            raise LinkClosedError("Flower's app is not connected.")
        try:
            yield self._app
        except (OSError, FrameError, LookupError, ValueError, TypeError) as error:
            self.disconnect()
            raise LinkClosedError(f"Flower's app on the SuperLink has ended ({error}).") from error


def decode_reply(reply: EncodedFrame) -> Frame:
    """Decode the reply of a site; if it is not valid, return the reason, so that the replies of other sites arrive."""
    try:
        return reply.decode()
    except FrameError as error:
        return Frame("refused", {"reason": str(error)})
