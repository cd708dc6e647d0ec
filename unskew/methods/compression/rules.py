"""Compression of uploads, with error feedback.

``C`` is the code of a method and ``e_k`` the error that client ``k`` keeps (Seide et al. 2014; Karimireddy et al. 2019,
arXiv:1901.09847)::

    p = u_k + e_k,    send C(p),    e_k <- p - decode(C(p))

Every stream with an entry for each uploaded parameter is compressed, also uploads such as SCAFFOLD's; other tensors are sent
unchanged. The error stays while a client is absent, and does not change if its update is lost. Traffic is the exact size of
the encoded streams. See ``unskew.methods.compression.codes`` for the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import ConfigError, UnskewError
from unskew.methods.compression import codes
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import num_bytes
from unskew.protocol.payload import UPDATE, gather_slices, scatter_slices
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, Method, Stage, Tensors, UploadContext
from unskew.protocol.run_context import PreRunContext
from unskew.seeding import derive, fold

Share = Annotated[float, Field(gt=0, le=1)]
Whole = Annotated[int, Field(ge=1, le=1 << 30)]


@dataclass(frozen=True)
class Compressor(ClientRule):
    """Base class of compression methods.

    Attributes:
        feedback: Keep the error of the code at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    stage: ClassVar[Stage] = "compress"

    feedback: bool = False
    down: bool = False

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Return the code of a vector.

        Args:
            v: Vector, ``[n]``.
            memory: Tensors of this stream that stay at the client; may be written.
            key: Random key of client, round and stream.
            ctx: Upload.
        """
        raise NotImplementedError

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Return the vector ``[n]`` of a code, which may come from a hostile client.

        Args:
            code: Code by name.
            ctx: Upload.

        Raises:
            UnskewError: If the code is invalid.
        """
        raise NotImplementedError

    def conflict_with(self, method: Method) -> str | None:
        """Name rules that the compressed broadcast does not support.

        Args:
            method: The composition.
        """
        if self.down and method.sync is not None:
            return (
                f"{self.name}:down=true needs a broadcast of the whole model, and {method.sync.name} sends parts of it."
            )
        return None

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn about buffers, which are not compressed.

        Args:
            run: Configuration, federation and model of the run.
        """
        if sum(run.spec.buffer_sizes) and run.buffers == "average":
            return (f"{self.name} does not compress normalization buffers; they are sent as they are.",)
        return ()

    def encode(self, payload: Tensors, state: Tensors, ctx: UploadContext) -> tuple[Tensors, Tensors]:
        """Compress every stream with an entry for each uploaded parameter.

        Args:
            payload: Streams by name.
            state: State of this rule at this client: ``STREAM#error`` and memory of the code, by stream.
            ctx: Upload.
        """
        sent: Tensors = {}
        new = dict(state)
        base = torch.tensor(derive(ctx.seed, "compression", ctx.round, self.key_client(ctx)))
        for number, (stream, v) in enumerate(sorted(payload.items())):
            if not v.is_floating_point() or v.shape != (ctx.size,):
                sent[stream] = v
                continue
            memory = {n.partition("#")[2]: t for n, t in state.items() if n.partition("#")[0] == label_of(stream)}
            error = memory.pop("error", None)
            if error is not None and self.feedback:
                v = v + gather_slices(error, ctx.up)
            code = self.compress(v, memory, fold(base, number).to(v.device), ctx)
            sent |= {f"{stream}:{name}": t for name, t in code.items()}
            if self.feedback:
                left = v - self.expand(code, ctx)
                all_errors = v.new_zeros(ctx.spec.size) if error is None else error.clone()
                memory["error"] = scatter_slices(all_errors, ctx.up, left)
            new |= {f"{label_of(stream)}#{name}": t for name, t in memory.items()}
        return sent, new

    @property
    def compresses_broadcast(self) -> bool:
        """Return whether the broadcast is compressed, too."""
        return self.down

    def compress_broadcast(
        self, state: Tensors, v: Tensor, before: Tensor, round: int, seed: int, spec: ModelSpec
    ) -> tuple[Tensors, Tensor, int]:
        """Send the code of the difference between the model and what clients have: ``w <- w + decode(C(v - w))``.

        The error of the code remains in the difference of the next round.

        Args:
            state: State of the server half.
            v: Model of the server, ``[d]``.
            before: Model that clients have, ``w``, ``[d]``.
            round: Number of the round, from 0.
            seed: Seed of the run.
            spec: Layout of the model.
        """
        ctx = UploadContext(round, 0, seed, spec, None, RoundPlan())
        memory = {name.partition("#")[2]: t for name, t in state.items() if name.startswith("code#")}
        key = torch.tensor(derive(seed, "broadcast compression", round), device=v.device)
        code = self.compress(v - before, memory, key, ctx)
        new = {**state, **{f"code#{name}": t for name, t in memory.items()}}
        return new, before + self.expand(code, ctx), num_bytes(code.values())

    def key_client(self, ctx: UploadContext) -> int:
        """Return the client number of the random key.

        Args:
            ctx: Upload.
        """
        return ctx.client

    def decode(self, payload: Tensors, ctx: UploadContext) -> Tensors:
        """Decompress the streams.

        Args:
            payload: Encoded streams by name.
            ctx: Upload.

        Raises:
            UnskewError: If a code is invalid.
        """
        coded: dict[str, Tensors] = {}
        plain: Tensors = {}
        for name, t in payload.items():
            stream, colon, part = name.partition(":")
            if colon:
                coded.setdefault(stream, {})[part] = t
            else:
                plain[name] = t
        if plain.keys() & {*coded, UPDATE} or UPDATE not in coded:
            raise UnskewError(f"the update is not compressed with {self.name}")
        return {**{stream: self.expand(code, ctx) for stream, code in coded.items()}, **plain}


def label_of(stream: str) -> str:
    """Return the name of a stream in the client's state, where slashes separate rules."""
    return stream.replace("/", ".")


@dataclass(frozen=True)
class TopK(Compressor):
    """Entries of largest magnitude.

    Attributes:
        share: Share of entries that are sent.
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "sends the largest entries of the update"
    paper: ClassVar[str] = (
        "Stich et al. 2018, arXiv:1809.07599; error feedback: Karimireddy et al. 2019, arXiv:1901.09847"
    )

    share: Share = 0.01
    feedback: bool = True

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Select the entries."""
        return codes.encode_topk(v, self.share)

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Fill the other entries with zeros."""
        return codes.decode_topk(code, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class RandK(Compressor):
    """Random entries, the same for all clients of a round, scaled so that the result is unbiased.

    Attributes:
        share: Share of entries that are sent.
        feedback: Not supported.
        down: Not supported.
    """

    name: ClassVar[str] = "randk"
    summary: ClassVar[str] = "sends random entries of the update, scaled up"
    paper: ClassVar[str] = "Konečný et al. 2016, arXiv:1610.05492"

    share: Share = 0.01

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that there is no error feedback, which diverges with a code that scales up.

        Args:
            run: Configuration, federation and model of the run.

        Raises:
            ConfigError: If error feedback is on.
        """
        if self.feedback or self.down:
            raise ConfigError("randk scales up what it sends, so feedback=true and down=true would diverge. Use topk.")
        return super().check(run)

    def key_client(self, ctx: UploadContext) -> int:
        """Draw the same entries for all clients."""
        return 0

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Draw the entries."""
        return codes.encode_randk(v, self.share, key)

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Scale the entries by ``n / k``."""
        return codes.decode_randk(code, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic quantization relative to the norm of a bucket.

    Attributes:
        levels: Number of levels ``s`` above 0; 15 need 5 bits with the sign.
        bucket: Number of entries that share a norm.
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "quantizes the update to a few levels at random, without bias"
    paper: ClassVar[str] = "Alistarh et al. 2017, arXiv:1610.02132"

    levels: Annotated[int, Field(ge=1, le=1 << 14)] = 15
    bucket: Whole = 512

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Quantize the entries."""
        return codes.encode_qsgd(v, self.levels, self.bucket, key)

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Return the levels times the norms."""
        return codes.decode_qsgd(code, self.levels, self.bucket, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class Sign(Compressor):
    """Signs, scaled by the mean magnitude of each parameter.

    Attributes:
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "sign"
    summary: ClassVar[str] = "sends one bit per entry of the update"
    paper: ClassVar[str] = "Karimireddy et al. 2019, arXiv:1901.09847"

    feedback: bool = True

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Take the signs."""
        return codes.encode_sign(v, sizes_of(ctx))

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Return the signs times the mean magnitudes."""
        return codes.decode_sign(code, sizes_of(ctx), ctx.spec.dtype)


@dataclass(frozen=True)
class Int8(Compressor):
    """Eight-bit integers, scaled to the largest magnitude of a bucket.

    Attributes:
        bucket: Number of entries that share a scale.
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "int8"
    summary: ClassVar[str] = "rounds the update to 8-bit integers"
    paper: ClassVar[str] = "Dettmers 2016, arXiv:1511.04561"

    bucket: Whole = 512

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Round the entries."""
        return codes.encode_int8(v, self.bucket)

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Return the integers times the scales."""
        return codes.decode_int8(code, self.bucket, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class FP16(Compressor):
    """Half precision.

    Attributes:
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "fp16"
    summary: ClassVar[str] = "rounds the update to half precision"
    paper: ClassVar[str] = "Micikevicius et al. 2017, arXiv:1710.03740"

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Round the entries."""
        return codes.encode_fp16(v)

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Convert the entries."""
        return codes.decode_fp16(code, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class BF16(Compressor):
    """Half precision with the range of single precision.

    Attributes:
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "rounds the update to bfloat16"
    paper: ClassVar[str] = "Kalamkar et al. 2019, arXiv:1905.12322"

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Round the entries."""
        return codes.encode_bf16(v)

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Convert the entries."""
        return codes.decode_bf16(code, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank approximation of every matrix by one step of power iteration, which starts from the last round's factors.

    Attributes:
        rank: Rank of the approximation.
        feedback: Keep the error at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[str] = "sends low-rank factors of the matrices in the update"
    paper: ClassVar[str] = "Vogels et al. 2019, arXiv:1905.13727"

    rank: Whole = 2
    feedback: bool = True

    def compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Approximate the matrices."""
        first = codes.initial_powersgd_start(ctx.shapes, self.rank, key, v.dtype)
        start = memory.get("start")
        usable = start is not None and start.shape == first.shape
        code, memory["start"] = codes.encode_powersgd(v, ctx.shapes, self.rank, start if usable else None, key)
        return code

    def expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Multiply the factors."""
        return codes.decode_powersgd(code, ctx.shapes, self.rank, ctx.spec.dtype)


def sizes_of(ctx: UploadContext) -> list[int]:
    """Return the number of uploaded entries of each parameter."""
    return [torch.Size(shape).numel() for shape in ctx.shapes]
