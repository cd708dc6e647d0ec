"""Methods that replace the head of the model."""

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, run, two_layers
from torch import nn

from unskew.errors import ConfigError
from unskew.methods.fedrod import FedRoD
from unskew.methods.registry import method

METHODS = ("feddbe", "fedetf", "fedrod", "floco:endpoints=2", "gpfl", "knnper")


@pytest.mark.parametrize("expression", METHODS)
def test_other_heads_than_linear_ones_are_rejected(expression):
    (rule,) = method(expression).client
    with pytest.raises(ConfigError, match=f"{rule.name} needs a model with a linear head, but its head is a Conv2d"):
        rule.adapt(nn.Sequential(nn.Conv2d(1, 2, 1)), "0")


def test_a_model_that_is_only_a_head_gets_a_new_one():
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    adapted, name = FedRoD().adapt(model, "")
    x = torch.randn(4, FEATURES)
    assert torch.equal(adapted(x), model(x))
    assert torch.equal(adapted.get_submodule(name).generic(x), model(x))


@pytest.mark.parametrize("expression", METHODS)
def test_a_proximal_term_and_server_momentum_change_the_run(expression):
    plain, other = (run(e, model=two_layers())[0] for e in (expression, f"{expression}+fedprox:mu=0.1+fedavgm"))
    assert bool(other.vector.isfinite().all())
    assert not torch.equal(plain.vector, other.vector)
