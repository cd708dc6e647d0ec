"""Digests of messages, by which the sites of a masked sum notice that a server has sent them different ones."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from unskew.deployment.wire.context import SLICED, WireContext
from unskew.deployment.wire.frames import SIZES, Blob, Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, parse_slices
from unskew.models.spec import mask_slices
from unskew.protocol.messages import Slices

PER_SITE = {"client", "weight", "counted", "accepted", "attempt", "session"}
"""Fields of a broadcast that may differ between the sites of a masked sum; each site checks its own."""


def arrays_digest(arrays: dict[str, Blob]) -> str:
    """Return the SHA-256 of arrays with their names, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(arrays[name].data)
    return digest.hexdigest()


@dataclass(frozen=True)
class BroadcastDigest:
    """Digests of a broadcast under secure aggregation.

    Attributes:
        signed: Digest of all that a site computes with, which must be equal for all sites of a masked sum.
        model: Digest of the model and of the tensors of rules from which the site trains.
        known: Digest of each part of these tensors as last received, by part, for methods that exchange only slices.
        individual: Digest of what may differ between the sites of a sum: weight, budget and the state at the start.
        start: Digest of the model, of these, and of the slices that were sent.
    """

    signed: str
    model: str
    known: dict[str, str]
    individual: str = ""
    start: str = ""


def broadcast_digest(
    frame: Frame, wire_context: WireContext, known: Mapping[str, str], received: str, state: str = ""
) -> BroadcastDigest:
    """Return the digests of a broadcast.

    A server that sends one site another model, schema or setting could otherwise identify this site's update in the sum.
    If a method exchanges slices, a site does not receive a part of the model that has not changed. Then the digest of the
    part as last received counts, because it is the current one.

    Args:
        frame: Message that was received.
        wire_context: Wire context.
        known: Parts that the site received until the round whose state it continues from.
        received: Digest of the data that the site received before the first round.
        state: Digest of the state that the site continues from.

    Raises:
        InvalidMessageError: If the slices are invalid, or overlap others that the site received before. Then the order in
            which it received them would determine its model, but not the digest.
    """
    sliced = wire_context.method.sync is not None
    complete, parts = {}, {**known}
    for name, blob in frame.arrays.items():
        if sliced and (name.startswith("model/") or SLICED in name):
            parts |= _part_digests(name, blob, frame, wire_context)
        else:
            complete[name] = blob.digest()
    cuts = sorted((name, int(start), int(end)) for name, start, end in (key.rsplit(":", 2) for key in parts))
    if any(name == after and end > start for (name, _, end), (after, start, _) in pairwise(cuts)):
        raise InvalidMessageError("its slices of the model overlap slices of earlier rounds")
    model = _text_digest([sorted(parts.items()), sorted(complete.items())])
    weights = _text_digest([state, *(frame.config.get(name) for name in ("weight", "counted"))])
    start = _text_digest([model, weights, frame.config.get("down")])
    own = PER_SITE | ({"down"} if sliced else set())
    settings = {name: value for name, value in frame.config.items() if name not in own}
    return BroadcastDigest(_text_digest([settings, model, received]), model, parts, weights, start)


def _part_digests(name: str, blob: Blob, frame: Frame, wire_context: WireContext) -> dict[str, str]:
    """Return the digest of each parameter, or each normalization buffer, among the slices in one array."""
    down, up = (parse_slices(frame.config.get(n), wire_context.spec.size) for n in ("down", "up"))
    slices, sizes = down, wire_context.spec.sizes
    if name == "model/b":
        slices, sizes = mask_slices(wire_context.received(down, frame.kind)), wire_context.spec.buffer_sizes
    elif name == "model/base":
        slices = wire_context.base(down, up)
    total = sum(sizes)
    sent = parameter_spans(sizes, (slice(0, total),) if slices is None else slices)
    item = SIZES.get(blob.dtype, 1)
    # The values under ``base`` and ``v`` are those of the same global model.
    record, digests, at = name.replace("/base", "/v"), {}, 0
    for span in sent:
        size = item * (span.stop - span.start)
        values = blob.dtype.encode() + blob.data[at : at + size]
        digests[f"{record}:{span.start}:{span.stop}"] = hashlib.sha256(values).hexdigest()
        at += size
    return digests


def parameter_spans(sizes: Sequence[int], slices: Slices) -> list[slice]:
    """Cut slices at the boundaries of parameters.

    Args:
        sizes: Number of elements of each parameter.
        slices: Slices of the vector of all parameters, in ascending order.

    >>> parameter_spans([4, 6], (slice(2, 7), slice(9, 10)))
    [slice(2, 4, None), slice(4, 7, None), slice(9, 10, None)]
    """
    ends = list(accumulate(sizes))
    cut = []
    for span in slices:
        start = span.start
        for end in ends[bisect_right(ends, start) :]:
            if start >= span.stop:
                break
            cut.append(slice(start, min(end, span.stop)))
            start = end
    return cut


def _text_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def request_digest(frame: Frame) -> str:
    """Return a digest of a message without ``attempt`` and ``session``, which is equal for repeated messages."""
    config = {name: value for name, value in frame.config.items() if name not in ("attempt", "session")}
    arrays = [[name, blob.digest()] for name, blob in sorted(frame.arrays.items())]
    return _text_digest([frame.kind, config, frame.metrics, arrays])
