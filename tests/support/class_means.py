"""A network, and what a test of methods with class means needs of it."""

import torch
from torch.nn.functional import cross_entropy

import unskew
from support.batch_loop import CLASSES, FEATURES

WIDTH = 6


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, CLASSES)
    ).double()


def outputs(v, x):
    """Features and logits of ``network`` at the parameters ``v [d]``."""
    body, head = FEATURES * WIDTH, FEATURES * WIDTH + WIDTH
    end = head + WIDTH * CLASSES
    a = torch.tanh(x @ v[:body].view(WIDTH, FEATURES).T + v[body:head])
    return a, a @ v[head:end].view(CLASSES, WIDTH).T + v[end:]


class Watch(unskew.ClientRule):
    """Shows the local models to the test."""

    name, summary, paper = "watch", "for tests", "none"

    def __init__(self):
        self.models = []

    def end(self, ctx, carry, v):
        self.models.append(v.clone())


def class_means(v, client):
    """The mean feature of each class of a client at the parameters ``v [d]``, by class."""
    a = outputs(v, client.x.double())[0]
    return {int(c): a[client.y == c].mean(0) for c in client.y.unique()}


def pulled_slope(known, ld):
    """The gradient of the cross-entropy with the pull of features towards ``known`` means."""

    def slope(v, x, y):
        def objective(v):
            a, z = outputs(v, x)
            pulls = [((a[i] - known[c]) ** 2).mean() for i, c in enumerate(y.tolist()) if c in known]
            return cross_entropy(z, y) + ld * sum(pulls) / len(y)

        return torch.func.grad(objective)(v)

    return slope


def recorded_keys(monkeypatch, rule):
    """Return a list to which ``server_update`` of a class of rules appends its key in each round."""
    keys, update = [], rule.server_update

    def recorded(self, state, updates):
        keys.append(updates.key)
        return update(self, state, updates)

    monkeypatch.setattr(rule, "server_update", recorded)
    return keys
