"""Random numbers of a model's forward pass depend on the seed, the round and the client, on every engine."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.running import Stop, StopAfter, assert_same_run
from torch import nn

import unskew
from unskew.errors import ConfigError
from unskew.seeding import derive

RULES = {"rounds": 3, "local_steps": 3, "batch_size": 8, "lr": 0.1, "seed": 3}


class Drawing(nn.Module):
    """A hidden layer, through which ``draw`` adds randomness in training, or always."""

    def __init__(self, draw, always=False):
        super().__init__()
        self.first, self.head, self.draw, self.always = nn.Linear(6, 8), nn.Linear(8, 2), draw, always

    def forward(self, x):
        hidden = self.first(x)
        return self.head(self.draw(hidden) if self.training or self.always else hidden)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.inner(x[:, None])[:, 0])


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


def some_of_the_time(hidden, number):
    return hidden.relu() if number < 0.5 else hidden


MODELS = {
    "functional dropout, also in evaluation": lambda: Drawing(F.dropout, always=True),
    "torch.rand": lambda: Drawing(lambda h: h + torch.rand(8)),
    "gumbel softmax": lambda: Drawing(F.gumbel_softmax),
    "stochastic depth": lambda: Drawing(lambda h: some_of_the_time(h, torch.rand(1).item())),
    "stochastic depth of Python": lambda: Drawing(lambda h: some_of_the_time(h, random.random())),
    "NumPy": lambda: Drawing(lambda h: h * float(np.random.rand())),  # noqa: NPY002
    "alpha dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 2)),
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 2)),
    "channels": lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Dropout2d(), nn.Flatten(), nn.Linear(6, 2)),
    "attention": Attention,
}


def federation(clients=3):
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(20 * clients + 20, 6)).astype("float32"), draws.integers(0, 2, 20 * clients + 20)
    parts = [(x[k : k + 20], y[k : k + 20]) for k in range(0, 20 * clients, 20)]
    return unskew.Federation.from_arrays(parts, test=(x[-20:], y[-20:]), classes=2)


def train(model, **options):
    torch.manual_seed(0)
    return unskew.run(federation(), model=model(), **{**RULES, **options})


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_numbers_of_a_model_depend_on_the_seed_and_not_on_the_engine(model):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    result = unskew.run(federation(), model=model, engine="inline", **RULES)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    for engine in ({"engine": "inline", "clients_per_group": 3}, {"engine": "processes"}, {"engine": "vectorized"}):
        again = unskew.run(federation(), model=model, **engine, **RULES)
        assert torch.equal(again.vector, result.vector)
        assert [row["loss"] for row in again.history] == [row["loss"] for row in result.history]
    other = unskew.run(federation(), model=model, engine="inline", **{**RULES, "seed": 4})
    assert not torch.equal(other.vector, result.vector)


def test_a_resumed_run_of_a_model_that_draws_equals_an_uninterrupted_one(tmp_path):
    model = MODELS["functional dropout, also in evaluation"]
    train(model, engine="inline", method="fedavg+ft", out=tmp_path / "whole", checkpoint_every=1)
    with pytest.raises(Stop):
        train(
            model,
            engine="inline",
            method="fedavg+ft",
            out=tmp_path / "run",
            checkpoint_every=1,
            callbacks=[StopAfter(2)],
        )
    torch.manual_seed(0)
    module = model()
    torch.rand(5)  # the state of the generator differs from that of the uninterrupted run
    unskew.resume(tmp_path / "run", federation=federation(), model=module)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_masks_of_a_client_are_those_of_its_seed():
    """Repeats one step of one client by hand."""
    torch.manual_seed(0)
    module = Drawing(F.dropout)
    fed = federation(1)
    options = {"rounds": 1, "local_steps": 1, "batch_size": 20, "lr": 0.1, "seed": 3, "engine": "inline"}
    result = unskew.run(fed, model=module, **options)
    client = fed.clients[0]
    order = torch.randperm(client.num_samples, generator=torch.Generator().manual_seed(derive(3, "batches", 0, 0)))
    torch.manual_seed(derive(3, "model draws", 0, 0))
    x = client.x[order]
    if fed.normalization is not None:
        x = (x - torch.tensor(fed.normalization.mean)) / torch.tensor(fed.normalization.std)
    F.cross_entropy(module.train()(x.float()), client.y[order]).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(result.vector, expected, rtol=1e-5, atol=1e-6)


def test_warns_of_a_layer_with_a_generator_of_its_own():
    model = nn.Sequential(nn.Linear(6, 8), OwnGenerator(), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match=r"from the layer 1 \(OwnGenerator\) on, differ between two passes"):
        unskew.run(federation(), model=model, engine="inline", **RULES)


@pytest.mark.parametrize("model", [nn.Linear(6, 2), nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))])
def test_a_model_without_global_draws_leaves_the_generators_alone(model):
    spec = unskew.ModelSpec(model, (6,), 2, head="" if isinstance(model, nn.Linear) else "0")
    spec.inspect_training(torch.ones(2, 6))
    assert (spec.draws_globally, spec.unseeded_layer, spec.counts) == (False, None, False)


def test_dpsgd_rejects_draws_that_are_not_secret():
    with pytest.raises(ConfigError, match=r"nn.Dropout"):
        train(MODELS["rrelu"], method="dpsgd:noise=1,clip=1")
