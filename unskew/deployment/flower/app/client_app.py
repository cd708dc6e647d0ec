"""Flower app at a site: relays each message to the site's process through a Unix socket, and returns the reply.

Flower starts a process for every message. It stays small, because data, model and PyTorch are in the site's process.
"""

from __future__ import annotations

import os
import socket
import stat
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from unskew.deployment.flower.app.records import to_message, to_records
from unskew.deployment.wire.frames import (
    ConnectionClosedError,
    EncodedFrame,
    Frame,
    FrameError,
    receive_encoded,
    send,
)

PATIENCE = 120.0
"""Seconds within which a site's process must be back after a failure."""

app = ClientApp()


def exchange(path: str, message: EncodedFrame, patience: float = PATIENCE) -> EncodedFrame:
    """Send a request to the site's process and return the reply; if the process is restarted meanwhile, send it again.

    Args:
        path: Socket of the site's process.
        message: Request.
        patience: Seconds to wait for the process.

    Raises:
        FrameError: If the site's process does not come back, or its reply is not a message.
    """
    end = time.monotonic() + patience
    while True:
        if not os.path.exists(path):  # report this at once; the server retries with growing pauses
            reason = f"There is no socket at {path}: start unskew deploy site, or correct the path in --node-config."
            return EncodedFrame.of(Frame("failed", {"reason": reason}))
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISSOCK(mode) or mode & 0o077:
                raise FrameError(f"{path} is not a socket that only its owner can access (mode 0600).")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as site:
                site.connect(path)
                send(site, message)
                return receive_encoded(site)
        except (OSError, ConnectionClosedError) as error:
            if time.monotonic() > end:
                raise FrameError(f"The site's process does not reply at {path} ({error}).") from error
            time.sleep(0.2)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Relay a message to the site's process and return its reply.

    Args:
        message: Flower message that contains the request.
        context: Context of the Flower app.
    """
    try:
        request = to_message(message.content)
        path = context.node_config.get("socket")
        if not isinstance(path, str):
            raise FrameError("The SuperNode has no socket in its --node-config.")
        reply = exchange(path, request)
    except FrameError as error:
        reply = EncodedFrame.of(Frame("refused", {"reason": str(error)}))
    return Message(content=to_records(reply), reply_to=message)
