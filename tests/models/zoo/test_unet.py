"""The U-Net: sides that are not powers of two, volumes, its head, and other models of pixels."""

import pytest
import torch
from support.masks import UNET, square_federation
from torch import nn

import unskew
from unskew.errors import ConfigError
from unskew.models.registry import build_model
from unskew.models.spec import ModelSpec


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 13, 21), (2, 4, 5), (1, 5, 9, 11), (1, 4, 4, 4)])
@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_logits_have_the_sides_of_the_input(shape, norm):
    model = build_model("unet", shape, 3, norm=norm)
    assert model(torch.randn(2, *shape)).shape == (2, 3, *shape[1:])
    dimensions = {type(layer) for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Conv3d)}
    assert dimensions == {nn.Conv2d if len(shape) == 3 else nn.Conv3d}


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((3,), {}, r"needs images .* but the shape of a sample is \(3,\)"),
        ((1, 3, 8), {}, "A U-Net of 3 levels needs at least 4 pixels per side"),
        ((1, 8, 8), {"widths": []}, "must not be empty"),
        ((1, 8, 8), {"widths": [4, 0]}, "'widths' must be a list of positive integers"),
        ((1, 8, 8), {"norm": "layer"}, "'norm' must be one of"),
    ],
)
def test_shapes_and_options_that_do_not_fit_are_rejected(shape, options, reason):
    with pytest.raises(ConfigError, match=reason):
        build_model("unet", shape, 2, **options)


def test_the_head_is_the_last_1x1_convolution():
    spec = ModelSpec(build_model("unet", (1, 8, 8), 3), (1, 8, 8), 3, per_pixel=True)
    assert spec.head_name == "up.head"
    assert spec.parts["head"] == [slice(spec.size - 3 * 16 - 3, spec.size)]
    assert spec.feature_shape == (16, 8, 8)


def test_a_model_of_pixels_without_a_1x1_convolution_ends_with_its_last_one():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, padding=1))
    assert ModelSpec(model, (1, 8, 8), 2, per_pixel=True).head_name == "2"
    with pytest.raises(ConfigError, match="has no convolution to use as head"):
        ModelSpec(Linear(), (1, 8, 8), 2, per_pixel=True)
    with pytest.raises(ConfigError, match="has no linear layer to use as head"):
        ModelSpec(nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (1, 8, 8), 2)


class Linear(nn.Module):
    """A linear layer of the channels of each pixel."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x):
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


def test_the_unet_of_monai_trains_by_its_import_path():
    pytest.importorskip("monai")
    options = {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "channels": [4, 8], "strides": [2]}
    named = {"model": "monai.networks.nets:UNet", "model_options": options}
    result = unskew.run(square_federation(), **{**UNET, **named}, method="fedrep")
    assert result.history[-1]["loss"] < result.history[0]["loss"]
