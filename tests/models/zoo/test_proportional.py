"""Proportional hazards: one effect for all outputs, and an intercept for each."""

import pytest
import torch

from unskew.errors import ConfigError
from unskew.models.registry import build_model, resolve_model
from unskew.models.spec import ModelSpec


def test_inputs_shift_all_outputs_equally():
    model = build_model("proportional", (3,), 4)
    assert not model(torch.randn(5, 3)).any()  # training starts at the marginal hazards
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
        model.head.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    x = torch.randn(5, 3)
    assert torch.allclose(model(x), (x @ torch.tensor([1.0, -2.0, 0.5]))[:, None] + torch.arange(4.0))
    assert sum(p.numel() for p in model.parameters()) == 3 + 4


def test_hidden_layers_precede_the_effect():
    model = build_model("proportional", (3,), 4, hidden=[8])
    assert model.head.weight.shape == (1, 8)
    assert ModelSpec(model, (3,), 4).head_name == "head"
    with pytest.raises(ConfigError, match="'hidden' must be a list"):
        build_model("proportional", (3,), 4, hidden=[0])


def test_each_category_has_a_weight():
    model = resolve_model("proportional", (2,), 3, categories=(0, 4))
    assert model.head.weight.shape == (1, 1 + 4)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]))
    codes = torch.tensor([[9.0, 0.0], [9.0, 2.0], [9.0, 3.0]])
    assert model(codes)[:, 0].tolist() == [1.0, 3.0, 4.0]
