"""Messages as Flower's records: their header and their arrays are bytes, which Flower does not read."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from unskew.deployment.wire.frames import EncodedFrame, FrameError

RAW = "unskew.raw"
"""Encoding of Flower's array: the bytes of a message."""


def to_records(message: EncodedFrame) -> RecordDict:
    """Convert a message to Flower's records."""
    body = Array("uint8", (len(message.body),), RAW, bytes(message.body))
    return RecordDict({"header": ConfigRecord({"json": message.header}), "body": ArrayRecord({"bytes": body})})


def to_message(content: RecordDict) -> EncodedFrame:
    """Convert records of ``to_records`` to a message.

    Args:
        content: Records of a Flower message.

    Raises:
        FrameError: If there are other records.
    """
    try:
        header, body = content["header"]["json"], content["body"]["bytes"]
    except (KeyError, TypeError) as error:
        raise FrameError("The message lacks a record.") from error
    if not isinstance(header, bytes) or not isinstance(body, Array) or body.stype != RAW or len(content) != 2:
        raise FrameError("The message contains a record that was not requested.")
    return EncodedFrame(header, body.data)
