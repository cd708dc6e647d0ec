"""Every method trains a segmentation, or states why it does not."""

import numpy as np
import pytest
import torch
from support.federations import LORA, QUICK
from support.masks import SIDE, UNET, square_federation
from support.slow import slow_but

import unskew
from unskew.errors import ConfigError
from unskew.methods.own_models import OwnModels
from unskew.methods.registry import METHODS, rule_class
from unskew.testing import assert_engines_agree

ONE_CLASS, VECTOR = "it needs one class per sample", "it needs one feature vector per sample"
REASONS = {
    "feddf": "its teacher is a mean of probabilities, with one prediction per sample",
    "fedcog": "it learns inputs for given labels",
    "fedcog-authors": "it learns inputs for given labels",
    "moon": VECTOR,
    "feddisco": "its weights compare the shares of classes",
    "fedproto": ONE_CLASS,
    "fedala": "it computes the head alone",
    "fedrod": ONE_CLASS,
    "heterofl": VECTOR,
    "fedrolex": VECTOR,
    "knnper": "it mixes probabilities of classes",
    "fedreg": "it labels pseudo data with a softmax, which assumes one class per sample",
    "feddecorr": VECTOR,
    "fedntd": ONE_CLASS,
    "fedlc": ONE_CLASS,
    "fedrs": ONE_CLASS,
    "ccvr": ONE_CLASS,
    "fedssyn": "each image that it generates has one class",
    "vhl": "it aligns the features of each sample with virtual samples of its class",
    "fedgen": "each feature that it generates has one class",
    "dense": "each image that it generates has one class",
    "feddm": "each of its images has one class",
    **dict.fromkeys(("fedtgp", "fedgh", "feduv", "fedetf", "fedpac", "fedsol"), ONE_CLASS),
    "fedas": "it aligns the mean features of classes",
    "feddbe": VECTOR,
    "floco": VECTOR,
    "gpfl": "it has an embedding for each class",
}
"""Methods that do not support segmentation, with the reason."""
MODELS = {
    "fedpvr": "corrects linear layers, but the model has no trained ones",
    **dict.fromkeys(LORA, "needs a model with LoRA factors"),
}
"""Methods that the U-Net does not support."""


@pytest.mark.parametrize("method", REASONS)
def test_a_method_that_needs_more_of_a_sample_is_rejected(method):
    reason = rf"does not support the task 'segmentation', because {REASONS[method]}"
    with pytest.raises(ConfigError, match=reason):
        unskew.run(square_federation(server=8), **UNET, method=QUICK.get(method, method))


@pytest.mark.parametrize("method", MODELS)
def test_a_method_for_other_models_is_rejected(method):
    with pytest.raises(ConfigError, match=f"{method} {MODELS[method]}"):
        unskew.run(square_federation(), **UNET, method=method)


OTHERS = [name for name in METHODS if name not in REASONS | MODELS]
QUICKEST = ["fedavg", "scaffold", "fedbn", "fedsam", "dpsgd", "fltrust", "ditto"]


@pytest.mark.parametrize("method", slow_but(QUICKEST, OTHERS))
def test_every_other_method_trains(method):
    model = {"model_options": {"widths": [4, 6], "norm": "batch"}} if method == "fedbn" else {}
    result = unskew.run(square_federation(server=8), **{**UNET, **model}, method=QUICK.get(method, method))
    assert torch.isfinite(result.vector).all()
    first, last = (result.history[row]["loss"] for row in (0, -1))
    # The buffers of fedbuff and ca2fl are not full after so few rounds; with own models, there is no global one.
    assert last < first or method in ("fedbuff", "ca2fl") or issubclass(rule_class(method), OwnModels)
    assert 0 <= result.summary["dice"] <= 1


@pytest.mark.parametrize("engine", ["vectorized", "processes"])
def test_engines_agree(engine):
    options = {**UNET, "precision": "fp64", "augment": True, "method": "scaffold"}
    one, other = (unskew.run(square_federation(), **{**options, "engine": name}) for name in ("inline", engine))
    assert_engines_agree(other.vector, one.vector)
    assert other.summary["dice"] == pytest.approx(one.summary["dice"], abs=1e-9)


def test_clients_trained_as_one_network_give_the_same_vector():
    options = {**UNET, "precision": "fp64", "augment": True}
    one, other = (unskew.run(square_federation((8, 8, 8)), **options, clients_per_group=size) for size in (1, 3))
    assert_engines_agree(other.vector, one.vector)


@pytest.mark.parametrize("method", ["fedrep", "fedbabu"])
def test_the_decoder_can_be_personal(method):
    result = unskew.run(square_federation(), **UNET, method=method, head="up")
    spec = unskew.ModelSpec(result.model, (1, SIDE, SIDE), 3, "up", per_pixel=True)
    decoder = sum(value.numel() for name, value in result.model.named_parameters() if name.startswith("up."))
    assert sum(part.stop - part.start for part in spec.parts["head"]) == decoder
    encoder = sum(value.numel() for value in result.model.parameters()) - decoder
    assert result.history[-1]["bytes_up"] == 2 * 4 * 4 * encoder  # rounds, clients, bytes of a number


def test_volumes_train():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 1, 4, 8, 8)).astype(np.float32), rng.integers(0, 2, (6, 4, 8, 8))
    fed = unskew.Federation.from_arrays([(x, y)] * 2, test=(x, y), task="segmentation", holdout=0.3)
    result = unskew.run(fed, **UNET)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert set(result.summary) >= {"dice", "dice/1", "iou/1", "dice_pooled", "accuracy"}
    with pytest.raises(
        ConfigError, match=r"augment crops and flips images, but the inputs have the shape \(1, 4, 8, 8\)"
    ):
        unskew.run(fed, **UNET, augment=True)
