"""Broadcasts and updates as messages: encoding, decoding and validation on each side."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from unskew.deployment.wire.frames import SIZES, Blob, Frame
from unskew.deployment.wire.tensor_codec import (
    InvalidMessageError,
    check_norm,
    check_records,
    check_tensor,
    decode_record,
    encode_record,
    encode_tensor,
    parse_slices,
    printable,
    slices_as_text,
)
from unskew.methods.dp_sites import SiteDP, site_noise
from unskew.models.layer_groups import buffer_mask
from unskew.models.spec import ModelSpec, mask_slices
from unskew.protocol.messages import (
    Broadcast,
    ClientState,
    Slices,
    Tensors,
    Update,
    finite_flags,
    flatten_records,
    num_bytes,
    unflatten_records,
)
from unskew.protocol.payload import (
    UPDATE,
    UploadContext,
    compresses,
    decode_payload,
    gather_slices,
    name_streams,
    scatter_slices,
    slices_length,
    unpack_streams,
)
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import Method, changes_updates
from unskew.protocol.training_config import Buffers
from unskew.simulation.parameter_slices import subtract_slices
from unskew.simulation.update_buffer import FIGURES

SLICED = "-slices"
"""Suffix of the record for full-length tensors of which only the slices of the model are sent."""
METRICS = {*FIGURES, "steps"}
"""Names of the metrics of an update."""
LARGEST_NUMBER, LARGEST_WEIGHT, LARGEST_METRIC = 1e9, 1e15, 1e38
"""Bounds of seconds and steps, of the weight of a client, and of metrics such as losses."""


@dataclass(frozen=True)
class WireContext:
    """Information that both sides share before a message is sent.

    method: Method of the run.
    spec: Layout of the model.
    buffers: How normalization buffers are shared.
    norm: Largest accepted norm of a tensor.
    largest: Maximum number of bytes that rules send in addition to the model.
    """

    method: Method
    spec: ModelSpec
    buffers: Buffers
    norm: float
    largest: int

    @property
    def sends_model(self) -> bool:
        """Return whether clients send the model back."""
        return all(rule.sends_model for rule in self.method.client)

    @property
    def site_noise(self) -> SiteDP | None:
        """Rule that adds noise at the sites, which then send nothing else that depends on their data; or None."""
        return site_noise(self.method)

    @property
    def compressed(self) -> bool:
        """Return whether clients send encoded streams instead of vectors."""
        return compresses(self.method.client)

    @property
    def names(self) -> set[str]:
        """Names of the rules that may send tensors in addition to the model."""
        return {rule.name for rule in (*self.method.client, *filter(None, [self.method.sync]))}

    def base(self, down: Slices | None, up: Slices | None) -> Slices:
        """Return the slices that are sent back but not sent out; a client sends its values there, and the server subtracts.

        Args:
            down: Slices that are sent out; None: all.
            up: Slices that are sent back; None: all.
        """
        return subtract_slices(up, down, self.spec.size)

    @property
    def needs_base(self) -> bool:
        """Return whether client rules use the difference to the broadcast, so that the base values must be sent."""
        return changes_updates(self.method.client)

    def received(self, down: Slices | None, kind: str) -> Tensor:
        """Return a mask of the normalization buffers that a client receives in a message, ``[m]``.

        Args:
            down: Slices that are sent out; None: all.
            kind: Kind of the message.
        """
        mask = self.buffer_masks(down)
        return mask if self.buffers == "average" or kind == "evaluate" else torch.zeros_like(mask)

    def sent(self, broadcast: Broadcast) -> Tensor:
        """Return a mask of the normalization buffers that a client sends, to be averaged or only evaluated, ``[m]``."""
        mask = self.buffer_masks(broadcast.up)
        return torch.ones_like(mask) if broadcast.report or self.buffers == "local" else mask

    def buffer_masks(self, slices: Slices | None) -> Tensor:
        """Return a mask of the normalization buffers that belong to slices of the model, ``[m]``."""
        size = sum(self.spec.buffer_sizes)
        return torch.ones(size, dtype=torch.bool) if slices is None else buffer_mask(self.spec, slices)

    def check_extras(self, record: str, tensors: Tensors, finite: bool) -> dict[str, Tensors]:
        """Validate the tensors that rules send in addition to the model, by rule.

        Args:
            record: Name of the record.
            tensors: Tensors of the record by name.
            finite: Whether all values must be finite.

        Raises:
            InvalidMessageError: If a tensor belongs to an unknown rule, is too large, or is not finite.
        """
        bytes_there = num_bytes(tensors.values())
        if bytes_there > self.largest:
            raise InvalidMessageError(f"{record} has {bytes_there} bytes, above the limit of {self.largest}")
        for name, tensor in tensors.items():
            if name.partition("/")[0] not in self.names:
                raise InvalidMessageError(
                    f"{record} contains {name[:60]!r}, which belongs to no rule of {self.method.name}"
                )
            check_norm(f"{record}/{name}", tensor, self.norm, finite)
        return unflatten_records(record, {f"{record}/{name}": t for name, t in tensors.items()})


def encode_rules(record: str, rules: dict[str, Tensors], slices: Slices | None, size: int) -> dict[str, Blob]:
    """Encode tensors of rules as the arrays of one record; of tensors with ``size`` elements only the slices.

    Args:
        record: Name of the record.
        rules: Tensors by rule and name.
        slices: Slices that are sent; None: all.
        size: Number of parameters.
    """
    encoded = {}
    for name, t in flatten_records(record, rules).items():
        if slices is not None and t.shape == (size,):
            encoded[name.replace(record, f"{record}{SLICED}", 1)] = encode_tensor(gather_slices(t, slices))
        else:
            encoded[name] = encode_tensor(t)
    return encoded


def decode_rules(frame: Frame, record: str, slices: Slices | None, size: int) -> Tensors:
    """Decode the arrays of ``encode_rules``; full-length tensors are zero outside the slices.

    Args:
        frame: Message that was received.
        record: Name of the record.
        slices: Slices that are sent; None: all.
        size: Number of parameters.

    Raises:
        InvalidMessageError: If the length of a tensor is not that of the slices.
    """
    tensors = decode_record(frame, record)
    for name, t in decode_record(frame, f"{record}{SLICED}").items():
        if slices is None or tuple(t.shape) != (slices_length(slices, size),) or name in tensors:
            raise InvalidMessageError(
                f"{name[:60]!r} with shape {tuple(t.shape)} does not match the agreed slices of the model"
            )
        tensors[name] = scatter_slices(torch.zeros(size, dtype=t.dtype), slices, t)
    return tensors


def encode_broadcast(broadcast: Broadcast, terms: WireContext, kind: str, about: dict[str, Any]) -> Frame:
    """Encode a broadcast; the client's state is stored at the client and not sent.

    Args:
        broadcast: The broadcast.
        terms: Wire context.
        kind: Kind of the message.
        about: Further fields.
    """
    received = terms.received(broadcast.down, kind).to(broadcast.b.device)
    arrays = {
        "model/v": encode_tensor(gather_slices(broadcast.v, broadcast.down)),
        "model/b": encode_tensor(broadcast.b[received]),
    }
    base = terms.base(broadcast.down, broadcast.up)
    if base and terms.needs_base:
        arrays["model/base"] = encode_tensor(gather_slices(broadcast.v, base))
    arrays |= encode_rules("download", broadcast.download, broadcast.down, terms.spec.size)
    config: dict[str, Any] = {
        **about,
        "client": broadcast.client,
        "round": broadcast.round,
        "weight": float(broadcast.weight),
        "accepted": -1 if broadcast.accepted is None else broadcast.accepted,
        "report": broadcast.report,
        "keeps": broadcast.keeps,
        **({"closing": True} if broadcast.closing else {}),
    }
    for name, slices in (("down", broadcast.down), ("up", broadcast.up)):
        if slices is not None:
            config[name] = str(slices_as_text(slices))
    return Frame(kind, config, {}, arrays)


PER_SITE = {"client", "weight", "counted", "accepted", "attempt", "session"}
"""Fields of a broadcast that may differ between the sites of a masked sum; each site checks its own."""


@dataclass(frozen=True)
class BroadcastDigest:
    """Digests of a broadcast under secure aggregation.

    Attributes:
        signed: Digest of all that a site computes with, which must be equal for all sites of a masked sum.
        model: Digest of the model and of the tensors of rules from which the site trains.
        known: Digest of each part of these tensors as last received, by part, for methods that exchange only slices.
        own: Digest of what may differ between the sites of a sum: weight, budget and the state that the site continues from.
        start: Digest of the model, of these, and of the slices that were sent.
    """

    signed: str
    model: str
    known: dict[str, str]
    own: str = ""
    start: str = ""


def broadcast_digest(
    frame: Frame, terms: WireContext, known: Mapping[str, str], received: str, state: str = ""
) -> BroadcastDigest:
    """Return the digests of a broadcast.

    A server that sends one site another model, schema or setting could otherwise identify this site's update in the sum.
    If a method exchanges slices, a site does not receive a part of the model that has not changed. Then the digest of the
    part as last received counts, because it is the current one.

    Args:
        frame: Message that was received.
        terms: Wire context.
        known: Parts that the site received until the round whose state it continues from.
        received: Digest of the data that the site received before the first round.
        state: Digest of the state that the site continues from.

    Raises:
        InvalidMessageError: If the slices are invalid, or overlap others that the site received before. Then the order in
            which it received them would determine its model, but not the digest.
    """
    sliced = terms.method.sync is not None
    complete, parts = {}, {**known}
    for name, blob in frame.arrays.items():
        if sliced and (name.startswith("model/") or SLICED in name):
            parts |= _part_digests(name, blob, frame, terms)
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


def _part_digests(name: str, blob: Blob, frame: Frame, terms: WireContext) -> dict[str, str]:
    """Return the digest of each parameter, or each normalization buffer, among the slices in one array."""
    down, up = (parse_slices(frame.config.get(n), terms.spec.size) for n in ("down", "up"))
    slices, sizes = down, terms.spec.sizes
    if name == "model/b":
        slices, sizes = mask_slices(terms.received(down, frame.kind)), terms.spec.buffer_sizes
    elif name == "model/base":
        slices = terms.base(down, up)
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
    """Return a digest of a message without ``attempt``, which is equal for repeated messages."""
    config = {name: value for name, value in frame.config.items() if name != "attempt"}
    arrays = [[name, blob.digest()] for name, blob in sorted(frame.arrays.items())]
    return _text_digest([frame.kind, config, frame.figures, arrays])


def decode_broadcast(frame: Frame, terms: WireContext, state: ClientState) -> Broadcast:
    """Decode and validate a broadcast at the client.

    Args:
        frame: Message that was received.
        terms: Wire context.
        state: State of the client.

    Raises:
        InvalidMessageError: If the message is not a valid broadcast.
    """
    spec, config = terms.spec, frame.config
    check_records(frame, ("model", "download", f"download{SLICED}"))
    down, up = (parse_slices(config.get(name), spec.size) for name in ("down", "up"))
    like, model = spec.flatten(), decode_record(frame, "model")
    if extra := set(model) - {"v", "b", "base"}:
        raise InvalidMessageError(f"it contains model/{min(extra)[:60]}, which was not requested")
    sent = check_tensor("model/v", model.get("v"), like, slices_length(down, spec.size), terms.norm)
    b, received = spec.flatten_buffers(), terms.received(down, frame.kind)
    b[received] = check_tensor("model/b", model.get("b"), b, int(received.sum()), terms.norm)
    v = sent if down is None else scatter_slices(torch.zeros_like(like), down, sent)
    base = terms.base(down, up)
    if base and terms.needs_base:
        values = check_tensor("model/base", model.get("base"), like, slices_length(base, spec.size), terms.norm)
        v = scatter_slices(v, base, values)
    if down is not None and state.model is None:
        state = replace(
            state, model=like
        )  # parameters that are not sent start at the initial values, given by the seed
    return Broadcast(
        round=read_integer(config, "round"),
        client=read_integer(config, "client"),
        v=v,
        b=b,
        download=terms.check_extras("download", decode_rules(frame, "download", down, spec.size), finite=True),
        state=state,
        weight=read_number(config, "weight", 0.0, LARGEST_WEIGHT),
        down=down,
        up=up,
        accepted=read_accepted(frame),
        report=config.get("report") is True,
        keeps=config.get("keeps") is True,
        closing=config.get("closing") is True,
    )


def encode_update(update: Update, broadcast: Broadcast, terms: WireContext, about: dict[str, Any]) -> Frame:
    """Encode an update; the client's state stays at the client.

    Args:
        update: The update.
        broadcast: Broadcast that the client was trained from.
        terms: Wire context.
        about: Further fields.
    """
    arrays = {"update/buffers": encode_tensor(update.buffers[terms.sent(broadcast).to(update.buffers.device)])}
    if terms.compressed:
        arrays |= encode_record("encoded", update.encoded)
    else:
        if terms.sends_model:
            arrays["update/delta"] = encode_tensor(gather_slices(update.delta, broadcast.up))
        arrays |= encode_rules("upload", update.upload, broadcast.up, terms.spec.size)
    arrays |= encode_record("report", update.report)
    config = {
        **about,
        "client": update.client,
        "round": update.born,
        "examples": update.examples,
        "weight": float(update.weight),
        "usable": all(bool(torch.isfinite(t).all()) for t in update.state.tensors().values()),
    }
    return Frame("update", config, {name: float(value) for name, value in update.metrics.items()}, arrays)


def decode_update(frame: Frame, broadcast: Broadcast, terms: WireContext, examples: int) -> Update:
    """Decode and validate an update at the server.

    An update with non-finite values is valid: the server skips and counts it.

    Args:
        frame: Message that was received.
        broadcast: Broadcast that the client was trained from.
        terms: Wire context.
        examples: Number of training samples of the client.

    Raises:
        UnskewError: If the message is not a valid update, or belongs to another broadcast.
    """
    spec, config = terms.spec, frame.config
    if frame.kind != "update":
        raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'update'")
    check_records(frame, ("update", "report", *(("encoded",) if terms.compressed else ("upload", f"upload{SLICED}"))))
    check_reply_matches(config, broadcast, examples)
    if not METRICS - {"loss"} <= frame.figures.keys() <= METRICS:
        raise InvalidMessageError(f"its metrics are not {', '.join(sorted(METRICS))}")
    metrics = {name: read_number(frame.figures, name, 0.0, LARGEST_NUMBER) for name in METRICS - {"loss"}}
    tensors, report = decode_record(frame, "update"), decode_record(frame, "report")
    if extra := set(tensors) - {"delta", "buffers"} | set(report) - {"v"}:
        raise InvalidMessageError(f"it contains {min(extra)[:60]!r}, which was not requested")
    v = broadcast.v
    delta = torch.zeros_like(v)
    sent_bytes = None
    uploads = decode_rules(frame, "upload", broadcast.up, spec.size)
    if terms.compressed:
        if "delta" in tensors:
            raise InvalidMessageError("it contains 'delta', but its update must be compressed")
        encoded = decode_record(frame, "encoded")
        delta, uploads = decode_streams(encoded, broadcast, terms)
        sent_bytes = num_bytes(encoded.values())
    elif terms.sends_model:
        sent = check_tensor(
            "update/delta", tensors.get("delta"), v, slices_length(broadcast.up, spec.size), terms.norm, finite=False
        )
        delta = scatter_slices(delta, broadcast.up, sent.to(v.device))
        for span in () if terms.needs_base else terms.base(broadcast.down, broadcast.up):
            delta[span] = delta[span] - v[span]
    b, sent_b = broadcast.b.cpu().clone(), terms.sent(broadcast)
    b[sent_b] = check_tensor("update/buffers", tensors.get("buffers"), b, int(sent_b.sum()), terms.norm, finite=False)
    if broadcast.report:
        check_tensor("report/v", report.get("v"), v, spec.size, terms.norm, finite=False)
    elif report:
        raise InvalidMessageError("it reports a model that was not requested")
    usable = config.get("usable") is True and all(finite_flags([*report.values()]))
    unusable = {"": {"state": torch.tensor(torch.nan)}}  # makes the server skip the update, as in a simulation
    return Update(
        client=broadcast.client,
        born=broadcast.round,
        examples=examples,
        weight=broadcast.weight,
        delta=delta,
        buffers=b.to(v.device),
        upload={
            rule: {name: t.to(v.device) for name, t in tensors.items()}
            for rule, tensors in terms.check_extras("upload", uploads, finite=False).items()
        },
        state=ClientState() if usable else ClientState(rules=unusable),
        metrics={**metrics, "loss": read_metric(frame.figures, "loss")},
        report={name: t.to(v.device) for name, t in report.items()},
        sent_bytes=sent_bytes,
    )


def decode_streams(encoded: Tensors, broadcast: Broadcast, terms: WireContext) -> tuple[Tensor, Tensors]:
    """Decode and validate the compressed streams of an update.

    Args:
        encoded: Encoded streams by name.
        broadcast: Broadcast that the client was trained from.
        terms: Wire context.

    Returns:
        The update ``[d]``, and the rules' uploads by ``RULE/NAME``.

    Raises:
        UnskewError: If the streams are invalid or too large.
    """
    spec, v = terms.spec, broadcast.v
    allowed = terms.largest + 8 * spec.size
    if num_bytes(encoded.values()) > allowed:
        raise InvalidMessageError(f"encoded has more than {allowed} bytes")
    ctx = UploadContext(broadcast.round, broadcast.client, 0, spec, broadcast.up, RoundPlan())
    streams = decode_payload(terms.method.client, encoded, ctx)
    check_tensor("update/delta", streams.get(UPDATE), v, ctx.size, terms.norm, finite=False)
    delta, upload = unpack_streams(streams, ctx)
    assert delta is not None
    return delta.to(v.device), name_streams(upload)


def check_reply_matches(config: dict[str, Any], broadcast: Broadcast, examples: int) -> None:
    """Validate that a reply belongs to ``broadcast`` and states the expected number of samples.

    Args:
        config: Fields of the reply.
        broadcast: Broadcast that was sent.
        examples: Number of training samples of the client.

    Raises:
        InvalidMessageError: If the reply belongs to another broadcast.
    """
    for name, expected in (("client", broadcast.client), ("round", broadcast.round), ("examples", examples)):
        if read_integer(config, name) != expected:
            raise InvalidMessageError(f"its {name} is {config.get(name)} instead of {expected}")
    if config.get("weight") != broadcast.weight:
        raise InvalidMessageError(f"its weight is {printable(config.get('weight'))[:40]} instead of {broadcast.weight}")


def read_accepted(frame: Frame) -> int | None:
    """Return the round of the last update that the server accepted from a site; None if there is none.

    Args:
        frame: Broadcast that was received.

    Raises:
        InvalidMessageError: If the field is missing or invalid.
    """
    return None if frame.config.get("accepted") == -1 else read_integer(frame.config, "accepted")


def read_integer(config: dict[str, Any], name: str, largest: int = 1 << 62) -> int:
    """Return a non-negative integer field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.
        largest: Largest accepted value.

    Raises:
        InvalidMessageError: If the field is missing, is not such an integer, or is too large.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise InvalidMessageError(f"{name} is {printable(value)[:40]!r} instead of an integer from 0 to {largest}")
    return value


def read_number(config: dict[str, Any], name: str, lowest: float, highest: float) -> float:
    """Return a finite number field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.
        lowest: Smallest accepted value.
        highest: Largest accepted value.

    Raises:
        InvalidMessageError: If the field is missing, or is not a number in this range.
    """
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidMessageError(
            f"{name} is {printable(value)[:40]!r} instead of a number from {lowest:g} to {highest:g}"
        )
    return float(value)


def read_metric(figures: dict[str, float], name: str) -> float:
    """Return a metric of a message; NaN if it was not finite and therefore not sent, as in a training that diverged.

    Args:
        figures: Metrics of a message.
        name: Name of the metric.

    Raises:
        InvalidMessageError: If it is out of range.
    """
    missing = not math.isfinite(figures.get(name, math.nan))
    return math.nan if missing else read_number(figures, name, -LARGEST_METRIC, LARGEST_METRIC)


def read_text(config: dict[str, Any], name: str) -> str:
    """Return a string field of a message.

    Args:
        config: Fields of a message.
        name: Name of the field.

    Raises:
        InvalidMessageError: If the field is missing or is not a string.
    """
    value = config.get(name)
    if not isinstance(value, str):
        raise InvalidMessageError(f"{name} is {printable(value)[:40]!r} instead of a string")
    return value


def read_class_counts(frame: Frame, classes: int) -> Tensor:
    """Return a site's number of samples per class, ``[C]``.

    Args:
        frame: Message that was received.
        classes: Number of classes.

    Raises:
        InvalidMessageError: If the counts are missing or invalid.
    """
    check_records(frame, ("facts",))
    counts = decode_record(frame, "facts").get("class_counts")
    if counts is None or counts.dtype != torch.int64 or tuple(counts.shape) != (classes,) or (counts < 0).any():
        raise InvalidMessageError(f"it does not report sample counts of {classes} classes")
    return counts
