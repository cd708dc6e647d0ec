"""Broadcasts and updates as messages: encoding, decoding and validation on each side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unskew.deployment.wire.context import SLICED, WireContext, decode_rules, encode_rules
from unskew.deployment.wire.fields import LARGEST_NUMBER, LARGEST_WEIGHT, read_integer, read_metric, read_number
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import (
    InvalidMessageError,
    check_records,
    check_tensor,
    decode_record,
    encode_record,
    encode_tensor,
    parse_slices,
    printable,
    slices_as_text,
)
from unskew.protocol.messages import (
    Broadcast,
    ClientState,
    Tensors,
    Update,
    finite_flags,
    num_bytes,
    without_model,
)
from unskew.protocol.payload import (
    UPDATE,
    UploadContext,
    decode_payload,
    gather_slices,
    name_streams,
    scatter_slices,
    slices_length,
    unpack_streams,
)
from unskew.protocol.round_plan import RoundPlan
from unskew.simulation.update_buffer import AVERAGED_METRICS

METRICS = {*AVERAGED_METRICS, "steps"}
"""Names of the metrics of an update."""


def encode_broadcast(broadcast: Broadcast, wire_context: WireContext, kind: str, fields: dict[str, Any]) -> Frame:
    """Encode a broadcast; the client's state is stored at the client and not sent.

    Args:
        broadcast: The broadcast.
        wire_context: Wire context.
        kind: Kind of the message.
        fields: Further fields.
    """
    wire_context = wire_context.of_client(broadcast.client)
    received = wire_context.received(broadcast.down, kind).to(broadcast.b.device)
    arrays = {
        "model/v": encode_tensor(gather_slices(broadcast.v, broadcast.down)),
        "model/b": encode_tensor(broadcast.b[received]),
    }
    base = wire_context.base(broadcast.down, broadcast.up)
    if base and wire_context.needs_base:
        arrays["model/base"] = encode_tensor(gather_slices(broadcast.v, base))
    arrays |= encode_rules("download", broadcast.download, broadcast.down, wire_context.spec.size)
    config: dict[str, Any] = {
        **fields,
        "client": broadcast.client,
        "round": broadcast.round,
        "weight": float(broadcast.weight),
        "accepted": -1 if broadcast.accepted is None else broadcast.accepted,
        "report": broadcast.report,
        "keeps_optimizer": broadcast.keeps_optimizer,
        **({"closing": True} if broadcast.closing else {}),
    }
    for name, slices in (("down", broadcast.down), ("up", broadcast.up)):
        if slices is not None:
            config[name] = str(slices_as_text(slices))
    return Frame(kind, config, {}, arrays)


def decode_broadcast(frame: Frame, wire_context: WireContext, state: ClientState) -> Broadcast:
    """Decode and validate a broadcast at the client.

    Args:
        frame: Message that was received.
        wire_context: Wire context.
        state: State of the client.

    Raises:
        InvalidMessageError: If the message is not a valid broadcast.
    """
    spec, config = wire_context.spec, frame.config
    check_records(frame, ("model", "download", f"download{SLICED}"))
    down, up = (parse_slices(config.get(name), spec.size) for name in ("down", "up"))
    like, model = spec.flatten(), decode_record(frame, "model")
    if extra := set(model) - {"v", "b", "base"}:
        raise InvalidMessageError(f"it contains model/{min(extra)[:60]}, which was not requested")
    sent = check_tensor("model/v", model.get("v"), like, slices_length(down, spec.size), wire_context.norm)
    b, received = spec.flatten_buffers(), wire_context.received(down, frame.kind)
    b[received] = check_tensor("model/b", model.get("b"), b, int(received.sum()), wire_context.norm)
    v = sent if down is None else scatter_slices(torch.zeros_like(like), down, sent)
    base = wire_context.base(down, up)
    if base and wire_context.needs_base:
        values = check_tensor("model/base", model.get("base"), like, slices_length(base, spec.size), wire_context.norm)
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
        download=wire_context.check_download(decode_rules(frame, "download", down, spec.size)),
        state=state,
        weight=read_number(config, "weight", 0.0, LARGEST_WEIGHT),
        down=down,
        up=up,
        accepted=read_accepted(frame),
        report=config.get("report") is True,
        keeps_optimizer=config.get("keeps_optimizer") is True,
        closing=config.get("closing") is True,
    )


def encode_update(update: Update, broadcast: Broadcast, wire_context: WireContext) -> Frame:
    """Encode an update; the client's state stays at the client.

    Args:
        update: The update.
        broadcast: Broadcast that the client was trained from.
        wire_context: Wire context.
    """
    arrays = {"update/buffers": encode_tensor(update.buffers[wire_context.sent(broadcast).to(update.buffers.device)])}
    if wire_context.compresses(broadcast):
        arrays |= encode_record("encoded", update.encoded)
    else:
        if wire_context.sends_model:
            arrays["update/delta"] = encode_tensor(gather_slices(update.delta, broadcast.up))
        arrays |= encode_rules("upload", update.upload, broadcast.up, wire_context.spec.size)
    arrays |= encode_record("report", update.report)
    config = {
        "client": update.client,
        "round": update.origin_round,
        "num_samples": update.num_samples,
        "weight": float(update.weight),
        "usable": all(bool(torch.isfinite(t).all()) for t in update.state.tensors().values()),
    }
    return Frame("update", config, {name: float(value) for name, value in update.metrics.items()}, arrays)


def decode_update(frame: Frame, broadcast: Broadcast, wire_context: WireContext, num_samples: int) -> Update:
    """Decode and validate an update at the server.

    An update with non-finite values is valid: the server skips and counts it.

    Args:
        frame: Message that was received.
        broadcast: Broadcast that the client was trained from.
        wire_context: Wire context.
        num_samples: Number of training samples of the client.

    Raises:
        UnskewError: If the message is not a valid update, or belongs to another broadcast.
    """
    server_spec, wire_context = wire_context.spec, wire_context.of_client(broadcast.client)
    spec, config = wire_context.spec, frame.config
    if frame.kind != "update":
        raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'update'")
    check_records(
        frame,
        ("update", "report", *(("encoded",) if wire_context.compresses(broadcast) else ("upload", f"upload{SLICED}"))),
    )
    check_reply_matches(config, broadcast, num_samples)
    if not METRICS - {"loss"} <= frame.metrics.keys() <= METRICS:
        raise InvalidMessageError(f"its metrics are not {', '.join(sorted(METRICS))}")
    metrics = {name: read_number(frame.metrics, name, 0.0, LARGEST_NUMBER) for name in METRICS - {"loss"}}
    tensors, report = decode_record(frame, "update"), decode_record(frame, "report")
    if extra := set(tensors) - {"delta", "buffers"} | set(report) - {"v"}:
        raise InvalidMessageError(f"it contains {min(extra)[:60]!r}, which was not requested")
    v = broadcast.v
    delta = torch.zeros_like(v)
    sent_bytes = None
    uploads = decode_rules(frame, "upload", broadcast.up, spec.size)
    if wire_context.compresses(broadcast):
        if "delta" in tensors:
            raise InvalidMessageError("it contains 'delta', but its update must be compressed")
        encoded = decode_record(frame, "encoded")
        delta, uploads = decode_streams(encoded, broadcast, wire_context)
        sent_bytes = num_bytes(encoded.values())
    elif wire_context.sends_model:
        sent = check_tensor(
            "update/delta",
            tensors.get("delta"),
            v,
            slices_length(broadcast.up, spec.size),
            wire_context.norm,
            finite=False,
        )
        delta = scatter_slices(delta, broadcast.up, sent.to(v.device))
        for span in () if wire_context.needs_base else wire_context.base(broadcast.down, broadcast.up):
            delta[span] = delta[span] - v[span]
    b, sent_b = broadcast.b.cpu().clone(), wire_context.sent(broadcast)
    b[sent_b] = check_tensor(
        "update/buffers", tensors.get("buffers"), b, int(sent_b.sum()), wire_context.norm, finite=False
    )
    if broadcast.report:
        check_tensor("report/v", report.get("v"), v, spec.size, wire_context.norm, finite=False)
    elif report:
        raise InvalidMessageError("it reports a model that was not requested")
    usable = config.get("usable") is True and all(finite_flags([*report.values()]))
    unusable = {"": {"state": torch.tensor(torch.nan)}}  # makes the server skip the update, as in a simulation
    update = Update(
        client=broadcast.client,
        origin_round=broadcast.round,
        num_samples=num_samples,
        weight=broadcast.weight,
        delta=delta,
        buffers=b.to(v.device),
        upload={
            rule: {name: t.to(v.device) for name, t in tensors.items()}
            for rule, tensors in wire_context.check_extras("upload", uploads, finite=False).items()
        },
        state=ClientState() if usable else ClientState(rules=unusable),
        metrics={**metrics, "loss": read_metric(frame.metrics, "loss")},
        report={name: t.to(v.device) for name, t in report.items()},
        sent_bytes=sent_bytes,
    )
    return without_model(update, server_spec.size, sum(server_spec.buffer_sizes)) if server_spec.others else update


def decode_streams(encoded: Tensors, broadcast: Broadcast, wire_context: WireContext) -> tuple[Tensor, Tensors]:
    """Decode and validate the compressed streams of an update.

    Args:
        encoded: Encoded streams by name.
        broadcast: Broadcast that the client was trained from.
        wire_context: Wire context.

    Returns:
        The update ``[d]``, and the rules' uploads by ``RULE/NAME``.

    Raises:
        UnskewError: If the streams are invalid or too large.
    """
    spec, v = wire_context.spec, broadcast.v
    allowed = wire_context.largest + 8 * spec.size
    if num_bytes(encoded.values()) > allowed:
        raise InvalidMessageError(f"encoded has more than {allowed} bytes")
    ctx = UploadContext(broadcast.round, broadcast.client, 0, spec, broadcast.up, RoundPlan())
    streams = decode_payload(wire_context.method.client, encoded, ctx)
    check_tensor("update/delta", streams.get(UPDATE), v, ctx.size, wire_context.norm, finite=False)
    delta, upload = unpack_streams(streams, ctx)
    assert delta is not None
    return delta.to(v.device), name_streams(upload)


def check_reply_matches(config: dict[str, Any], broadcast: Broadcast, num_samples: int) -> None:
    """Validate that a reply belongs to ``broadcast`` and states the expected number of samples.

    Args:
        config: Fields of the reply.
        broadcast: Broadcast that was sent.
        num_samples: Number of training samples of the client.

    Raises:
        InvalidMessageError: If the reply belongs to another broadcast.
    """
    for name, expected in (("client", broadcast.client), ("round", broadcast.round), ("num_samples", num_samples)):
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
