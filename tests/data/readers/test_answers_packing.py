"""Several texts in one row: the same loss and gradient as of single rows, and no row of two clients."""

import numpy as np
import pytest
import torch
from support.tiny import OPT, write_jsonl
from support.tolerance import assert_close, near

import unskew
from unskew.data.load import load_federation
from unskew.data.readers.answers import pack_rows
from unskew.data.readers.text import pad_rows
from unskew.errors import ConfigError
from unskew.models.execution import Batch, BoundModel
from unskew.models.registry import resolve_model
from unskew.models.spec import ModelSpec
from unskew.tasks.registry import TASKS

SEPARATOR = -2
ROWS = [{"q": "ab"[: n % 3], "a": "xyz"[n % 3] * (1 + n % 5), "site": "xyz"[n % 3]} for n in range(36)]
LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip


def load(folder, **text):
    return load_federation(
        f"text:{write_jsonl(folder / 'rows.jsonl', ROWS)}",
        partition="natural:site",
        holdout=0.0,
        text={"tokenizer": "bytes", "block": 30, **text},
    )


def gradient(name, config, x, y, dtype, packed):
    torch.manual_seed(0)
    options = {"pretrained": False, "config": {"vocab_size": 257, **config}}
    module = resolve_model(f"hf:{name}", (x.shape[1],), 257, options, "language")
    if packed:
        module.separate_texts()
    spec = ModelSpec(module, (x.shape[1],), 257, dtype=dtype, input_dtype=torch.int64, per_token=True)
    model = BoundModel(spec)
    model.start(spec.flatten_buffers())
    function = model.gradient(lambda v, batch: TASKS["language"].loss(model(v, batch.x).logits, batch.y))
    return function(spec.flatten(), Batch(x, y, torch.zeros(2), torch.tensor(0))), float(model.loss)


def test_rows_are_joined_in_order_within_their_group():
    xs, ys, first = pack_rows(
        [[1, 2], [3], [4, 5], [6], [7, 8, 9]],
        [[-1, 3], [4], [5, 6], [7], [8, 9, 10]],
        np.array([0, 1, 1, 2, 3]),
        ["a", "b", "a", "a"],
        5,
    )
    assert xs == [[1, 2, SEPARATOR, 6], [3, SEPARATOR, 4, 5], [7, 8, 9]]
    assert ys == [[-1, 3, -1, 7], [4, -1, 5, 6], [8, 9, 10]]
    assert first.tolist() == [0, 1, 3]


@pytest.mark.parametrize("text", [{"prompt": "q", "answer": "a"}, {"columns": ("a",)}])
def test_no_row_has_texts_of_two_clients(text, tmp_path):
    single, packed = load(tmp_path, **text), load(tmp_path, **text, pack=True)
    counts = []
    for fed in (single, packed):
        ys = [*(client.y for client in fed.clients), fed.test[1]]
        counts.append(sum(int((y >= 0).sum()) for y in ys))
        letters = [set(client.y[(client.y >= 0) & (client.y < 256)].tolist()) for client in fed.clients]
        assert letters == [{ord(letter)} for letter in "xyz"]
    assert counts[0] == counts[1]
    assert sum(len(client.x) for client in packed.clients) < 20


@pytest.mark.parametrize(("name", "config"), [("opt", {**OPT, "max_position_embeddings": 64}), ("llama", LLAMA)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_rows_have_the_loss_and_gradient_of_single_rows(name, config, dtype, tmp_path):
    client = load(tmp_path, prompt="q", answer="a").clients[0]
    x, y = client.x, client.y
    inputs = [row[row >= 0].tolist() for row in x]
    targets = [row[: len(ids)].tolist() for row, ids in zip(y, inputs, strict=True)]
    xs, ys, _ = pack_rows(inputs, targets, np.arange(len(inputs)), [()] * len(inputs), 29)
    assert len(xs) < len(inputs) / 2
    joined_x, joined_y = pad_rows([xs])[0], pad_rows([ys])[0]
    expected, loss = gradient(name, config, x, y, dtype, False)
    found, other = gradient(name, config, joined_x, joined_y, dtype, True)
    assert other == near(loss, dtype=dtype)
    assert_close(found, expected, dtype=dtype)


def test_a_run_with_packed_rows_trains(tmp_path):
    settings = {
        "data": f"text:{write_jsonl(tmp_path / 'rows.jsonl', 3 * ROWS)}", "partition": "natural:site", "rounds": 1, "lr": 0.1,
        "local_steps": 2, "precision": "fp64", "engine": "inline", "model": "hf:llama",
        "model_options": {"pretrained": False, "config": {"vocab_size": 257, **LLAMA}},
    }  # fmt: skip
    text = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "block": 30, "pack": True}
    result = unskew.run(**settings, text=text)
    assert result.history[-1]["train_loss"] < 7
    private = unskew.run(**settings, text=text, method="dpsgd:noise=0,clip=1")  # gradients of single rows are mapped
    assert torch.isfinite(private.vector).all()


def test_packing_rejects_models_and_data_that_cannot_separate_texts(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    text = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "pack": True}
    bloom = {"hidden_size": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot separate them by a mask and positions"):
        unskew.run(
            data=f"text:{path}", text=text, partition="natural:site", rounds=1, model="hf:bloom",
            model_options={"pretrained": False, "config": bloom},
        )  # fmt: skip
    with pytest.raises(ConfigError, match="neither texts with a label nor rows that split_by orders"):
        load_federation(f"text:{path}", label="site", text={"columns": "a", "tokenizer": "bytes", "pack": True})
