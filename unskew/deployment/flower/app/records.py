"""A message as Flower's records, and back: arrays, metrics and configuration, nothing else."""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from unskew.deployment.wire.frames import Blob, Frame, FrameError

RAW = "unskew.raw"
"""Encoding of Flower's arrays: C order, little-endian, no header."""


def to_records(frame: Frame) -> RecordDict:
    """A record for each kind of array, one for the figures and one for the rest."""
    groups: dict[str, dict[str, Any]] = {}
    for name, blob in frame.arrays.items():
        record, _, rest = name.partition("/")
        groups.setdefault(record, {})[rest] = Array(blob.dtype, blob.shape, RAW, bytes(blob.data))
    content = RecordDict({f"arrays.{record}": ArrayRecord(arrays) for record, arrays in groups.items()})
    content["unskew"] = ConfigRecord({"kind": frame.kind, **frame.config})
    content["figures"] = MetricRecord(dict(frame.figures))
    return content


def to_frame(content: RecordDict) -> Frame:
    """Inverse of ``to_records``.

    Raises:
        FrameError: There are other records, or arrays that are written otherwise.
    """
    config: dict[str, Any] = {}
    figures: dict[str, float] = {}
    arrays: dict[str, Blob] = {}
    for name, record in content.items():
        if name == "unskew" and isinstance(record, ConfigRecord):
            config = dict(record)
        elif name == "figures" and isinstance(record, MetricRecord):
            if not all(isinstance(value, int | float) for value in record.values()):
                raise FrameError("A figure is not a number.")
            figures = {key: float(value) for key, value in record.items()}
        elif name.startswith("arrays.") and isinstance(record, ArrayRecord):
            for key, array in record.items():
                if array.stype != RAW:
                    raise FrameError(f"The array {key!r} is written as {array.stype!r}, not as plain bytes.")
                arrays[f"{name.removeprefix('arrays.')}/{key}"] = Blob(array.dtype, tuple(array.shape), array.data)
        else:
            raise FrameError(f"There is a record {name!r} that was not requested.")
    for name, blob in arrays.items():
        blob.check(name)
    kind = config.pop("kind", None)
    if not isinstance(kind, str):
        raise FrameError("A message does not say what it is.")
    return Frame(kind, config, figures, arrays)
