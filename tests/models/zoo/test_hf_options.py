"""Options of Hugging Face models that save memory or time: frozen weights in bfloat16, checkpointing, fused attention."""

import sys

import pytest
import torch
from support.tiny import BERT, OPT, opt_folder, rows, write_jsonl
from support.tolerance import assert_close

import unskew
from unskew.errors import ConfigError
from unskew.models.execution import Batch, BoundModel
from unskew.models.registry import resolve_model
from unskew.models.spec import ModelSpec
from unskew.models.zoo.hf_options import LoadingOptions
from unskew.tasks.registry import TASKS

LORA = {"r": 2, "alpha": 4, "targets": ["q_proj", "fc1"]}
X = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, -1, -1], [4, 5, 4, 5, 4]])
Y = torch.tensor([[6, 7, 8, 9, 10], [11, 12, -1, -1, -1], [5, 4, 5, 4, 5]])


def spec_of(dtype=torch.float64, kind="opt", task="language", **options):
    torch.manual_seed(0)
    config = {"vocab_size": 24, **{"opt": OPT, "bert": BERT}[kind], **options.pop("config", {})}
    options = {"pretrained": False, "config": config, **options}
    module = resolve_model(f"hf:{kind}", (5,), 24 if task == "language" else 3, options, task)
    return ModelSpec(
        module,
        (5,),
        24 if task == "language" else 3,
        dtype=dtype,
        input_dtype=torch.int64,
        per_token=task == "language",
    )


def gradient(spec, v=None):
    """Loss and gradient of a batch."""
    model, task = BoundModel(spec), TASKS["language"]
    model.start(spec.flatten_buffers())
    function = model.gradient(lambda v, batch: task.loss(model(v, batch.x).logits, batch.y))
    return function(spec.flatten() if v is None else v, Batch(X, Y, torch.zeros(2), torch.tensor(0))), model.loss


def moved(spec):
    """A vector in which the second factors of LoRA are not zero."""
    return spec.flatten() + 0.1 * torch.randn(spec.size, dtype=spec.dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("lora", [None, LORA])
def test_checkpointing_gives_the_same_gradient_from_recomputed_blocks(lora):
    plain, saving = spec_of(lora=lora), spec_of(lora=lora, checkpointing=True)
    blocks = []
    for module in saving.module.modules():
        if type(module).__name__ == "OPTDecoderLayer":
            module.self_attn.q_proj.register_forward_hook(lambda *_: blocks.append(1))
    v = moved(plain)
    (expected, loss), (found, other) = gradient(plain, v), gradient(saving, v)
    assert torch.equal(found, expected)
    assert loss == other
    assert len(blocks) == 2 * OPT["num_hidden_layers"]


def test_checkpointing_needs_blocks_without_dropout():
    with pytest.raises(ConfigError, match="checkpointing needs a model without dropout"):
        spec_of(config={"dropout": 0.1}, checkpointing=True)
    with pytest.raises(ConfigError, match=r"lora\.dropout to 0"):
        spec_of(lora={**LORA, "dropout": 0.1}, checkpointing=True)


def test_fused_attention_differs_only_by_rounding():
    plain, fused = spec_of(), spec_of(attention="sdpa")
    assert fused.module.net.config._attn_implementation == "sdpa"
    (expected, _), (found, _) = gradient(plain), gradient(fused)
    assert_close(found, expected)


def test_gradients_of_single_samples_are_mapped_with_fused_attention_and_checkpointing(tmp_path):
    folder, path = opt_folder(tmp_path / "opt"), write_jsonl(tmp_path / "train.jsonl", rows(30))
    vectors = [
        unskew.run(
            data=f"text:{path}", text="premise", partition="natural:genre", rounds=1, local_steps=2, lr=0.1,
            method="dpsgd:noise=0,clip=1", precision="fp64", model={"hf": str(folder), "lora": LORA, **options},
        ).vector
        for options in ({}, {"attention": "sdpa", "checkpointing": True})
    ]  # fmt: skip
    assert_close(vectors[1], vectors[0])


@pytest.mark.parametrize("freeze_a", [False, True])
@pytest.mark.parametrize("kind", ["opt", "bert"])
def test_factors_are_trained_in_float32_on_frozen_weights_in_bfloat16(kind, freeze_a):
    task = "language" if kind == "opt" else "classification"
    lora = {**LORA, "targets": LORA["targets"] if kind == "opt" else ["query", "value"], "freeze_a": freeze_a}
    low = spec_of(torch.float32, kind, task, lora=lora, base_dtype="bfloat16")
    full = spec_of(torch.float32, kind, task, lora=lora)
    frozen = {p.dtype for n, p in low.module.named_parameters() if not p.requires_grad and "lora_A" not in n}
    assert (frozen, low.flatten().dtype) == ({torch.bfloat16}, torch.float32)
    assert low.names == full.names
    v = moved(full)
    rounded, exact = (spec.forward(v, spec.flatten_buffers(), X).logits for spec in (low, full))
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.05  # bfloat16 has 8 bits


def test_a_run_on_a_base_in_bfloat16_sends_only_the_factors_and_saves_what_it_trained(tmp_path):
    folder, path = opt_folder(tmp_path / "opt"), write_jsonl(tmp_path / "train.jsonl", rows(30))
    shared = {
        "data": f"text:{path}", "text": "premise", "partition": "natural:genre", "rounds": 2, "local_steps": 3, "lr": 0.01,
        "optimizer": "adam", "engine": "inline",
    }  # fmt: skip
    model = {"hf": str(folder), "lora": LORA}
    full = unskew.run(**shared, model=model)
    low = unskew.run(**shared, model={**model, "base_dtype": "bfloat16", "checkpointing": True})
    assert low.summary["bytes_up"] == full.summary["bytes_up"] == 2 * 3 * 4 * len(low.vector)
    assert low.summary["bytes_down"] == full.summary["bytes_down"]
    assert low.summary["loss"] == pytest.approx(full.summary["loss"], rel=0.02)
    again = resolve_model(f"hf:{low.model.save(tmp_path / 'saved')}", (5,), 24, {}, "language").eval()
    with torch.no_grad():
        assert float((again(X) - low.model(X)).norm() / low.model(X).norm()) < 0.05
    with pytest.raises(ConfigError, match="fedex changes the weights in every round, which base_dtype would round"):
        unskew.run(**shared, model={**model, "base_dtype": "bfloat16"}, method="fedex")


def test_weights_in_four_bits_are_loaded_with_double_quantization_and_bfloat16(monkeypatch):
    monkeypatch.setattr("transformers.BitsAndBytesConfig", dict)
    assert LoadingOptions("nf4", "sdpa").arguments == {
        "attn_implementation": "sdpa",
        "dtype": "bfloat16",
        "device_map": {"": "cpu"},
        "quantization_config": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
        },
    }


def test_factors_are_trained_on_weights_in_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = opt_folder(tmp_path / "opt", hidden_size=64, word_embed_proj_dim=64, ffn_dim=128)
    path = write_jsonl(tmp_path / "train.jsonl", rows(30))
    shared = {
        "data": f"text:{path}", "text": "premise", "partition": "natural:genre", "rounds": 1, "local_steps": 3, "lr": 0.01,
        "optimizer": "adam", "engine": "inline",
    }  # fmt: skip
    low, high = (
        unskew.run(**shared, model={"hf": str(folder), "lora": LORA, "base_dtype": base})
        for base in ("nf4", "bfloat16")
    )
    layer = low.model.net.model.decoder.layers[0].fc1.base_layer.weight
    assert (layer.dtype, layer.numel()) == (torch.uint8, 64 * 128 // 2)
    assert low.summary["bytes_up"] == high.summary["bytes_up"]
    assert low.summary["loss"] == pytest.approx(high.summary["loss"], rel=0.1)
    assert low.summary["loss"] != high.summary["loss"]
    with pytest.raises(ConfigError, match="which 4-bit weights do not support"):
        unskew.run(**shared, model={"hf": str(folder), "lora": LORA, "base_dtype": "nf4"}, method="dpsgd:noise=0")


def test_options_reject_values_and_models_that_they_do_not_fit(monkeypatch):
    with pytest.raises(ConfigError, match="base_dtype=bfloat16 is for frozen weights, but all weights are trained"):
        spec_of(base_dtype="bfloat16")
    with pytest.raises(ConfigError, match="base_dtype=nf4 quantizes the weights of a checkpoint"):
        spec_of(base_dtype="nf4", lora=LORA)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs the package bitsandbytes: pip install 'unskew\[quantized\]'"):
        LoadingOptions("nf4").check(lora=True, pretrained=True)
    with pytest.raises(ConfigError, match=r"model_options\.attention=flash is not valid"):
        spec_of(attention="flash")
