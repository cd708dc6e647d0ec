"""The checks for authors of plugins pass for what works, and name what does not."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import unskew
from unskew.engines.local_trainer import LocalTrainer
from unskew.engines.registry import make_engine
from unskew.testing import SmallBatchNorm, check_data, check_engine, check_model, check_rule, small_federation


@dataclass(frozen=True)
class Pull(unskew.ClientRule):
    name, summary, paper = "pull", "a proximal term", "none"
    mu: float = 0.1

    def gradient(self, grad_fn, ctx, carry):
        return lambda v, batch: grad_fn(v, batch) + self.mu * (v - ctx.v_global)


class Noisy(Pull):
    def gradient(self, grad_fn, ctx, carry):
        return lambda v, batch: grad_fn(v, batch) + 0.1 * torch.rand(())


class Forgetful(Pull):
    """Keeps a value outside of the client's state, so that a resumed run has lost it."""

    def __init__(self):
        object.__setattr__(self, "trainings", [0])

    def begin(self, ctx):
        self.trainings[0] += 1
        return {"scale": torch.tensor(float(self.trainings[0]), dtype=ctx.v_global.dtype)}

    def gradient(self, grad_fn, ctx, carry):
        return lambda v, batch: grad_fn(v, batch) * carry["scale"]


def test_a_rule_of_pure_functions_passes():
    result = check_rule(Pull(), rounds=2)
    assert result.summary["rounds"] == 2


@pytest.mark.filterwarnings("ignore:The engine vectorized trains clients one at a time")
@pytest.mark.parametrize("rule", [Noisy(), Forgetful()], ids=["global random state", "state outside of the client"])
def test_a_rule_with_hidden_state_is_rejected(rule):
    with pytest.raises(AssertionError, match="two runs with the same seed differ"):
        check_rule(rule, rounds=2)


class Wrong:
    """Engine that halves all updates."""

    name = "wrong"

    def __init__(self, setup):
        self.trainer = LocalTrainer(setup)

    def train(self, broadcasts):
        for broadcast in broadcasts:
            update = self.trainer.train(broadcast)
            update.delta.mul_(0.5)
            yield update

    def close(self):
        pass


def test_engines_are_compared_with_inline(monkeypatch):
    check_engine("vectorized", ["scaffold"])
    monkeypatch.setattr(
        "unskew.runs.simulated_clients.make_engine",
        lambda name, setup, *rest: Wrong(setup) if name == "vectorized" else make_engine(name, setup, *rest),
    )
    with pytest.raises(AssertionError, match="the vectors differ by"):
        check_engine("vectorized", ["fedavg"])


def test_sources_are_loaded_twice_and_trained_on():
    check_data("iris")
    check_data("fcube", partition="natural:client", clients=4)


def test_a_source_that_differs_between_two_loads_is_rejected(monkeypatch):
    seeds = iter((0, 1))
    monkeypatch.setattr("unskew.testing.checks.load_federation", lambda *args, **_: small_federation(seed=next(seeds)))
    with pytest.raises(AssertionError, match="loading twice gives other inputs"):
        check_data("random")


class Counting(nn.Module):
    """Model whose outputs also depend on the number of forward passes, which is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.passes = nn.Linear(72, 3), 0

    def forward(self, x):
        self.passes += 1
        return self.linear(x.flatten(1)) + self.passes


def test_models_are_functions_of_their_parameters():
    check_model(SmallBatchNorm())
    check_model("mlp", model_options={"hidden": [4]})
    with (
        pytest.raises(AssertionError, match="not a function of its parameters"),
        pytest.warns(UserWarning, match="gives other numbers"),
    ):
        check_model(Counting())


def test_the_small_federation_has_unequal_clients_with_skewed_classes():
    fed = small_federation((4, 9), classes=3)
    assert [len(client.y) for client in fed.clients] == [4, 9]
    assert set(fed.clients[0].y.tolist()) <= {0, 1}
    assert small_federation(server=False).server is None
