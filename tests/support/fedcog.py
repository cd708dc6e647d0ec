"""What FedCOG's rule sees of a run, and short runs with it."""

import torch
from torch import nn

import unskew
from support import protocol
from support.federations import blobs, small_budget, small_model
from unskew.tasks.classification import Classification


def small_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.Tanh(), nn.Linear(16, 3))


def context(rule, spec, counts=(9.0, 3.0, 0.0), previous=None, round=60):
    b = spec.flatten_buffers()
    state = {} if previous is None else {"v": previous, "b": b, "round": torch.tensor(float(round - 1))}
    return protocol.context(
        spec, round=round, state=state, model=lambda u, x, track=True: spec.forward(u, b, x), task=Classification(),
        key=torch.tensor(11), steps=torch.tensor(4.0), weight=torch.tensor(12.0),
        client_info={"counts": torch.tensor(counts, dtype=spec.dtype), "samples": torch.tensor(float(sum(counts)))},
    )  # fmt: skip


def other_vector(spec):
    return unskew.ModelSpec(small_net(1), (2, 6, 6), 3, dtype=torch.float64).flatten()


def train(method, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "participation": 0.7, "engine": "inline"}
    return unskew.run(
        blobs([12, 23, 17, 9]), model=small_model(method), method=method, **{**given, **small_budget(method), **options}
    )
