"""Pretrained models of images: a folder as from the hub, LoRA, sizes and scales, engines. All are tiny and random."""

import json
import shutil

import numpy as np
import pytest
import torch
from support.slow import slow_but
from support.tiny import OPT, RESNET, VIT
from support.tolerance import FEW, MAGNIFIED, assert_close, near
from torch.nn import functional as F

import unskew
from unskew.errors import ConfigError
from unskew.models.layer_groups import layer_groups
from unskew.models.registry import build_model
from unskew.models.spec import ModelSpec
from unskew.models.zoo.hf_wrappers import CausalLM, token_ids
from unskew.models.zoo.huggingface import HALVES, IMAGENET, RESNET18, hugging_face
from unskew.runs.build_model import match_model_input_range
from unskew.runs.run import resume

pytestmark = pytest.mark.xdist_group("heavy")

KINDS = ("resnet-18", "vit-b16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Both architectures with five classes of their own, saved as transformers saves them."""
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

    torch.manual_seed(3)
    folders = {
        "resnet-18": ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=5)),
        "vit-b16": ViTForImageClassification(ViTConfig(**VIT, num_labels=5)),
    }
    for name, model in folders.items():
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        folders[name] = folder
    scale = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"shortest_edge": 16}}
    (folders["resnet-18"] / "preprocessor_config.json").write_text(json.dumps(scale))
    return folders


def federation(channels=3, sizes=(9, 14, 6), side=8):
    draws = np.random.default_rng(0)

    def sample(n):
        y = draws.integers(0, 3, n)
        x = draws.integers(0, 120, (n, side, side, channels)) + 60 * y[:, None, None, None]
        return x.astype(np.uint8), y

    return unskew.Federation.from_arrays([sample(n) for n in sizes], test=sample(20), classes=3, holdout=0.0)


def options(kind, folders, **changes):
    sized = {"size": 16} if kind == "resnet-18" else {}
    model_options = {"weights": str(folders[kind]), **sized, **changes.pop("model_options", {})}
    shared = {"rounds": 2, "local_steps": 2, "batch_size": 5, "lr": 0.05, "precision": "fp64", "workers": 2}
    return {"model": kind, "model_options": model_options, **shared, "engine": "inline", **changes}


CASES = [(kind, channels) for kind in KINDS for channels in (1, 3)]


@pytest.mark.parametrize(("kind", "channels"), slow_but([("resnet-18", 1)], CASES))
def test_engines_agree_and_the_model_trains(kind, channels, folders):
    fed = federation(channels)
    results = [
        unskew.run(fed, method="fedals:alpha=2+scaffold", **options(kind, folders, engine=e))
        for e in ("inline", "processes", "vectorized")
    ]
    for other in results[1:]:
        assert_close(other.vector, results[0].vector, MAGNIFIED)
        assert other.summary["bytes_up"] == results[0].summary["bytes_up"]
    assert results[0].history[-1]["train_loss"] < results[0].history[0]["train_loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_resized_repeated_and_normalized_as_the_checkpoint_wants(kind, folders):
    mean, std = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)) if kind == "resnet-18" else HALVES
    mean, std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
    for channels in (1, 3):
        fed = federation(channels)
        result = unskew.run(fed, **options(kind, folders, rounds=1, precision="fp32", local_steps=1))
        pixels = fed.test[0].float() / 255
        large = F.interpolate(pixels, (16, 16), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
        with torch.no_grad():
            logits = result.model(pixels)
            torch.testing.assert_close(logits, result.model.net(pixel_values=(large - mean) / std).logits)
        hits = (logits.argmax(-1) == fed.test[1]).double().mean()
        assert result.summary["accuracy"] == pytest.approx(float(hits))
        assert result.summary["loss"] == near(float(F.cross_entropy(logits, fed.test[1])), FEW, dtype=torch.float32)


def test_images_are_given_as_intensities_whatever_normalized_them_before(folders):
    spec = ModelSpec(build_model("resnet-18", (1, 8, 8), 3, weights=str(folders["resnet-18"]), size=16), (1, 8, 8), 3)
    wanted = match_model_input_range(federation(1), spec).normalization
    assert (wanted.mean, wanted.std, wanted.scale) == ((0.0,), (1.0,), 1 / 255)
    plain = federation(1)
    assert match_model_input_range(plain, ModelSpec(build_model("cnn", (1, 8, 8), 3), (1, 8, 8), 3)) is plain


def test_the_vector_of_vit_is_its_lora_factors_and_the_classifier(folders):
    module = build_model("vit-b16", (3, 8, 8), 3, weights=str(folders["vit-b16"]))
    spec = ModelSpec(module, (3, 8, 8), 3)
    per_block = 4 * 2 * 4 * 16  # four projections, two factors of rank 4
    assert spec.size == 2 * per_block + 3 * 17
    assert {name.split(".")[5] for name in spec.names if "lora" in name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert [g.name for g in layer_groups(spec)] == ["net.vit.layers.0", "net.vit.layers.1", "net.classifier"]
    layer = module.net.vit.layers[0].attention.q_proj
    assert layer.scaling["default"] == 2.0
    whole = ModelSpec(build_model("vit-b16", (3, 8, 8), 3, weights=str(folders["vit-b16"]), lora=None), (3, 8, 8), 3)
    assert whole.size == sum(p.numel() for p in whole.module.parameters())
    groups = layer_groups(whole)
    assert (groups[0].name, groups[0].leading) == ("embeddings", True)
    assert groups[0].size == 16 + 5 * 16 + 3 * 64 * 16 + 16  # class token, positions, patches
    assert groups[2].layers[-1] == "net.vit.layernorm"


def test_resnet_keeps_the_layers_of_fedals(folders):
    spec = ModelSpec(build_model("resnet-18", (3, 8, 8), 3, weights=str(folders["resnet-18"]), size=16), (3, 8, 8), 3)
    assert len(layer_groups(spec)) == 1 + 2 * 3 + 1
    assert spec.head_name == "net.classifier.1"
    assert list(layer_groups(spec)[-1].slices) == spec.parts["head"]
    assert any("shortcut" in layer for group in layer_groups(spec) for layer in group.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_the_body_is_that_of_the_folder_and_a_trained_model_saves_and_loads_exactly(kind, folders, tmp_path):
    from safetensors.torch import load_file

    sized = {"size": 16} if kind == "resnet-18" else {"lora": None}
    module = build_model(kind, (3, 8, 8), 3, weights=str(folders[kind]), **sized)
    saved = load_file(folders[kind] / "model.safetensors")
    from transformers import AutoModelForImageClassification

    plain = AutoModelForImageClassification.from_pretrained(folders[kind]).state_dict()
    assert len(saved) == len(plain)
    for name, tensor in module.net.state_dict().items():
        if not name.startswith("classifier"):
            assert torch.equal(tensor, plain[name]), name
    assert module.net.config.num_labels == 3
    result = unskew.run(federation(), **options(kind, folders, precision="fp32", model_options=sized))
    folder = result.model.save(tmp_path / "saved")
    again = build_model(kind, (3, 8, 8), 3, weights=str(folder), **sized).eval()
    pixels = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(again(pixels), result.model(pixels))
    assert again.preprocessing == result.model.preprocessing


def test_lora_of_images_is_added_to_the_weights_when_saved(folders, tmp_path):
    result = unskew.run(federation(), **options("vit-b16", folders, precision="fp32", lr=0.5))
    again = build_model("vit-b16", (3, 8, 8), 3, weights=str(result.model.save(tmp_path / "saved")), lora=None).eval()
    pixels = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        assert_close(again(pixels), result.model(pixels), FEW)
        untouched = build_model("vit-b16", (3, 8, 8), 3, weights=str(folders["vit-b16"]), lora=None).eval()
        assert not torch.allclose(
            untouched.net.vit(pixels.expand(4, 3, 8, 8).repeat(1, 1, 2, 2))[0],
            again.net.vit(pixels.repeat(1, 1, 2, 2))[0],
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(kind, folders, tmp_path):
    whole = unskew.run(federation(), **options(kind, folders, rounds=3), out=tmp_path / "whole")
    unskew.run(federation(), **options(kind, folders, rounds=1), out=tmp_path / "parts")
    parts = resume(tmp_path / "parts", federation=federation(), rounds=3)
    assert torch.equal(parts.vector, whole.vector)


def test_without_weights_the_architecture_is_known():
    tiny = build_model("vit-b16", (1, 8, 8), 3, pretrained=False, config=VIT)
    assert (tiny.size, tiny.preprocessing["image_mean"]) == (16, list(HALVES[0]))
    tiny = build_model("resnet-18", (3, 8, 8), 3, pretrained=False, config=RESNET, size=16)
    assert tiny.preprocessing["image_mean"] == list(IMAGENET[0])
    from transformers import AutoConfig

    config = AutoConfig.for_model("resnet", **RESNET18)
    assert (config.embedding_size, config.hidden_sizes, config.layer_type) == (64, [64, 128, 256, 512], "basic")
    with torch.device("meta"):
        from transformers import AutoModelForImageClassification

        full = AutoModelForImageClassification.from_config(config)
    assert (
        sum(p.numel() for p in full.parameters() if p.dim() > 0) - 512 * full.config.num_labels - full.config.num_labels
        == 11_176_512
    )


def test_the_same_weights_for_the_same_seed(folders):
    first, again, other = (
        unskew.run(federation(), **options("vit-b16", folders, rounds=1, seed=seed)).vector for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_models_of_images_that_cannot_be_are_refused(folders, tmp_path):
    def refused(words, name="resnet-18", shape=(3, 8, 8), **changes):
        with pytest.raises(ConfigError, match=words):
            build_model(name, shape, 3, **changes)

    refused("needs an image shape", shape=(4,))
    refused("cannot be loaded", weights="no-such-model")
    for size in (0, -1, True, 8.5):
        refused(
            "the height and width of images must be a positive integer", weights=str(folders["resnet-18"]), size=size
        )
    refused(
        "do not fit the model: .* are missing or have another shape",
        weights=str(folders["resnet-18"]),
        config={"hidden_sizes": [4, 16]},
    )
    other = tmp_path / "other"
    shutil.copytree(folders["vit-b16"], other)
    (other / "preprocessor_config.json").write_text(json.dumps({"image_mean": "gray", "image_std": [1, 1, 1]}))
    refused(
        "image_mean in the preprocessor_config.json of .* must be a list of 3 numbers", "vit-b16", weights=str(other)
    )
    refused("does not fit the model", "vit-b16", weights=str(folders["vit-b16"]), lora={"targets": ["query"]})
    with pytest.raises(ConfigError, match="no option 'depth'"):
        build_model("resnet-18", (3, 8, 8), 3, depth=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1, 10_000])
def test_texts_of_a_row_are_separated_at_every_scale_of_logits(scale, dtype):
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    net = OPTForCausalLM(OPTConfig(vocab_size=24, attn_implementation="eager", **OPT)).to(dtype)
    net.model.decoder.final_layer_norm.weight.data.mul_(scale)
    CausalLM(net).separate_texts()
    net.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(ConfigError, match="cannot separate them"):
        CausalLM(net).separate_texts()


@pytest.mark.parametrize(("padding", "replaced"), [(3, 3), (None, 0), (-1, 0), (24, 0)])
def test_padding_is_replaced_by_the_padding_id_only_if_it_is_a_token(padding, replaced):
    from transformers import OPTConfig

    config = OPTConfig(vocab_size=24, **OPT)
    config.pad_token_id = padding
    assert token_ids(torch.tensor([[5, 0, -1, -2]]), config).tolist() == [[5, 0, replaced, replaced]]


SMALL_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bert", {"num_hidden_layers": 2}),
        # Sliding layers see 4 tokens on each side.
        (
            "modernbert",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "local_attention": 8},
        ),
    ],
)
def test_padded_texts_have_the_logits_of_single_ones(name, config):
    lengths = (40, 23, 7)
    model = hugging_face((40,), 3, weights=name, pretrained=False, config={**SMALL_ENCODER, **config}).eval()
    draws = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = 0.3 * torch.randn(weight.shape, generator=draws)
    x = torch.randint(3, 99, (3, 40), generator=draws)
    with torch.no_grad():
        alone = torch.cat([model.net(input_ids=ids[None, :n]).logits for ids, n in zip(x, lengths, strict=True)])
        for row, length in enumerate(lengths):
            x[row, length:] = -1
        assert_close(model(x), alone, MAGNIFIED)


@pytest.mark.parametrize(
    ("name", "config", "remedy"),
    [
        ("deberta-v2", {"num_hidden_layers": 2, "pooler_hidden_size": 32}, "Use another model"),
        (
            "modernbert",
            {"num_hidden_layers": 1, "layer_types": ["full_attention"], "classifier_pooling": "mean"},
            "Set class",
        ),
    ],
)
def test_encoders_that_use_the_mask_otherwise_are_refused(name, config, remedy):
    with pytest.raises(ConfigError, match=f"computes other logits with the masks of all pairs .* {remedy}"):
        hugging_face((12,), 3, weights=name, pretrained=False, config={**SMALL_ENCODER, **config})
