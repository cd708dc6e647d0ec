"""Small federations and models that show mistakes: unequal clients, skewed classes, BatchNorm, dropout."""

import re

import numpy as np

from unskew import Federation, ServerRule
from unskew.methods.lora_factors import FactorProducts
from unskew.methods.registry import METHODS, rule_class
from unskew.testing import SmallBatchNorm
from unskew.testing import small_federation as blobs

__all__ = ["SmallBatchNorm", "blobs"]  # tests import them from here

SMALL_COHORT = {
    "krum": "krum:share=0",
    "multikrum": "multikrum:share=0",
    "bulyan": "bulyan:share=0",
    "dp": "dp:noise=0.5,adaptive=false,reproducible=true",
    "dpsgd": "dpsgd:noise=0.5,reproducible=true",
    "topk": "topk:share=0.5",
    "randk": "randk:share=0.5",
    "floco": "floco:endpoints=2",
}
"""Methods that need many clients or options, as expressions for a few."""

LORA = ("fedsa", *(name for name in METHODS if issubclass(rule_class(name), FactorProducts)))
"""Methods that need a model with LoRA factors."""

QUICK = {
    **SMALL_COHORT,
    "dense": "dense:epochs=2,g_steps=2,batch=8",
    "fedgen": "fedgen:gen_steps=10",
    "feddm": "feddm:images=2,server_epochs=2,image_lr=0.1",
    "fedssyn": "fedssyn:generator=vae-small,epochs=1",
}
"""Methods whose papers' defaults are too much work for a test of every method, or that need more clients."""


def small_model(method):
    """A model with BatchNorm; one without for methods that do not support it."""
    return "mlp" if re.search(r"\bdp(sgd)?\b", str(method)) else SmallBatchNorm()


def small_budget(method):
    """Options of a run for methods that split batches, which one of a single sample does not allow."""
    return {"drop_last": True} if "perfedavg" in str(method) else {}


class Spy(ServerRule):
    """FedAvg that shows the local models and their weights to the test."""

    name, summary, paper = "spy", "shows", "none"
    needs = ("individual",)

    def __init__(self):
        self.seen = []

    def step(self, state, updates):
        self.seen = [(state["v"] + u.delta, u.weight) for u in updates]
        return {"v": state["v"] + updates.aggregate.delta}


def with_server(n=16, in_domain=True, seed=5):
    """Blobs with ``n`` samples at the server, of the clients' classes or labeled for another task."""
    fed = blobs([9, 14, 11, 8])
    draws = np.random.default_rng(seed)
    x, y = fed.clients[0].x, fed.clients[0].y
    picks = draws.integers(0, len(x), n)
    pairs = [(c.x.numpy(), c.y.numpy()) for c in fed.clients]
    labels = y[picks].numpy() if in_domain else draws.integers(0, 7, n)
    server = (x[picks].numpy(), labels)
    test = (fed.test[0].numpy(), fed.test[1].numpy())
    return Federation.from_arrays(pairs, test, server, server_in_domain=in_domain, classes=3, holdout=0)
