"""Survival times, and sums of them over clients, as a task asks for them."""

import numpy as np
import torch

from unskew.sums.base import ClientRows, SumRequest
from unskew.sums.registry import SUMS
from unskew.tasks.survival import Survival


def asked(clients):
    """Return the function that a task calls for sums over clients with targets ``[n, 2]``; it validates each summand."""

    def ask(kind, args, tensors):
        request, total = SumRequest(kind, args, tensors), None
        for y in clients:
            own = SUMS[kind].compute(ClientRows(y=y), request)
            SUMS[kind].check(request, own)
            total = own if total is None else SUMS[kind].add(total, own)
        return total

    return ask


def fitted(y, **options):
    """Return the survival task fitted to two clients that share rows ``y [n, 2]``."""
    return Survival(**options).fit(asked([y[::2], y[1::2]]))


def rows(n=300, seed=0, whole=False):
    """Times and events of which a third is censored, some at time 0, and two inputs; whole times have ties."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, 2))
    died, left = draws.exponential(300 * np.exp(-0.5 * x[:, 0])), draws.uniform(0, 900, n)
    time = np.minimum(died, left)
    time = np.ceil(time) if whole else time
    time[:3] = 0
    return torch.from_numpy(np.stack([time, died <= left], 1)), x


def bin_sums(y, cuts):
    """Events, exposure, and rows at risk less half of those censored inside, in a loop over rows and bins."""
    sums = np.zeros((3, len(cuts)))
    for time, event in y.tolist():
        low = 0.0
        for j, high in enumerate(cuts):
            here = (low < time <= high) or (time == 0 and j == 0)
            sums[0, j] += here and event
            sums[1, j] += min(max(time - low, 0), high - low)
            sums[2, j] += 1.0 if time >= high or (here and event) else 0.5 * here
            low = high
    return sums
