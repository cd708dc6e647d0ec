"""Runs on a linear classifier whose batches are recorded, so that a plain loop can repeat them step by step."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.simulation.sampler import Sampler

SIZES, CLASSES, FEATURES = (6, 11, 9, 14), 4, 5
LR, MOMENTUM, DECAY = 0.2, 0.5, 0.03
OPTIONS = {"rounds": 4, "lr": LR, "local_epochs": 2, "batch_size": 4, "momentum": MOMENTUM, "weight_decay": DECAY}
"""Budget of the runs: clients take 4, 6, 6 and 8 local steps per round."""


def skewed(sizes=SIZES, present=2):
    """A federation in which client ``k`` has the ``present`` classes from ``k`` on."""
    draws = np.random.default_rng(3)
    clients = []
    for k, n in enumerate(sizes):
        y = (k + draws.integers(0, present, n)) % CLASSES
        y[:present] = (k + np.arange(present)) % CLASSES
        clients.append((draws.normal(size=(n, FEATURES)) + 0.5 * y[:, None], y))
    return unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0)


class Recorder(unskew.ClientRule):
    """Records the batches of each client in the order of training."""

    name, summary, paper = "recorder", "records batches", "none"

    def __init__(self):
        self.clients = []

    def begin(self, ctx):
        if not ctx.final:
            self.clients.append([])
        return {}

    def gradient(self, grad_fn, ctx, carry):
        mine = [] if ctx.final else self.clients[-1]

        def recorded(v, batch):
            if batch.track:
                mine.append((batch.x, batch.y))
            return grad_fn(v, batch)

        return recorded


def classifier():
    """A linear classifier with the same parameters in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


def initial():
    """The parameters of ``classifier``, ``[d]``."""
    return torch.cat([p.detach().double().flatten() for p in classifier().parameters()])


def logits(v, x):
    """The classifier's logits at the parameters ``v [d]``; without a bias if ``v`` has none."""
    weights = CLASSES * FEATURES
    z = x @ v[:weights].view(CLASSES, FEATURES).T
    return z + v[weights:] if len(v) > weights else z


def loss(v, x, y):
    return cross_entropy(logits(v, x), y)


def local(v, batches, direction, lr=LR, momentum=MOMENTUM, decay=DECAY):
    """Local SGD along ``direction(v, x, y)`` with momentum and weight decay."""
    buffer = torch.zeros_like(v)
    for x, y in batches:
        buffer = momentum * buffer + direction(v, x, y) + decay * v
        v = v - lr * buffer
    return v


def run(method, participation=1.0, fed=None, model=None, **options):
    """The result of a run, and its cohorts: for each round the batches by client."""
    recorder, fed = Recorder(), fed or skewed()
    budget = {**OPTIONS, **options}
    rules = [recorder, *(method if isinstance(method, list) else [method])]
    result = unskew.run(
        fed, model=model or classifier(), method=rules, participation=participation, precision="fp64",
        engine="inline", **budget,
    )  # fmt: skip
    sampler, batches = Sampler(len(fed.clients), participation, 0), iter(recorder.clients)
    cohorts = [{k: next(batches) for k in sampler.draw(t)} for t in range(budget["rounds"])]
    for cohort in cohorts:
        for k, mine in cohort.items():
            assert {int(c) for _, y in mine for c in y} == set(fed.clients[k].y.tolist())
    assert not list(batches)
    return result, cohorts
