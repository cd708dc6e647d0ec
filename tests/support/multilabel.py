"""Images with several labels each."""

import numpy as np

import unskew


def sample(n, draws, shares=(0.6, 0.3, 0.1)):
    """Images of which each label brightens another part."""
    y = (draws.random((n, 3)) < shares).astype(np.uint8)
    x = draws.normal(size=(n, 2, 6, 6))
    x[:, 0, :3] += y[:, 0, None, None]
    x[:, 1, :3] += y[:, 1, None, None]
    x[:, 1, 3:] += y[:, 2, None, None]
    return x.astype(np.float32), y


def federation(sizes=(5, 23, 8, 17, 31, 12), holdout=0.0, seed=0):
    draws = np.random.default_rng(seed)
    clients = [sample(n, draws, np.roll((0.7, 0.3, 0.1), k)) for k, n in enumerate(sizes)]
    test, server = sample(60, draws), sample(11, draws)
    return unskew.Federation.from_arrays(clients, test=test, server=server, task="multilabel", holdout=holdout)
