"""Flower app at the server: a bridge between Flower's grid and the process of the run, through a Unix socket."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from unskew.deployment.flower.app.records import to_frame, to_records
from unskew.deployment.wire.frames import HEADER, ConnectionClosedError, Frame, FrameError, encode_header, receive, send

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
            send_frames(run, handle_request(grid, request))


def end_with_parent() -> None:
    """End this process when the Flower process that started it ends."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def send_frames(run: socket.socket, frames: list[Frame]) -> None:
    """Send the number of frames, then the frames.

    Args:
        run: Connection to the run's process.
        frames: Messages to send.
    """
    send(run, Frame("answers", {"count": len(frames)}))
    for frame in frames:
        send(run, frame)


def handle_request(grid: Grid, request: Frame) -> list[Frame]:
    """Reply to a ``nodes``, ``push`` or ``pull`` request.

    Args:
        grid: Flower's connection to the nodes.
        request: Request of the run's process.
    """
    if request.kind == "nodes":
        return [Frame("nodes", {"ids": [str(node) for node in grid.get_node_ids()]})]
    if request.kind == "push":
        config = {key: value for key, value in request.config.items() if not key.startswith("to.")}
        inner = Frame(str(request.config["to.kind"]), config, request.figures, request.arrays)
        round, ttl = str(request.config["to.round"]), float(request.config["to.seconds"])
        message = Message(to_records(inner), int(request.config["to.node"]), MessageType.TRAIN, ttl=ttl, group_id=round)
        pushed = list(grid.push_messages([message]))
        return [Frame("pushed", {"ids": [identity or "" for identity in pushed]})]
    if request.kind == "pull":
        largest = int(request.config["largest"])
        return [reply_frame(message, largest) for message in grid.pull_messages(request.config["ids"])]
    raise FrameError(f"Unknown request: {request.kind!r}.")


def reply_frame(message: Message, largest: int) -> Frame:
    """Return a site's reply, or the reason for its failure; ``to.id`` identifies the request.

    Args:
        message: Reply of a site.
        largest: Largest number of bytes of a reply that the run accepts; larger ones would end the connection to it.
    """
    identity = {"to.id": message.metadata.reply_to_message_id}
    if message.has_error():
        error = message.error
        return Frame("failed", {**identity, "reason": f"Flower's error {error.code}: {error.reason or 'no reason'}"})
    try:
        reply = to_frame(message.content)
        if reply.size > largest or len(encode_header(reply)) > HEADER:
            raise FrameError(f"The message has {reply.size} bytes, above the limit of {largest}, or too many fields.")
    except Exception as error:  # whatever a site sends, the replies of the others must arrive
        reason = str(error) if isinstance(error, FrameError) else type(error).__name__
        return Frame("refused", {**identity, "reason": reason})
    return Frame(reply.kind, {**reply.config, **identity}, reply.figures, reply.arrays)
