"""Generated data of the literature whose clients are part of the data: Synthetic(alpha, beta) and FCUBE."""

from __future__ import annotations

import numpy as np
import torch

from unskew.data.readers.tables import SampleTable, Source
from unskew.errors import ConfigError

CLIENTS, FEATURES, CLASSES = 30, 60, 10


def parse_synthetic(name: str) -> tuple[float, float]:
    """Parse ``synthetic:ALPHA,BETA``.

    Args:
        name: Name of the data source.

    Raises:
        ConfigError: If it does not end with two numbers of at least 0.
    """
    try:
        alpha, beta = (float(text) for text in name.partition(":")[2].split(","))
    except ValueError:
        alpha = beta = -1.0
    if not (0 <= alpha < 1e6 and 0 <= beta < 1e6):
        raise ConfigError(
            f"{name!r}: write synthetic:ALPHA,BETA with two numbers of at least 0, such as synthetic:1,1."
        )
    return alpha, beta


def synthetic(alpha: float, beta: float) -> Source:
    """Generate Synthetic(alpha, beta) of Li et al. 2018, arXiv:1812.06127, for 30 clients with a fixed seed.

    Client ``k`` draws ``u_k ~ N(0, alpha)`` and ``B_k ~ N(0, beta)``, its model ``W_k ~ N(u_k, 1)``, ``b_k ~ N(u_k, 1)``
    and its center ``v_k ~ N(B_k, 1)``. Its inputs are ``x ~ N(v_k, diag(j^-1.2))`` and its labels ``argmax(W_k x + b_k)``.
    Sizes are ``50 + LogNormal(4, 2)``. ``alpha`` and ``beta`` are standard deviations. A tenth of each client's samples
    is the test part.

    Args:
        alpha: Difference between the clients' models.
        beta: Difference between the clients' inputs.
    """
    rng = np.random.default_rng(0)
    sizes = 50 + rng.lognormal(4, 2, CLIENTS).astype(np.int64)
    deviations = np.arange(1, FEATURES + 1) ** -0.6
    inputs = []
    labels = []
    for size in sizes:
        u, center = rng.normal(0, alpha), rng.normal(0, beta)
        weights, bias = rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)
        x = rng.normal(rng.normal(center, 1, FEATURES), deviations, (size, FEATURES))
        inputs.append(x)
        labels.append((x @ weights + bias).argmax(1))
    position = np.concatenate([np.arange(size) / size for size in sizes])
    clients = np.repeat(np.arange(CLIENTS), sizes)
    is_test = position >= 0.9
    name = f"synthetic:{alpha:g},{beta:g}"
    return _source(name, np.concatenate(inputs), np.concatenate(labels), clients, is_test, CLASSES)


def fcube() -> Source:
    """Generate FCUBE of Li et al. 2022, arXiv:2102.02079: 4,000 training and 1,000 test points in a cube, 4 clients.

    Points are uniform in ``[-1, 1]^3``; the class is 1 if ``x1 > 0``. Each client has two octants that are symmetric to
    the origin, so that inputs differ between clients, but both classes are equally likely at each client.
    """
    x = np.random.default_rng(0).uniform(-1, 1, (5_000, 3))
    positive = x > 0
    clients = 2 * (positive[:, 0] ^ positive[:, 1]) + (positive[:, 0] ^ positive[:, 2])
    return _source("fcube", x, positive[:, 0].astype(np.int64), clients, np.arange(len(x)) >= 4_000, 2)


def _source(name: str, x: np.ndarray, y: np.ndarray, clients: np.ndarray, is_test: np.ndarray, classes: int) -> Source:
    parts = []
    for rows in (~is_test, is_test):
        inputs, labels = torch.from_numpy(x[rows].astype(np.float32)), torch.from_numpy(y[rows])
        parts.append(SampleTable(inputs, labels, {"client": clients[rows]}))
    return Source(name, parts[0], parts[1], tuple(str(c) for c in range(classes)), classes)
