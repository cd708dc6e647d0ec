"""Flower app at the server: a bridge between Flower's grid and the process of the run, through a Unix socket."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from unskew.deployment.flower.app.records import to_message, to_records
from unskew.deployment.wire.frames import (
    HEADER,
    ConnectionClosedError,
    EncodedFrame,
    Frame,
    FrameError,
    receive,
    receive_encoded,
    send,
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Handle requests of the run's process until it closes the connection.

    Args:
        grid: Flower's connection to the nodes.
        context: Context of the Flower app.
    """
    end_with_parent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as run:
        path = Path(str(context.run_config["socket"]))
        run.connect(str(path))
        send(run, Frame("hello", {"token": path.with_name("token").read_text()}))
        while True:
            try:
                request = receive(run)
            except ConnectionClosedError:
                return
            handle_request(grid, run, request)


def end_with_parent() -> None:
    """End this process when the Flower process that started it ends."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def handle_request(grid: Grid, run: socket.socket, request: Frame) -> None:
    """Reply to a ``nodes``, ``push`` or ``pull`` request.

    The message to push follows its request, and the replies of sites follow the list of their identifiers.

    Args:
        grid: Flower's connection to the nodes.
        run: Connection to the run's process.
        request: Request of the run's process.

    Raises:
        FrameError: If it is another request.
    """
    config = request.config
    if request.kind == "nodes":
        send(run, Frame("nodes", {"ids": [str(node) for node in grid.get_node_ids()]}))
    elif request.kind == "push":
        content, ttl, group = to_records(receive_encoded(run)), float(config["seconds"]), str(config["round"])
        message = Message(content, int(config["node"]), MessageType.TRAIN, ttl=ttl, group_id=group)
        (identity,) = grid.push_messages([message])
        send(run, Frame("pushed", {"id": identity or ""}))
    elif request.kind == "pull":
        replies = list(grid.pull_messages(config["ids"]))
        send(run, Frame("replies", {"ids": [reply.metadata.reply_to_message_id for reply in replies]}))
        for reply in replies:
            send(run, reply_message(reply, int(config["largest"])))
    else:
        raise FrameError(f"Unknown request: {request.kind!r}.")


def reply_message(message: Message, largest: int) -> Frame | EncodedFrame:
    """Return a site's reply, or the reason for its failure.

    Args:
        message: Reply of a site.
        largest: Largest number of bytes of a reply that the run accepts; larger ones would end the connection to it.
    """
    if message.has_error():
        error = message.error
        return Frame("failed", {"reason": f"Flower's error {error.code}: {error.reason or 'no reason'}"})
    try:
        reply = to_message(message.content)
        if len(reply.body) > largest or len(reply.header) > HEADER:
            raise FrameError(
                f"The message has {len(reply.body)} bytes, above the limit of {largest}, or too many fields."
            )
        return reply
    except Exception as error:  # whatever a site sends, the replies of the others must arrive
        return Frame("refused", {"reason": str(error) if isinstance(error, FrameError) else type(error).__name__})
