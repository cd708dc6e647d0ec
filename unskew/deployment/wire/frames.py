"""Messages on a Unix socket: a JSON header and the bytes of the arrays. Uses the standard library only, without pickle."""

from __future__ import annotations

import hashlib
import json
import math
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"unskew01"
HEADER = 64 << 20
"""Largest header in bytes."""
LARGEST = 64 << 30
"""Largest message in bytes, regardless of the configuration."""
SIZES = {
    "float32": 4,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "bfloat16": 2,
}
"""Bytes per element of the dtypes that can be sent."""


class FrameError(Exception):
    """Received bytes are not a valid message."""


class ConnectionClosedError(FrameError):
    """The other side has closed the connection."""


@dataclass(frozen=True)
class Blob:
    """An array as bytes in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def digest(self) -> str:
        """Return the SHA-256 of dtype, shape and bytes."""
        header = f"{self.dtype} {list(self.shape)}\n".encode()
        return hashlib.sha256(header + self.data).hexdigest()

    def check(self, name: str) -> None:
        """Validate dtype, shape and number of bytes.

        Args:
            name: Name of the array, for the error message.

        Raises:
            FrameError: If the dtype cannot be sent, or the number of bytes does not match the shape.
        """
        if self.dtype not in SIZES:
            raise FrameError(f"The array {name!r} has the dtype {str(self.dtype)[:40]!r}, which cannot be sent.")
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48 for n in self.shape):
            raise FrameError(f"The array {name!r} has an invalid shape.")
        if math.prod(self.shape) * SIZES[self.dtype] != len(self.data):
            raise FrameError(f"The array {name!r} has {len(self.data)} bytes, which does not match its shape.")


@dataclass(frozen=True)
class Frame:
    """A message.

    Attributes:
        kind: Kind of the request or reply.
        config: Strings, numbers, booleans, or lists of one of them.
        figures: Metrics.
        arrays: Arrays by ``record/name``.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, Blob] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Size of the arrays in bytes."""
        return sum(len(blob.data) for blob in self.arrays.values())


def encode_header(frame: Frame) -> bytes:
    """Encode the header of a message; the bytes of the arrays follow it in the same order."""
    listed = [[name, blob.dtype, list(blob.shape), len(blob.data)] for name, blob in frame.arrays.items()]
    about = {"kind": frame.kind, "config": frame.config, "figures": frame.figures, "arrays": listed}
    return json.dumps(about).encode()


def send(to: socket.socket, frame: Frame) -> None:
    """Write one message to a socket.

    Args:
        to: Connected socket.
        frame: Message to send.
    """
    header = encode_header(frame)
    to.sendall(MAGIC + struct.pack("<Q", len(header)) + header)
    for blob in frame.arrays.values():
        to.sendall(blob.data)


def receive(of: socket.socket, largest: int = LARGEST, header_seconds: float | None = None) -> Frame:
    """Read one message of at most ``largest`` bytes from a socket.

    Args:
        of: Connected socket.
        largest: Maximum size of the arrays in bytes.
        header_seconds: Seconds within which the header must arrive; None sets no limit.

    Raises:
        ConnectionClosedError: If the other side closed the connection.
        TimeoutError: If the header did not arrive in time.
        FrameError: If the bytes are not a valid message.
    """
    pause, end = of.gettimeout(), None if header_seconds is None else time.monotonic() + header_seconds
    head = _exactly(of, len(MAGIC) + 8, end)
    if not head.startswith(MAGIC):
        raise FrameError("The bytes received through the socket are not a message of unskew.")
    (length,) = struct.unpack("<Q", head[len(MAGIC) :])
    if length > HEADER:
        raise FrameError(f"The header of {length} bytes is too long.")
    header = bytes(_exactly(of, length, end))
    of.settimeout(pause)
    return decode(header, lambda size: bytes(_exactly(of, size)), largest)


def decode(header: bytes, read: Any, largest: int = LARGEST) -> Frame:
    """Decode a message from its header and the bytes that follow.

    Args:
        header: Header of the message.
        read: Returns the next bytes, given their number.
        largest: Largest accepted number of bytes.

    Raises:
        FrameError: If the bytes are not a valid message.
    """
    try:
        about = json.loads(header)
        kind, config, figures, listed = (about[name] for name in ("kind", "config", "figures", "arrays"))
        if not isinstance(kind, str) or not isinstance(config, dict) or not isinstance(figures, dict):
            raise FrameError("The header has fields of the wrong type.")
        if not all(isinstance(v, int | float) for v in figures.values()):
            raise FrameError("A metric in the header is not a number.")
        sizes = [int(entry[3]) for entry in listed]
        if min(sizes, default=0) < 0 or sum(sizes) > largest:
            raise FrameError(f"The message has {sum(sizes)} bytes, above the limit of {largest}.")
        arrays = {}
        for (name, dtype, shape, _), size in zip(listed, sizes, strict=True):
            if not isinstance(name, str) or not isinstance(dtype, str) or name in arrays:
                raise FrameError("The header has an invalid or repeated array name.")
            arrays[name] = Blob(dtype, tuple(shape), read(size))
            arrays[name].check(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"The header cannot be read: {type(error).__name__}.") from error
    return Frame(kind, config, {name: float(value) for name, value in figures.items()}, arrays)


def _exactly(of: socket.socket, size: int, end: float | None = None) -> bytearray:
    """Read exactly ``size`` bytes; ``end`` is the deadline in seconds of ``time.monotonic``, or None."""
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        if end is not None:
            of.settimeout(max(1e-3, end - time.monotonic()))
        count = of.recv_into(view[done:])
        if not count:
            raise ConnectionClosedError("The connection was closed.")
        done += count
    return buffer
