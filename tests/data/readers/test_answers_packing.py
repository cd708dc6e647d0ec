"""Several texts in one row: the same loss and gradient as of single rows, and no row of two clients."""

import json

import pytest
import torch
from support.tiny import OPT, tokenizer, write_jsonl
from support.tolerance import assert_close, near

import unskew
from unskew.data.load import load_federation
from unskew.data.packing import SEPARATOR, pack_rows, unpack_rows
from unskew.errors import ConfigError
from unskew.models.execution import Batch, BoundModel
from unskew.models.registry import resolve_model
from unskew.models.spec import ModelSpec, example_inputs
from unskew.tasks.registry import TASKS

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


def test_rows_are_joined_in_order():
    x = torch.tensor([[1, 2, -1], [6, -1, -1], [3, -1, -1], [7, 8, 9], [4, 5, -1]])
    y = torch.tensor([[-1, 3, -1], [7, -1, -1], [4, -1, -1], [8, 9, 10], [5, 6, -1]])
    xs, ys, first = pack_rows(x, y, 5)
    assert xs.tolist() == [[1, 2, SEPARATOR, 6, -1], [3, SEPARATOR, 7, 8, 9], [4, 5, -1, -1, -1]]
    assert ys.tolist() == [[-1, 3, -1, 7, -1], [4, -1, 8, 9, 10], [5, 6, -1, -1, -1]]
    assert first.tolist() == [0, 2, 4]
    for before, after in zip((x, y), unpack_rows(xs, ys), strict=True):
        assert after.tolist() == torch.nn.functional.pad(before, (0, 2), value=-1).tolist()


def test_joined_rows_keep_the_mark_of_a_truncated_answer_next_to_its_last_token():
    x, y = torch.tensor([[1, 2, -1], [3, -1, -1], [4, 5, -1]]), torch.tensor([[2, 6, -2], [4, -1, -1], [5, 7, -2]])
    xs, ys, _ = pack_rows(x, y, 3)
    assert xs.tolist() == x.tolist()
    assert ys.tolist() == y.tolist()


def texts_of(x, y):
    """The texts in rows, each as its inputs and targets, sorted."""
    found = []
    for inputs, targets in zip(x.tolist(), y.tolist(), strict=True):
        text = []
        for pair in [*zip(inputs, targets, strict=True), (SEPARATOR, -1)]:
            if pair[0] >= 0:
                text.append(pair)
            elif text:
                found.append(text)
                text = []
    return sorted(found)


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "natural:site"},
        {"partition": "iid", "clients": 2, "server_data": 2, "reserve_test_samples": 3, "max_train_samples": 20},
        {"partition": "natural:site", "split_by": "group", "unseen": ("z",)},
        {"partition": "natural:site", "split_by": "time:day"},
    ],
    ids=["natural", "server", "unseen", "time"],
)
def test_packing_changes_neither_clients_nor_held_out_nor_test_texts(options, tmp_path):
    rows = [{**row, "group": n % 9, "day": n} for n, row in enumerate(ROWS)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    text = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "block": 30}
    single, packed = (
        load_federation(f"text:{path}", text={**text, "pack": pack}, holdout=0.3, **options) for pack in (False, True)
    )
    assert packed.fingerprint == single.fingerprint
    assert packed.client_names == single.client_names
    assert texts_of(*packed.test) == texts_of(*single.test)
    assert len(packed.test[0]) == len(single.test[0])
    pairs = [*zip(single.clients, packed.clients, strict=True), *zip(single.unseen, packed.unseen, strict=True)]
    for before, after in pairs:
        assert texts_of(after.x, after.y) == texts_of(before.x, before.y)
        assert len(after.x) < len(before.x)
        assert texts_of(after.x_test, after.y_test) == texts_of(before.x_test, before.y_test) != []
        assert len(after.x_test) == len(before.x_test)
    if single.server is not None:
        assert texts_of(packed.server.x, packed.server.y) == texts_of(single.server.x, single.server.y)
    if packed.text_groups is not None:
        assert (packed.text_groups[0].sum(1) == packed.sizes).all()


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
    joined_x, joined_y, first = pack_rows(x, y, 29)
    assert len(first) < len(x) / 2
    expected, loss = gradient(name, config, x, y, dtype, False)
    found, other = gradient(name, config, joined_x, joined_y, dtype, True)
    assert other == near(loss, dtype=dtype)
    assert_close(found, expected, dtype=dtype)


def test_a_run_with_packed_rows_has_the_metrics_and_counts_of_texts(tmp_path):
    words = tokenizer()
    words.save_pretrained(tmp_path / "words")
    answers = ["dog", "dog", "and a dog today", "dog"]  # the third is truncated: "cat" and block 4 leave three tokens
    rows = [{"q": "cat", "a": answers[n % 4], "site": "xyz"[n % 3]} for n in range(60)]
    results = []
    for pack in (False, True):
        folder = tmp_path / f"run-{pack}"
        result = unskew.run(
            data=f"text:{write_jsonl(tmp_path / 'rows.jsonl', rows)}", partition="natural:site", unseen=("z",), rounds=1,
            text={"prompt": "q", "answer": "a", "tokenizer": str(tmp_path / "words"), "block": 4, "pack": pack}, lr=1e-9,
            local_steps=1, precision="fp64", engine="inline", holdout=0.3, model="hf:llama", out=folder,
            model_options={"pretrained": False, "config": {"vocab_size": 24, **LLAMA}},
        )  # fmt: skip
        clients = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
        names = ("num_held_out", "loss", "accuracy", "exact_match", "perplexity")
        results.append([{name: row[name] for name in names} for row in clients])
        results[-1].append({name: result.summary[name] for name in names[1:]})
    for single, packed in zip(*results, strict=True):
        assert packed == pytest.approx(single, rel=1e-6)


def test_a_run_with_packed_rows_trains(tmp_path):
    settings = {
        "data": f"text:{write_jsonl(tmp_path / 'rows.jsonl', 3 * ROWS)}", "partition": "natural:site", "rounds": 1, "lr": 0.1,
        "local_steps": 2, "precision": "fp64", "engine": "inline", "model": "hf:llama",
        "model_options": {"pretrained": False, "config": {"vocab_size": 257, **LLAMA}},
    }  # fmt: skip
    text = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "block": 30, "pack": True}
    result = unskew.run(**settings, text=text)
    assert result.history[-1]["train_loss"] < 7
    with pytest.raises(ConfigError, match=r"with text\.pack one text decides in which rows others are"):
        unskew.run(**settings, text=text, method="dpsgd:noise=1")


def test_packing_rejects_models_and_data_that_cannot_separate_texts(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    text = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "pack": True}
    bloom = {"hidden_size": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot separate them by a mask and positions"):
        unskew.run(
            data=f"text:{path}", text=text, partition="natural:site", rounds=1, model="hf:bloom",
            model_options={"pretrained": False, "config": bloom},
        )  # fmt: skip
    with pytest.raises(ConfigError, match="label is for classification"):
        load_federation(f"text:{path}", label="site", text={"columns": "a", "tokenizer": "bytes", "pack": True})


def test_packed_rows_may_be_longer_than_the_positions_of_the_model(tmp_path):
    model = {"hf": "opt", "pretrained": False, "config": {"vocab_size": 257, **OPT, "max_position_embeddings": 12}}
    text = {"prompt": "q", "answer": "a", "tokenizer": "bytes", "block": 30, "pack": True}
    settings = {
        "partition": "natural:site",
        "rounds": 1,
        "lr": 0.1,
        "local_steps": 1,
        "engine": "inline",
        "model": model,
    }
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    single, packed = (
        unskew.run(data=f"text:{path}", text={**text, "pack": pack}, out=tmp_path / str(pack), **settings)
        for pack in (False, True)
    )
    spec = ModelSpec(packed.model, (29,), 257, input_dtype=torch.int64, per_token=True)
    assert (
        example_inputs(spec)[0].tolist() == [*[0] * 9, SEPARATOR] * 2 + [0] * 9
    )  # 256, 2 + 1 + 5 bytes, without the end
    assert packed.summary["parameters"] == single.summary["parameters"]
    exported = unskew.export(tmp_path / "True", "torch")
    assert exported.apart < 1e-5
    longer = write_jsonl(tmp_path / "longer.jsonl", [*ROWS, {"q": "b", "a": "x" * 20, "site": "y"}])
    with pytest.raises(
        ConfigError, match=r"longest text has 23 tokens\. If .* fewer positions, set text\.block to a smaller"
    ):
        unskew.run(data=f"text:{longer}", text=text, **settings)
