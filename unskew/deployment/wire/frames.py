"""Messages on a Unix socket: a JSON header and the bytes of the arrays. Uses the standard library only, without pickle.

A message is decoded and validated where it is used: in the run's process and in the site's. Flower's processes in between
pass it on as bytes (``EncodedFrame``).
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from unskew.filesystem import parse_json

MAGIC = b"unskew01"
HEADER = 64 << 20
"""Largest header in bytes."""
LARGEST = 64 << 30
"""Largest message in bytes, regardless of the configuration."""
MOST, LISTS = 100_000, 1 << 20
"""Largest number of fields of a message, and of lists and objects in its header."""
LONGEST_NAME, LONGEST_LIST, DIMENSIONS = 1000, 1 << 20, 8
"""Largest number of characters of a name, of entries of a list, and of dimensions of an array."""
CHUNK = 1 << 20
"""Number of bytes to read at once: memory is needed only for bytes that have arrived."""
RATE = 10e6
"""Bytes per second that a message with a time limit must have at least."""
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


@dataclass(frozen=True)
class Frame:
    """A message.

    Attributes:
        kind: Kind of the request or reply.
        config: Strings, finite numbers, booleans, or lists of one of them.
        metrics: Metrics.
        arrays: Arrays by ``record/name``.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, Blob] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Size of the arrays in bytes."""
        return sum(len(blob.data) for blob in self.arrays.values())


@dataclass(frozen=True)
class EncodedFrame:
    """A message as bytes.

    Attributes:
        header: Kind, fields, metrics and list of the arrays, as JSON.
        body: Bytes of the arrays, in this order.
    """

    header: bytes
    body: bytes | bytearray

    @staticmethod
    def of(frame: Frame) -> EncodedFrame:
        """Encode a message."""
        return EncodedFrame(encode_header(frame), b"".join(blob.data for blob in frame.arrays.values()))

    def decode(self) -> Frame:
        """Decode and validate the message.

        Raises:
            FrameError: If the bytes are not a valid message.
        """
        if self.header.count(b"[") + self.header.count(b"{") > LISTS:
            raise FrameError("The header has too many lists.")
        try:
            about = parse_json(self.header)
        except ValueError as error:
            raise FrameError("The header is not valid JSON, or contains a number that is too large.") from error
        if not isinstance(about, dict) or about.keys() != {"kind", "config", "metrics", "arrays"}:
            raise FrameError("The header does not have exactly the fields of a message.")
        _check_fields(about["kind"], about["config"], about["metrics"])
        listed = about["arrays"]
        if not isinstance(listed, list) or not all(isinstance(entry, list) and len(entry) == 4 for entry in listed):
            raise FrameError("The header does not list arrays with name, dtype, shape and size.")
        for name, dtype, shape, size in listed:
            _check_array(name, dtype, shape, size)
        arrays, view, start = {}, memoryview(self.body), 0
        for name, dtype, shape, size in listed:
            arrays[name] = Blob(dtype, tuple(shape), bytes(view[start : start + size]))
            start += size
        if start != len(self.body) or len(arrays) < len(listed):
            raise FrameError(f"The message has {len(self.body)} bytes of arrays instead of {start}, or an array twice.")
        return Frame(about["kind"], about["config"], {n: float(x) for n, x in about["metrics"].items()}, arrays)


def encode_header(frame: Frame) -> bytes:
    """Encode the header of a message, without metrics that are not finite; the bytes of the arrays follow it in order."""
    listed = [[name, blob.dtype, list(blob.shape), len(blob.data)] for name, blob in frame.arrays.items()]
    metrics = {name: value for name, value in frame.metrics.items() if math.isfinite(value)}
    return json.dumps({"kind": frame.kind, "config": frame.config, "metrics": metrics, "arrays": listed}).encode()


def send(to: socket.socket, message: Frame | EncodedFrame) -> None:
    """Write one message to a socket.

    Args:
        to: Connected socket.
        message: Message to send.
    """
    if isinstance(message, Frame):
        header, body = encode_header(message), [blob.data for blob in message.arrays.values()]
    else:
        header, body = message.header, [bytes(message.body)]
    to.sendall(MAGIC + struct.pack("<QQ", len(header), sum(map(len, body))) + header)
    for part in body:
        to.sendall(part)


def receive(of: socket.socket, largest: int = LARGEST, seconds: float | None = None) -> Frame:
    """Read one message from a socket and validate it, see ``receive_encoded``.

    Args:
        of: Connected socket.
        largest: Maximum size of the arrays in bytes.
        seconds: Time limit, or None.

    Raises:
        FrameError: If the bytes are not a valid message.
    """
    return receive_encoded(of, largest, seconds).decode()


def receive_encoded(of: socket.socket, largest: int = LARGEST, seconds: float | None = None) -> EncodedFrame:
    """Read one message of at most ``largest`` bytes from a socket, without decoding it.

    Args:
        of: Connected socket.
        largest: Maximum size of the arrays in bytes.
        seconds: Seconds within which the header must arrive, and then the arrays, for which there are further seconds that
            follow from ``RATE``; None sets no limit.

    Raises:
        ConnectionClosedError: If the other side closed the connection.
        TimeoutError: If the message did not arrive in time.
        FrameError: If the message is too long, or not one of unskew.
    """
    pause = of.gettimeout()
    end = None if seconds is None else time.monotonic() + seconds
    if _exactly(of, len(MAGIC), end) != MAGIC:
        raise FrameError("The bytes received through the socket are not a message of unskew.")
    header_size, size = struct.unpack("<QQ", _exactly(of, 16, end))
    if header_size > HEADER or size > largest:
        raise FrameError(f"The message has {header_size} + {size} bytes, above the limit of {HEADER} + {largest}.")
    header = bytes(_exactly(of, header_size, end))
    body = _exactly(of, size, None if end is None else end + size / RATE)
    of.settimeout(pause)
    return EncodedFrame(header, body)


def _check_fields(kind: object, config: object, metrics: object) -> None:
    """Validate the fields of a message except its arrays: their types and lengths, and that numbers are finite."""
    if not _is_name(kind) or not isinstance(config, dict) or not isinstance(metrics, dict):
        raise FrameError("The message has no valid kind, fields or metrics.")
    if len(config) + len(metrics) > MOST or not all(map(_is_name, (*config, *metrics))):
        raise FrameError("The message has too many fields, or one with an invalid name.")
    for name, value in config.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > LONGEST_LIST or not all(map(_is_value, values)):
            raise FrameError(f"The field {name} of the message has an invalid value.")
    for name, value in metrics.items():
        if isinstance(value, bool | str) or not _is_value(value):
            raise FrameError(f"The metric {name} of the message is not a finite number.")


def _check_array(name: object, dtype: object, shape: object, size: object) -> None:
    """Validate the description of an array: that its dtype can be sent, and its bytes match its shape."""
    if not _is_name(name):
        raise FrameError("The message has an array with an invalid name.")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise FrameError(f"The array {name!r} has the dtype {str(dtype)[:40]!r}, which cannot be sent.")
    lengths = [n for n in shape if type(n) is int and 0 <= n <= LARGEST] if isinstance(shape, list) else []
    if not isinstance(shape, list) or len(lengths) < len(shape) or len(shape) > DIMENSIONS:
        raise FrameError(f"The array {name!r} has an invalid shape.")
    if type(size) is not int or math.prod(lengths) * SIZES[dtype] != size:
        raise FrameError(f"The array {name!r} has a number of bytes that does not match its shape.")


def _is_name(text: object) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_NAME and text.isprintable()


def _is_value(value: object) -> bool:
    """Return whether a field may have this value: valid text, a boolean, or a finite number."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _exactly(of: socket.socket, size: int, end: float | None) -> bytearray:
    """Read exactly ``size`` bytes; ``end`` is the deadline in seconds of ``time.monotonic``, or None."""
    buffer = bytearray()
    while len(buffer) < size:
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("it did not arrive in time")
            of.settimeout(left)
        part = of.recv(min(CHUNK, size - len(buffer)))
        if not part:
            raise ConnectionClosedError("The connection was closed.")
        buffer += part
    return buffer
