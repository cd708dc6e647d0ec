"""Conversion between messages and Flower's records: arrays, metrics and configuration."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from unskew.deployment.wire.frames import Blob, Frame, FrameError, check_array, check_fields

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
        FrameError: If there are other records, or one of them is invalid.
    """
    config: dict[str, Any] = {}
    figures: dict[str, float] = {}
    arrays: dict[str, Blob] = {}
    for name, record in content.items():
        if name == "unskew" and isinstance(record, ConfigRecord):
            config = dict(record)
        elif name == "figures" and isinstance(record, MetricRecord):
            figures = {key: value for key, value in record.items() if not isinstance(value, list)}
        elif name.startswith("arrays.") and isinstance(record, ArrayRecord):
            for key, array in record.items():
                full_name = f"{name.removeprefix('arrays.')}/{key}"
                if array.stype != RAW:
                    raise FrameError("The message has an array that is not encoded as plain bytes.")
                check_array(full_name, array.dtype, [*array.shape], len(array.data))
                arrays[full_name] = Blob(array.dtype, tuple(array.shape), array.data)
        else:
            raise FrameError("The message contains a record that was not requested.")
    kind = config.pop("kind", None)
    check_fields(kind, config, figures)
    return Frame(str(kind), config, {name: float(value) for name, value in figures.items()}, arrays)
