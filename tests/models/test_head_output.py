"""Comparison of what the head returns with the logits of the model."""

import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, run
from torch import nn

from unskew.errors import ConfigError
from unskew.models.head_output import head_returns_logits
from unskew.models.spec import ModelSpec

AFTER = {
    "nothing": lambda logits, factor: logits,
    "another view": lambda logits, factor: logits.view(-1, CLASSES),
    "log-softmax": lambda logits, factor: logits.log_softmax(1),
    "a temperature": lambda logits, factor: 8 * logits,
    "a trained factor that is 1 at first": lambda logits, factor: factor * logits,
    "a trained summand that is 0 at first": lambda logits, factor: logits + (factor - 1) * torch.arange(CLASSES),
    "a cap": lambda logits, factor: 30 * torch.tanh(logits / 30),
    "another order": lambda logits, factor: logits.flip(1),
}
"""Operations on the output of the head, by name."""


class Continued(nn.Module):
    """Two layers, and something after the head."""

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.body, self.head = nn.Linear(FEATURES, CLASSES + 1), nn.Linear(CLASSES + 1, CLASSES, bias=False)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return AFTER[self.after](self.head(torch.relu(self.body(x))), self.factor)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("after", AFTER)
def test_finds_what_follows_the_head(after, autocast):
    spec = ModelSpec(Continued(after), (FEATURES,), CLASSES, autocast=autocast)
    before, x = spec.flatten(), torch.zeros(2, FEATURES)
    exact = after in ("nothing", "another view")
    assert head_returns_logits(spec, x, up_to_constant=False) is exact
    assert head_returns_logits(spec, x, up_to_constant=True) is (exact or after == "log-softmax")
    assert torch.equal(spec.flatten(), before)


def test_a_module_before_the_last_one_does_not_return_the_logits():
    spec = ModelSpec(Continued("nothing"), (FEATURES,), CLASSES, head="body")
    assert not head_returns_logits(spec, torch.zeros(2, FEATURES), up_to_constant=True)


@pytest.mark.parametrize("method", ["ccvr", "fedala", "fedgen", "fedgh", "fedrod", "knnper"])
def test_methods_that_compute_the_head_alone_reject_what_follows_it(method):
    with pytest.raises(
        ConfigError, match=f"{method} computes or replaces .* the output of its head 'head' before it retu"
    ):
        run(method, model=Continued("a trained factor that is 1 at first"))
    assert run(method, model=Continued("log-softmax"))[0].vector.isfinite().all()


def test_gpfl_needs_a_head_with_an_output_for_each_class():
    with pytest.raises(ConfigError, match=f"gpfl needs a head with {CLASSES} outputs, .* but 'body' has {CLASSES + 1}"):
        run("gpfl", model=Continued("nothing"), head="body")
