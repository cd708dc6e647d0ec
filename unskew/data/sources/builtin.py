"""Data sets that need no file: scikit-learn's digits, and draws from Gaussian classes."""

from __future__ import annotations

import numpy as np
import torch

from unskew.data.checks import as_inputs
from unskew.data.reading.tables import Source, Table


def digits() -> Source:
    """Scikit-learn's digits as uint8 images, with a stratified test part of 20 %."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images, labels = (data.images * 15).astype(np.uint8), data.target.astype(np.int64)
    parts = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, test = (Table(as_inputs(images[rows], "digits"), torch.from_numpy(labels[rows]), {}) for rows in parts)
    return Source("digits", train, test, tuple(str(c) for c in range(10)), 10)


def gaussians() -> Source:
    """Ten classes with identity covariance and means ``c (1, ..., 1)`` for ``c = -5 ... 4``, in 10 dimensions.

    The synthetic data of Gholami and Seferoglu 2024, arXiv:2404.11754; always the same draw.
    """
    draws = np.random.default_rng(0)

    def sample(n: int) -> Table:
        labels = draws.integers(0, 10, n)
        values = draws.normal(size=(n, 10)) + (labels - 5)[:, None]
        return Table(torch.from_numpy(values.astype(np.float32)), torch.from_numpy(labels), {})

    return Source("gaussians", sample(20_000), sample(50_000), tuple(str(c) for c in range(-5, 5)), 10)
