"""Runs on a linear classifier whose batches are recorded, so that a plain loop can repeat them step by step."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.simulation.sampler import Sampler

SIZES, CLASSES, FEATURES = (6, 11, 9, 14), 4, 5
HIDDEN, BODY = 3, slice(0, 18)
"""Units and body of the classifier with one hidden layer."""
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
        self.clients, self.final = [], []
        """Batches in the rounds, and in the training after them."""

    def begin(self, ctx):
        (self.final if ctx.final else self.clients).append([])
        return {}

    def gradient(self, grad_fn, ctx, carry):
        mine = (self.final if ctx.final else self.clients)[-1]

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
    return flat(classifier())


def two_layers():
    """A classifier with one hidden layer, whose parameters are the same in every run."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def flat(model):
    """The parameters of a model, ``[d]``."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def features(v, x):
    """The features of ``two_layers`` at parameters that begin with those of its body."""
    w, b = torch.split(v[BODY], [HIDDEN * FEATURES, HIDDEN])
    return torch.tanh(x @ w.view(HIDDEN, FEATURES).T + b)


def deep_loss(v, x, y):
    """The cross-entropy of ``two_layers`` at the parameters ``v [d]``."""
    u, c = torch.split(v[BODY.stop :], [CLASSES * HIDDEN, CLASSES])
    return cross_entropy(features(v, x) @ u.view(CLASSES, HIDDEN).T + c, y)


def average(fed, vectors):
    """The mean of vectors by client, weighted by the clients' samples."""
    size = {k: fed.clients[k].num_samples for k in vectors}
    return sum(size[k] * vectors[k] for k in vectors) / sum(size.values())


def check_client_models(folder, models):
    """Assert that clients keep these models, by client, after a run."""
    states = client_states(folder)
    assert set(states) == set(models)
    for k, v in models.items():
        assert float((states[k]["model"] - v).abs().max()) < 1e-12


def client_states(folder):
    """The tensors that clients keep after the last round of a run, by client and name."""
    file = sorted(Path(folder).glob("checkpoints/*/clients-0000.safetensors"))[-1]
    states = defaultdict(dict)
    for name, tensor in load_file(file).items():
        client, _, rest = name.partition("/")
        states[int(client)][rest] = tensor
    return states


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


def run(method, participation=1.0, fed=None, model=None, recorder=None, outermost=False, **options):
    """The result of a run, and its cohorts: for each round the batches by client.

    The recorder is ``outermost`` for methods that split batches.
    """
    recorder, fed = recorder or Recorder(), fed or skewed()
    budget = {**OPTIONS, **options}
    rules = method if isinstance(method, list) else [method]
    methods = [*rules, recorder] if outermost else [recorder, *rules]
    result = unskew.run(
        fed, model=model or classifier(), method=methods, participation=participation, precision="fp64",
        engine="inline", **budget,
    )  # fmt: skip
    sampler, batches = Sampler(len(fed.clients), participation, 0), iter(recorder.clients)
    cohorts = [{k: next(batches) for k in sampler.draw(t)} for t in range(budget["rounds"])]
    for cohort in cohorts:
        for k, mine in cohort.items():
            assert {int(c) for _, y in mine for c in y} == set(fed.clients[k].y.tolist())
    assert not list(batches)
    return result, cohorts
