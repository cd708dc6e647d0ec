"""Conversion between messages and Flower's records: arrays, metrics and configuration."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from unskew.deployment.wire.frames import Blob, Frame, FrameError

RAW = "unskew.raw"
"""Encoding of Flower's arrays: C order, little-endian, no header."""


def to_records(frame: Frame) -> RecordDict:
    """Convert a message to one record per group of arrays, one of metrics, and one of the other fields."""
    groups: dict[str, dict[str, Any]] = {}
    for name, blob in frame.arrays.items():
        record, _, rest = name.partition("/")
        groups.setdefault(record, {})[rest] = Array(blob.dtype, blob.shape, RAW, bytes(blob.data))
    content = RecordDict({f"arrays.{record}": ArrayRecord(arrays) for record, arrays in groups.items()})
    content["unskew"] = ConfigRecord({"kind": frame.kind, **frame.config})
    content["figures"] = MetricRecord(dict(frame.figures))
    return content


def to_frame(content: RecordDict) -> Frame:
    """Convert records of ``to_records`` to a message.

    Args:
        content: Records of a Flower message.

    Raises:
        FrameError: If there are other records, or an array has another encoding.
    """
    config: dict[str, Any] = {}
    figures: dict[str, float] = {}
    arrays: dict[str, Blob] = {}
    for name, record in content.items():
        if name == "unskew" and isinstance(record, ConfigRecord):
            config = dict(record)
        elif name == "figures" and isinstance(record, MetricRecord):
            if not all(isinstance(value, int | float) for value in record.values()):
                raise FrameError("A metric is not a number.")
            figures = {key: float(value) for key, value in record.items()}
        elif name.startswith("arrays.") and isinstance(record, ArrayRecord):
            for key, array in record.items():
                if array.stype != RAW:
                    raise FrameError(f"The array {key!r} has the encoding {array.stype!r} instead of plain bytes.")
                arrays[f"{name.removeprefix('arrays.')}/{key}"] = Blob(array.dtype, tuple(array.shape), array.data)
        else:
            raise FrameError(f"The message contains a record {name!r} that was not requested.")
    for name, blob in arrays.items():
        blob.check(name)
    kind = config.pop("kind", None)
    if not isinstance(kind, str):
        raise FrameError("The message does not state its kind.")
    return Frame(kind, config, figures, arrays)
