"""Codes of one vector ``[n]``: encoders and decoders of all compression methods.

A code is a dictionary of tensors that a client sends instead of a float32 or float64 vector. Encoders accept any vector.
Decoders validate what they read, because a hostile client may have sent it. If a vector is not finite, neither is the
decoded vector, so that the server can discard the update.
"""

from __future__ import annotations

from unskew.methods.compression.low_rank import decode_powersgd, encode_powersgd, initial_powersgd_start
from unskew.methods.compression.quantized import (
    decode_bf16,
    decode_fp16,
    decode_int8,
    decode_qsgd,
    decode_sign,
    encode_bf16,
    encode_fp16,
    encode_int8,
    encode_qsgd,
    encode_sign,
)
from unskew.methods.compression.sparse import (
    decode_randk,
    decode_topk,
    encode_randk,
    encode_topk,
    randk_indices,
    sparse_count,
)

__all__ = [
    "decode_bf16",
    "decode_fp16",
    "decode_int8",
    "decode_powersgd",
    "decode_qsgd",
    "decode_randk",
    "decode_sign",
    "decode_topk",
    "encode_bf16",
    "encode_fp16",
    "encode_int8",
    "encode_powersgd",
    "encode_qsgd",
    "encode_randk",
    "encode_sign",
    "encode_topk",
    "initial_powersgd_start",
    "randk_indices",
    "sparse_count",
]
