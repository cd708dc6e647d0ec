"""Compression of uploads, with error feedback.

``C`` is the code of a method and ``e_k`` the error that client ``k`` keeps (Seide et al. 2014; Karimireddy et al. 2019,
arXiv:1901.09847)::

    p = u_k + e_k,    send C(p),    e_k <- p - decode(C(p))

The error stays bounded only if decoding a code loses a part of the vector, ``E |decode(C(p)) - p|^2 < |p|^2``. A code that is
unbiased with the variance ``omega |p|^2`` need not do so, and does after division by ``1 + omega`` (Horvath and Richtarik
2021, arXiv:2006.11077, Section 3), which both sides know. The broadcast has the same recursion.

Every stream with an entry for each uploaded parameter is compressed, also uploads such as SCAFFOLD's; other tensors are sent
unchanged. The error stays while a client is absent, and does not change if its update is lost. Traffic is the exact size of
the encoded streams. The modules
``sparse``, ``quantized`` and ``low_rank`` have the codes: dictionaries of tensors that a client sends instead of a vector.
If a vector is not finite, neither is the decoded vector, so that the server can discard the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.errors import UnskewError
from unskew.methods.compression import low_rank, quantized, sparse
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
    """Base class of compression methods without error feedback."""

    stage: ClassVar[Stage] = "compress"

    @property
    def keeps_error(self) -> bool:
        """Return whether the client adds the error of the code to its next update."""
        return False

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules whose sums at the server would drift away from those at the clients.

        Args:
            method: The composition.
        """
        rule = next((rule for rule in method.client if rule.sums_over_rounds), None)
        if rule is None or self.keeps_error or self.preserves_norms:
            return None
        remedy = f"Set {self.name}:feedback=true" if isinstance(self, FeedbackCompressor) else "Use topk or int8"
        return (
            f"With {rule.name}, the server adds up what clients send, and the errors of {self.name} with it, so that "
            f"training gets worse with every round. {remedy}."
        )

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        """Return the code of a vector.

        Args:
            v: Vector, ``[n]``.
            memory: Tensors of this stream that stay at the client; may be written.
            key: Random key of client, round and stream.
            ctx: Upload.
        """
        raise NotImplementedError

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Return the vector ``[n]`` of a code, which may come from a hostile client.

        Args:
            code: Code by name.
            ctx: Upload.

        Raises:
            UnskewError: If the code is invalid.
        """
        raise NotImplementedError

    def variance(self, n: int) -> float:
        """Return ``omega``, a bound of ``E |decode(C(v)) - v|^2 / |v|^2``, of an unbiased code; 0 of a biased one.

        Args:
            n: Length of the vector.
        """
        return 0.0

    def _contracted(self, code: Tensors, ctx: UploadContext) -> Tensor:
        """Return the vector of a code whose error is fed back."""
        omega = self.variance(ctx.size)
        v = self._expand(code, ctx)
        return v / (1 + omega) if omega else v

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Warn if codes are not smaller than vectors, and about buffers, which are not compressed.

        Args:
            run: Configuration, federation and model of the run.
        """
        warnings, spec = [], run.spec
        v = torch.zeros(spec.size, dtype=spec.dtype)
        code = self._compress(v, {}, torch.zeros((), dtype=torch.int64), UploadContext(0, 0, 0, spec, None, run.plan))
        if num_bytes(code.values()) >= num_bytes([v]):
            warnings.append(
                f"With these options {self.name} sends {num_bytes(code.values())} bytes for a model of {num_bytes([v])} "
                "bytes, so it saves no traffic. Change its options or remove it."
            )
        if sum(spec.buffer_sizes) and run.buffers == "average":
            warnings.append(f"{self.name} does not compress normalization buffers; they are sent as they are.")
        return warnings

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
            if error is not None and self.keeps_error:
                v = v + gather_slices(error, ctx.up)
            code = self._compress(v, memory, fold(base, number).to(v.device), ctx)
            sent |= {f"{stream}:{name}": t for name, t in code.items()}
            if self.keeps_error:
                left = v - self._contracted(code, ctx)
                all_errors = v.new_zeros(ctx.spec.size) if error is None else error.clone()
                memory["error"] = scatter_slices(all_errors, ctx.up, left)
            new |= {f"{label_of(stream)}#{name}": t for name, t in memory.items()}
        return sent, new

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
        decoded = self._contracted if self.keeps_error else self._expand
        return {**{stream: decoded(code, ctx) for stream, code in coded.items()}, **plain}


def label_of(stream: str) -> str:
    """Return the name of a stream in the client's state, where slashes separate rules."""
    return stream.replace("/", ".")


@dataclass(frozen=True)
class FeedbackCompressor(Compressor):
    """Base class of compression methods with error feedback, which can compress the broadcast, too.

    Attributes:
        feedback: Keep the error of the code at the client and add it to the next update.
        down: Compress the broadcast, too.
    """

    feedback: bool = False
    down: bool = False

    @property
    def keeps_error(self) -> bool:
        """Return the option ``feedback``."""
        return self.feedback

    def conflict_with(self, method: Method) -> str | None:
        """Name rules that the compressed broadcast, or codes without feedback, do not support.

        Args:
            method: The composition.
        """
        if self.down and method.sync is not None:
            return (
                f"{self.name}:down=true needs a broadcast of the whole model, and {method.sync.name} sends parts of it."
            )
        return super().conflict_with(method)

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
        code = self._compress(v - before, memory, key, ctx)
        new = {**state, **{f"code#{name}": t for name, t in memory.items()}}
        return new, before + self._contracted(code, ctx), num_bytes(code.values())


@dataclass(frozen=True)
class TopK(FeedbackCompressor):
    """Entries of largest magnitude.

    Attributes:
        share: Share of the entries that are sent.
    """

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "sends the largest entries of the update"
    paper: ClassVar[str] = (
        "Stich et al. 2018, arXiv:1809.07599; error feedback: Karimireddy et al. 2019, arXiv:1901.09847"
    )

    share: Share = 0.01
    feedback: bool = True

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        return sparse.encode_topk(v, self.share)

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return sparse.decode_topk(code, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class RandK(Compressor):
    """Random entries, the same for all clients of a round, scaled so that the result is unbiased.

    Attributes:
        share: Share of the entries that are sent.
    """

    name: ClassVar[str] = "randk"
    summary: ClassVar[str] = "sends random entries of the update, scaled up"
    paper: ClassVar[str] = "Konečný et al. 2016, arXiv:1610.05492"

    share: Share = 0.01

    def key_client(self, ctx: UploadContext) -> int:
        """Draw the same entries for all clients."""
        return 0

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        return sparse.encode_randk(v, self.share, key)

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return sparse.decode_randk(code, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class QSGD(FeedbackCompressor):
    """Stochastic quantization relative to the norm of a bucket.

    Attributes:
        levels: Number of levels above 0.
        bucket: Number of entries that share a norm.
    """

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "quantizes the update to a few levels at random, without bias"
    paper: ClassVar[str] = "Alistarh et al. 2017, arXiv:1610.02132"

    levels: Annotated[int, Field(ge=1, le=1 << 14)] = 15
    bucket: Whole = 512

    def variance(self, n: int) -> float:
        """``min(b / s^2, sqrt(b) / s)`` with buckets of ``b`` entries (Lemma 3.1 of the paper)."""
        ratio = math.sqrt(min(self.bucket, n)) / self.levels
        return min(ratio * ratio, ratio)

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        return quantized.encode_qsgd(v, self.levels, self.bucket, key)

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return quantized.decode_qsgd(code, self.levels, self.bucket, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class Sign(FeedbackCompressor):
    """Signs, scaled by the mean magnitude of each parameter."""

    name: ClassVar[str] = "sign"
    summary: ClassVar[str] = "sends one bit per entry of the update"
    paper: ClassVar[str] = "Karimireddy et al. 2019, arXiv:1901.09847"

    feedback: bool = True

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        return quantized.encode_sign(v, sizes_of(ctx))

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return quantized.decode_sign(code, sizes_of(ctx), ctx.spec.dtype)


@dataclass(frozen=True)
class Int8(FeedbackCompressor):
    """Eight-bit integers, scaled to the largest magnitude of a bucket.

    Attributes:
        bucket: Number of entries that share a scale.
    """

    name: ClassVar[str] = "int8"
    preserves_norms: ClassVar[bool] = True
    summary: ClassVar[str] = "rounds the update to 8-bit integers"
    paper: ClassVar[str] = "Dettmers 2016, arXiv:1511.04561"

    bucket: Whole = 512

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        return quantized.encode_int8(v, self.bucket)

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return quantized.decode_int8(code, self.bucket, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class FP16(FeedbackCompressor):
    """Half precision."""

    name: ClassVar[str] = "fp16"
    preserves_norms: ClassVar[bool] = True
    summary: ClassVar[str] = "rounds the update to half precision"
    paper: ClassVar[str] = "Micikevicius et al. 2017, arXiv:1710.03740"

    rounded: ClassVar[torch.dtype] = torch.float16

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        return quantized.encode_rounded(v, self.rounded)

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return quantized.decode_rounded(self.name, code, self.rounded, ctx.size, ctx.spec.dtype)


@dataclass(frozen=True)
class BF16(FP16):
    """Half precision with the range of single precision."""

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "rounds the update to bfloat16"
    paper: ClassVar[str] = "Kalamkar et al. 2019, arXiv:1905.12322"
    rounded: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class PowerSGD(FeedbackCompressor):
    """Low-rank approximation of every matrix by one step of power iteration, which starts from the last round's factors.

    Attributes:
        rank: Largest rank of the approximation.
    """

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[str] = "sends low-rank factors of the matrices in the update"
    paper: ClassVar[str] = "Vogels et al. 2019, arXiv:1905.13727"

    rank: Whole = 2
    feedback: bool = True

    def _compress(self, v: Tensor, memory: Tensors, key: Tensor, ctx: UploadContext) -> Tensors:
        first = low_rank.initial_powersgd_start(ctx.shapes, self.rank, key, v.dtype)
        start = memory.get("start")
        usable = start is not None and start.shape == first.shape
        code, memory["start"] = low_rank.encode_powersgd(v, ctx.shapes, self.rank, start if usable else None, key)
        return code

    def _expand(self, code: Tensors, ctx: UploadContext) -> Tensor:
        return low_rank.decode_powersgd(code, ctx.shapes, self.rank, ctx.spec.dtype)


def sizes_of(ctx: UploadContext) -> list[int]:
    """Return the number of uploaded entries of each parameter."""
    return [torch.Size(shape).numel() for shape in ctx.shapes]
