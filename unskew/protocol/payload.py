"""Payload of an update: the named streams that a client sends, and their encoding by the codecs of a method.

Streams are ``update``, the uploaded entries of the local update, and ``RULE/NAME``, the uploads of client rules. Tensors with
the length of the model are reduced to the uploaded entries, as on the wire. Normalization buffers are not part of the
payload. Codecs run in the order of ``STAGES``, independent of the method expression; the server decodes in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Slices, Tensors, num_bytes, replace_fields
from unskew.protocol.round_plan import RoundPlan
from unskew.secret_draws import SecretKey

Stage = Literal["transform", "clip", "compress"]
STAGES = ("transform", "clip", "compress")
"""Order of the codecs at a client. A method has at most one codec of each stage after ``transform``."""
UPDATE = "update"
"""Name of the stream with the local update."""


@dataclass(frozen=True)
class UploadContext:
    """Information on an upload that both sides share, and what a codec received.

    Attributes:
        round: Number of the round, from 0.
        client: Client number.
        seed: Seed of the run; 0 in ``decode``.
        spec: Layout of the model.
        up: Uploaded slices of the model; None for all.
        plan: Schedule of the run.
        download: What the server half of the codec sent to this client; empty in ``decode``.
        secret: Secret key to draw noise from; None draws it from the seed.
    """

    round: int
    client: int
    seed: int
    spec: ModelSpec
    up: Slices | None
    plan: RoundPlan
    download: Tensors = field(default_factory=dict)
    secret: SecretKey | None = None

    @property
    def size(self) -> int:
        """Number of uploaded entries of the model."""
        return slices_length(self.up, self.spec.size)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the uploaded parameters, in order; of a parameter that is uploaded in parts, the part is flat."""
        return uploaded_shapes(self.spec, self.up)


class Codec(Protocol):
    """Client rule that may encode what a client sends, see ``unskew.protocol.rules.ClientRule``."""

    @property
    def name(self) -> str:
        """Name of the rule."""

    @property
    def stage(self) -> Stage:
        """Stage at which the rule encodes."""

    @property
    def encodes(self) -> bool:
        """Return whether the rule encodes at all."""

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Encode the payload at the client.

        Args:
            payload: Streams by name.
            state: State of the rule at the client.
            ctx: Upload.

        Returns:
            The encoded streams and the new state.
        """

    def decode(self, payload: Tensors, ctx: UploadContext) -> Tensors:
        """Decode the payload at the server.

        Args:
            payload: Encoded streams by name.
            ctx: Upload.
        """


def uploaded_shapes(spec: ModelSpec, up: Slices | None) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters in the uploaded slices, in order.

    Args:
        spec: Layout of the model.
        up: Uploaded slices in ascending order; None for all.
    """
    if up is None:
        return list(spec.shapes)
    shapes: list[tuple[int, ...]] = []
    start = 0
    for size, shape in zip(spec.sizes, spec.shapes, strict=True):
        parts = [min(span.stop, start + size) - max(span.start, start) for span in up]
        shapes += [shape if part == size else (part,) for part in parts if part > 0]
        start += size
    return shapes


def slices_length(slices: Slices | None, size: int) -> int:
    """Return the number of elements in the slices.

    Args:
        slices: Slices of the vector; None: all of it.
        size: Length of the vector.
    """
    return size if slices is None else sum(span.stop - span.start for span in slices)


def gather_slices(v: Tensor, slices: Slices | None) -> Tensor:
    """Concatenate the slices of a vector.

    Args:
        v: Vector, ``[d]``.
        slices: Slices to join; None: all.
    """
    if slices is None:
        return v
    return torch.cat([v[span] for span in slices]) if slices else v[:0]


def scatter_slices(into: Tensor, slices: Slices | None, values: Tensor) -> Tensor:
    """Write concatenated values into the slices of a vector and return it; inverse of ``gather_slices``.

    Args:
        into: Vector to fill, ``[d]``.
        slices: Slices to fill; None: all.
        values: Concatenated values of the slices.
    """
    if slices is None:
        return values
    at = 0
    for span in slices:
        width = span.stop - span.start
        into[span] = values[at : at + width]
        at += width
    return into


def codecs_of(rules: Sequence[Codec]) -> list[Codec]:
    """Return the rules that encode the payload, in the order in which they do.

    Args:
        rules: Client rules of a method.
    """
    return sorted((rule for rule in rules if rule.encodes), key=lambda rule: STAGES.index(rule.stage))


def compresses(rules: Sequence[Codec]) -> bool:
    """Return whether some rule compresses the payload, so that the encoded streams are sent instead of vectors."""
    return any(rule.encodes and rule.stage == "compress" for rule in rules)


def name_streams(upload: dict[str, Tensors]) -> Tensors:
    """Return uploads by ``RULE/NAME``.

    Args:
        upload: Uploads by rule and name.
    """
    return {f"{rule}/{name}": t for rule, tensors in upload.items() for name, t in tensors.items()}


def pack_streams(delta: Tensor, upload: dict[str, Tensors], up: Slices | None) -> Tensors:
    """Return the payload of an update.

    Args:
        delta: Local update, ``[d]``.
        upload: Uploads by rule and name.
        up: Uploaded slices; None for all.
    """
    streams = {UPDATE: delta, **name_streams(upload)}
    return {name: gather_slices(t, up) if t.shape == delta.shape else t for name, t in streams.items()}


def unpack_streams(payload: Tensors, ctx: UploadContext) -> tuple[Tensor | None, dict[str, Tensors]]:
    """Invert ``pack_streams``; entries that are not uploaded are zero.

    Args:
        payload: Streams by name.
        ctx: Upload.

    Returns:
        The update ``[d]``, or None if the payload has none, and the uploads by rule and name.
    """
    full = {}
    for name, t in payload.items():
        sliced = ctx.up is not None and t.shape == (ctx.size,)
        full[name] = scatter_slices(t.new_zeros(ctx.spec.size), ctx.up, t) if sliced else t
    upload: dict[str, Tensors] = {}
    for stream in full.keys() - {UPDATE}:
        rule, _, name = stream.partition("/")
        upload.setdefault(rule, {})[name] = full[stream]
    ordered = {rule: dict(sorted(tensors.items())) for rule, tensors in sorted(upload.items())}
    return full.get(UPDATE), ordered


def decode_payload(rules: Sequence[Codec], payload: Tensors, ctx: UploadContext) -> Tensors:
    """Decode a payload at the server.

    Args:
        rules: Client rules of the method.
        payload: Encoded streams.
        ctx: Upload.

    Raises:
        UnskewError: If the payload is invalid.
    """
    for rule in reversed(codecs_of(rules)):
        payload = rule.decode(payload, ctx)
    return payload


@dataclass(frozen=True)
class EncodedUpload:
    """Result of the codecs of one client.

    Attributes:
        delta: Update as the server decodes it, ``[d]``.
        upload: Uploads as the server decodes them, by rule and name.
        state: New state of each codec at the client, by rule.
        encoded: Encoded streams; empty if vectors are sent.
        size: Number of bytes of the encoded streams; None if vectors are sent.
    """

    delta: Tensor
    upload: dict[str, Tensors]
    state: dict[str, Tensors]
    encoded: Tensors
    size: int | None


def encode_upload(
    rules: Sequence[Codec],
    delta: Tensor,
    upload: dict[str, Tensors],
    state: dict[str, Tensors],
    download: dict[str, Tensors],
    ctx: UploadContext,
) -> EncodedUpload:
    """Encode what a client sends, and decode it as the server does.

    Args:
        rules: Client rules of the method, or those that encode this upload.
        delta: Local update, ``[d]``.
        upload: Uploads by rule and name.
        state: State of the rules at the client, by rule.
        download: What the server halves sent to the client, by rule.
        ctx: Upload.

    Raises:
        ConfigError: If a codec returns an update of another shape or data type.
    """
    payload, written = pack_streams(delta, upload, ctx.up), {}
    for rule in codecs_of(rules):
        own = replace_fields(ctx, download=download.get(rule.name, {}))
        payload, written[rule.name] = rule.encode(payload, state.get(rule.name, {}), own)
    encoded = payload if compresses(rules) else {}
    decoded, others = unpack_streams(decode_payload(rules, payload, ctx), ctx)
    if decoded is not None and (decoded.shape != delta.shape or decoded.dtype != delta.dtype):
        raise ConfigError(
            f"Encoding and decoding must return an update like the original, {delta.dtype} {tuple(delta.shape)}, not "
            f"{decoded.dtype} {tuple(decoded.shape)}."
        )
    size = num_bytes(encoded.values()) if encoded else None
    return EncodedUpload(delta if decoded is None else decoded, others, written, encoded, size)
