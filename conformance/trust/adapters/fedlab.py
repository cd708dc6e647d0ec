"""Adapter of FedLab: its compressors, with given random numbers."""

from __future__ import annotations

from importlib.metadata import version as version_of
from unittest import mock

import numpy as np
import torch
from fedlab.contrib.compressor import QSGDCompressor, TopkCompressor

from conformance.trust import inputs
from unskew.methods.compression.packing import long_uniform

ALONE = ("fedlab==1.3.0",)


def _quantized(vector: np.ndarray, uniform: torch.Tensor) -> list[float]:
    compressor = QSGDCompressor(n_bit=inputs.LEVELS.bit_length() - 1)
    with mock.patch("torch.rand", return_value=uniform):
        return compressor.decompress(compressor.compress(torch.from_numpy(vector))).tolist()


def _with_norm(vector: np.ndarray, uniform: torch.Tensor) -> list[float]:
    """Return the decoded vector if one more entry, equal to the norm, is the largest one."""
    longer = np.append(vector, np.linalg.norm(vector))
    return _quantized(longer, torch.cat([uniform, torch.zeros(1)]))[:-1]


def _sparse(share: float, vector: np.ndarray) -> list[float]:
    compressor = TopkCompressor(share)
    return compressor.decompress(*compressor.compress(torch.from_numpy(vector)), (len(vector),)).tolist()


def run() -> dict[str, list]:
    """Return the decoded vectors."""
    drawn = [
        (vector, long_uniform(torch.tensor(number), len(vector))) for number, vector in enumerate(inputs.vectors())
    ]
    sparse = [_sparse(share, v) for (share, _), v in zip(inputs.SHARES, inputs.sparse_vectors(), strict=True)]
    return {
        "qsgd": [_quantized(vector, uniform) for vector, uniform in drawn],
        "qsgd, norm": [_with_norm(vector, uniform) for vector, uniform in drawn],
        "topk": sparse[:3],
        "topk, rounding": sparse[3:],
    }


def version() -> str:
    """Return the version of the library."""
    return version_of("fedlab")
