"""Language models and classifiers of texts: the task, padding, engines, LoRA, FedALS, checkpoints, the command line."""

import io
import json
import math
import shutil

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors import safe_open
from support.federations import LORA as NEED_FACTORS
from support.federations import SMALL_COHORT
from support.running import assert_same_run, call
from support.slow import slow_but
from support.tiny import BERT, GENRES, OPT, opt_folder, rows, tokenizer, write_jsonl
from support.tolerance import FEW, MAGNIFIED, assert_close, near

import unskew
from unskew.cli.comparison_tables import comparison_table
from unskew.cli.tables import summary_table
from unskew.config.loader import experiment, load_yaml
from unskew.data.load import load_federation
from unskew.data.readers.tokenization import make_tokenizer
from unskew.engines.registry import pick_device
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.methods.descriptions import describe_method
from unskew.methods.registry import METHODS, method
from unskew.models.layer_groups import layer_groups, split_at_depth
from unskew.models.registry import resolve_model
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData
from unskew.runs.assembly import assemble
from unskew.runs.run import resume, run_experiment
from unskew.runs.session import Session
from unskew.simulation import evaluate
from unskew.tasks.registry import TASKS
from unskew.testing import assert_engines_agree

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.xdist_group("heavy")]

TASK = TASKS["language"]
LORA = {"r": 2, "alpha": 4, "targets": ["q_proj", "fc1"]}


def load_texts(data, text=(), tokenizer=None, block=128, **options):
    return load_federation(data, text={"columns": text, "tokenizer": tokenizer, "block": block}, **options)


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    return opt_folder(tmp_path_factory.mktemp("opt"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_jsonl(folder / "train.jsonl", rows(60))
    write_jsonl(folder / "test.jsonl", rows(20, seed=1))
    return folder


def options(opt, texts, **changes):
    usual = {
        "data": f"text:{texts}", "text": {"columns": ["premise", "hypothesis"], "block": 14}, "model": {"hf": str(opt)},
        "partition": "sorted:genre", "clients": 3, "rounds": 2, "local_steps": 2, "batch_size": 4, "optimizer": "adamw",
        "lr": 0.01, "precision": "fp64", "engine": "inline", "workers": 2,
    }  # fmt: skip
    return {**usual, **changes}


def run(opt, texts, out=None, **changes):
    return unskew.run(**options(opt, texts, **changes), out=out)


def wrapped(name, task="language", classes=24, **config):
    torch.manual_seed(0)
    model = resolve_model(
        f"hf:{name}", (9,), classes, {"pretrained": False, "config": {"vocab_size": 24, **config}}, task
    )
    return model.double().eval()


def padded(n=6, length=9, least=3):
    """Token ids with -1 at the end of all but the first."""
    x = torch.from_numpy(np.random.default_rng(0).integers(4, 24, (n, length)))
    for row in range(1, n):
        x[row, max(least, length - row) :] = -1
    return x


# ---- the task ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_transformers():
    model, tokens = wrapped("opt", **OPT), padded()
    there = tokens >= 0
    theirs = model.net(
        input_ids=torch.where(there, tokens, 1), attention_mask=there.long(), labels=torch.where(there, tokens, -100)
    )
    logits = model(tokens[:, :-1]).detach()
    assert float(TASK.loss(logits, tokens[:, 1:])) == near(
        float(theirs.loss.detach()), FEW, dtype=torch.float32
    )  # theirs is in float32
    assert_close(logits[there[:, 1:]], theirs.logits[:, :-1][there[:, 1:]], FEW, dtype=torch.float32)


def test_loss_accuracy_and_perplexity_count_tokens_not_texts():
    draws = np.random.default_rng(0)
    logits, y = draws.normal(size=(5, 4, 7)), draws.integers(0, 7, (5, 4))
    y[1, 2:] = y[2, 1:] = y[3] = -1
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    there = y >= 0
    expected = -np.take_along_axis(log_p, y.clip(0)[..., None], -1)[..., 0][there].mean()
    a, b = torch.from_numpy(logits), torch.from_numpy(y)
    assert float(TASK.loss(a, b)) == near(expected)
    right = (logits.argmax(-1) == y) & there
    np.testing.assert_allclose(TASK.correct(a, b), right.sum(1) / there.sum(1).clip(1))
    assert TASK.predictions(b).tolist() == there.sum(1).tolist() == [4, 2, 1, 0, 4]
    assert TASK.measure(torch.zeros(2), 2.0)["perplexity"] == pytest.approx(math.exp(2))
    assert TASK.measure(torch.zeros(2), 1e4)["perplexity"] == math.inf
    assert float(TASK.loss(a[3:4], b[3:4])) == 0
    each = torch.func.vmap(lambda p, q: TASK.loss(p[None], q[None]))(a, b)
    assert float((each * TASK.predictions(b)).sum() / there.sum()) == near(expected)


def test_the_test_loss_is_a_mean_over_all_tokens_however_batches_fall(opt, texts, monkeypatch):
    whole = run(opt, texts, rounds=1)
    monkeypatch.setattr(evaluate, "BATCH", 3)
    small = run(opt, texts, rounds=1)
    assert small.summary["loss"] == near(whole.summary["loss"])
    assert small.summary["accuracy"] == near(whole.summary["accuracy"])
    fed = load_texts(
        f"text:{texts}", partition="iid", clients=2, text=["premise", "hypothesis"], tokenizer=str(opt), block=14
    )
    x, y = fed.test
    logits = whole.model(x).detach()
    assert whole.summary["loss"] == near(float(TASK.loss(logits, y)))
    hits = ((logits.argmax(-1) == y) & (y >= 0)).sum() / (y >= 0).sum()
    assert whole.summary["accuracy"] == near(float(hits), FEW, dtype=torch.float32)
    assert whole.summary["perplexity"] == pytest.approx(math.exp(whole.summary["loss"]))
    assert whole.history[0]["perplexity"] == whole.summary["best_perplexity"] == whole.summary["perplexity"]


@pytest.mark.parametrize("kind", ["opt", "opt-classes", "bert"])
def test_padding_changes_nothing(kind):
    language = kind == "opt"
    model = wrapped(kind.partition("-")[0], "language" if language else "classification", 24 if language else 3, **(
        BERT if kind == "bert" else OPT
    ))  # fmt: skip
    short = padded(4, 9, least=9)[:, :6].clone()
    short[1, 4:] = -1
    long = torch.cat([short, torch.full((4, 3), -1)], 1)
    a, b = model(short), model(long)
    b = b[:, :6][short >= 0] if language else b
    assert_close(a[short >= 0] if language else a, b)


def test_a_classifier_of_texts_gives_the_logits_of_transformers():
    tokens = padded()
    there = tokens >= 0
    for kind, config in (("opt", OPT), ("bert", BERT)):
        model = wrapped(kind, "classification", 3, **config)
        pad = model.net.config.pad_token_id
        theirs = model.net(input_ids=torch.where(there, tokens, pad), attention_mask=there.long())
        assert_close(model(tokens), theirs.logits, FEW, dtype=torch.float32)  # their softmax is in float32


# ---- the layout -------------------------------------------------------------------------------------------------------


def test_layers_of_a_language_model_are_its_blocks_and_embeddings_are_tied_once():
    spec = ModelSpec(wrapped("opt", **OPT), (9,), 24, dtype=torch.float64, input_dtype=torch.int64, per_token=True)
    groups = layer_groups(spec)
    assert [g.name for g in groups] == ["embeddings", *(f"net.model.decoder.layers.{i}" for i in range(3))]
    assert [g.leading for g in groups] == [True, False, False, False]
    assert groups[0].size == 24 * 16 + 42 * 16
    assert "net.model.decoder.final_layer_norm" in groups[-1].layers
    assert not [name for name in spec.names if "lm_head" in name]
    assert sum(g.size for g in groups) == spec.size == sum(p.numel() for p in spec.module.parameters())
    body, head = split_at_depth(groups, 2)
    assert [g.name for g in body] == ["embeddings", "net.model.decoder.layers.0", "net.model.decoder.layers.1"]
    assert sum(g.size for g in head) == sum(s.stop - s.start for s in spec.parts["head"])
    assert not spec.head_trains
    assert split_at_depth(groups, 0)[0] == groups[:1]
    with pytest.raises(ConfigError, match="has 3 layers"):
        split_at_depth(groups, 4)
    # The one parameter moves both the embeddings and the logits.
    v = spec.flatten()
    moved = v.clone()
    moved[groups[0].slices[0]] *= 2
    again = spec.load(moved, spec.flatten_buffers()).net
    assert again.lm_head.weight is again.model.decoder.embed_tokens.weight
    torch.testing.assert_close(
        spec.forward(moved, spec.flatten_buffers(), padded()).logits, spec.load(moved, spec.flatten_buffers())(padded())
    )


def test_untied_heads_and_classifiers_are_layers_of_their_own():
    untied = wrapped("opt", **OPT, tie_word_embeddings=False)
    spec = ModelSpec(untied, (9,), 24, dtype=torch.float64, input_dtype=torch.int64, per_token=True)
    assert layer_groups(spec)[-1].name == spec.head_name == "net.lm_head"
    assert list(layer_groups(spec)[-1].slices) == spec.parts["head"]
    spec = ModelSpec(wrapped("bert", "classification", 3, **BERT), (9,), 3, input_dtype=torch.int64)
    assert [g.name for g in layer_groups(spec)] == [
        "embeddings", "net.bert.encoder.layer.0", "net.bert.encoder.layer.1", "net.bert.pooler.dense", "net.classifier",
    ]  # fmt: skip
    assert spec.feature_shape == (16,)


def test_the_command_shows_the_layers(capsys, opt):
    shown = json.loads(call(capsys, "models", f"hf:{opt}", "--split", "1", "--json").out)
    assert [(row["layer"], row["part"]) for row in shown] == [(0, "body"), (1, "body"), (2, "head"), (3, "head")]
    lora = call(capsys, "models", f"hf:{opt}", "--classes", "3", "--set", "model_options.lora={r: 2}", "--json").json()
    assert [row["layer"] for row in lora] == [1, 2, 3, 4]
    assert sum(row["parameters"] for row in lora) == 3 * 2 * 2 * (2 * 16) + 3 * 16


# ---- data -------------------------------------------------------------------------------------------------------------


def test_texts_become_tokens_that_follow_one_another(texts, opt):
    fed = load_texts(
        f"text:{texts}",
        partition="sorted:genre",
        clients=3,
        holdout=0.0,
        text=("premise", "hypothesis"),
        tokenizer=str(opt),
    )
    words = tokenizer()
    expected = {tuple(words(row["premise"] + "\n" + row["hypothesis"])["input_ids"]) for row in rows(60)}
    pairs = set()
    for client in fed.clients:
        for x, y in zip(client.x, client.y, strict=True):
            n = int((y >= 0).sum())
            assert x[1 : n + 1].tolist() == y[:n].tolist()[: len(x) - 1] or n == len(x)
            pairs.add((*x[:n].tolist(), int(y[n - 1])))
    assert pairs == expected
    counts, names = fed.label_distribution()
    assert names == GENRES
    assert counts.tolist() == [[20, 0, 0], [0, 20, 0], [0, 0, 20]]
    assert fed.classes == len(words)
    assert (
        load_texts(
            f"text:{texts}", partition="natural:genre", clients=None, text=["premise"], tokenizer="bytes"
        ).sizes.tolist()
        == [18] * 3
    )


def test_long_texts_are_cut_into_rows_or_cut_off(tmp_path):
    some = [{"text": "abcdefghij", "kind": "x", "who": "p"}, {"text": "abcd", "kind": "y", "who": "q"}] * 5
    path = write_jsonl(tmp_path / "a.jsonl", some)
    options = {"partition": "natural:who", "clients": None, "holdout": 0.0, "tokenizer": "bytes", "block": 5}
    fed = load_texts(f"text:{path}", **options)
    # 11 bytes with the one before: rows of 5, 5 and a lone one, which predicts nothing; 5 bytes are one row.
    rows = {(tuple(x.tolist()), tuple(y.tolist())) for x, y in zip(fed.clients[0].x, fed.clients[0].y, strict=True)}
    assert rows == {((256, *b"abc"), (*b"abcd",)), ((*b"efgh",), (*b"fghi",))}
    assert sum(len(c.x) for c in fed.clients) + len(fed.test[0]) == 15
    fed = load_texts(f"text:{path}", label="kind", **options)
    assert (fed.task, fed.classes, fed.class_names) == ("classification", 2, ("x", "y"))
    assert fed.clients[0].x[0].tolist() == [256, *b"abcd"]


def test_pairs_are_told_apart_for_classifiers(opt):
    pair = [("the cat", "a dog")]
    ids = tokenizer().convert_tokens_to_ids(["</s>", "the", "cat", "</s>", "a", "dog"])
    assert make_tokenizer(str(opt)).pairs(pair, 10) == [ids]
    assert len(make_tokenizer(str(opt)).pairs(pair, 5)[0]) == 5
    assert make_tokenizer("bytes").pairs([("a", "b")], 3) == [[256, 97, 256]]


def test_multi_nli_from_a_folder_as_at_the_hub(tmp_path, opt):
    import pyarrow as pa
    from pyarrow import parquet

    labeled = [{**row, "label": int(row["label"] == "yes")} for row in rows(30)]
    for name in ("train-00000-of-00001", "validation_matched-00000-of-00001"):
        parquet.write_table(pa.Table.from_pylist(labeled), tmp_path / f"{name}.parquet")
    fed = load_texts("multi_nli", data_path=tmp_path, partition="sorted:genre", clients=3, tokenizer=str(opt))
    assert (fed.task, len(fed.test[0]), fed.label_distribution()[1]) == ("language", 30, GENRES)
    fed = load_texts(
        "nyu-mll/multi_nli", data_path=tmp_path, partition="iid", clients=3, tokenizer=str(opt), label="label"
    )
    assert (fed.task, fed.classes) == ("classification", 2)
    with pytest.raises(DataError, match="does not contain multi_nli"):
        load_texts("multi_nli", data_path=opt, partition="iid", tokenizer="bytes")


def test_text_sources_reject_invalid_options(tmp_path, opt, texts):
    def refused(error, words, name=f"text:{texts}", **options):
        options = {"partition": "iid", "clients": 2, "tokenizer": "bytes", "text": ["premise"], **options}
        with pytest.raises(error, match=words):
            load_texts(name, **options)

    refused(ConfigError, "Texts require a tokenizer", tokenizer=None)
    refused(DataError, "tokenizer '/nowhere' cannot be loaded", tokenizer="/nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(opt / "config.json", bare)
    refused(DataError, "bare has no tokenizer. Set text.tokenizer", tokenizer=str(bare))
    (tmp_path / "none.jsonl").write_text("\n")
    refused(DataError, "training rows are empty", name=f"text:{tmp_path / 'none.jsonl'}")
    refused(DataError, "no column 'text'.*Set text.columns to the text column", text=())
    refused(DataError, "no column 'hypo'", text=["hypo"])
    refused(ConfigError, "one column or a pair", text=["a", "b", "c"])
    refused(ConfigError, "requires one label per sample, but here a sample has no label", partition="dirichlet:1")
    refused(ConfigError, "requires a path", name="text")
    refused(DataError, "There is no file or folder", name="text:/nowhere.jsonl")
    refused(ConfigError, "do not support image", image="x")
    refused(ConfigError, "Remove the path", name="sentences", data_path=texts)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "a b", "n": 1}, {"text": " ", "n": 2}])
    refused(DataError, "row 1 has no text", name=f"text:{bad}", text=())
    refused(DataError, "'n' contains int64, not text", name=f"text:{bad}", text=["n"])
    short = write_jsonl(tmp_path / "short.jsonl", [{"text": "?"}, {"text": "!"}])
    words = tmp_path / "words"
    shutil.copytree(opt, words)
    content = json.loads((words / "tokenizer.json").read_text())
    content["post_processor"] = None
    (words / "tokenizer.json").write_text(json.dumps(content))
    refused(DataError, "no next token to predict", name=f"text:{short}", text=(), tokenizer=str(words))


@pytest.mark.slow
def test_made_up_sentences_need_nothing():
    fed = load_texts("sentences", partition="sorted:genre", clients=5, tokenizer="bytes")
    assert fed.sizes.tolist() == [720] * 5
    assert np.array_equal(fed.label_distribution()[0], 720 * np.eye(5))
    assert len(fed.test[0]) == 1000
    labeled = load_texts("sentences", partition="dirichlet:1", clients=5, tokenizer="bytes", label="label")
    assert labeled.class_names == ("contradiction", "entailment", "neutral")


def test_tokens_may_come_as_arrays(opt):
    tokens = padded().numpy()
    x, y = tokens[:, :-1], np.where(tokens[:, 1:] < 0, -100, tokens[:, 1:])
    fed = unskew.Federation.from_arrays([(x, y), (x, y)], test=(x, y), task="language", classes=24, holdout=0.0)
    assert fed.clients[0].y.min() == -1
    filled = np.where(x < 0, -100, x)
    other = unskew.Federation.from_arrays([(filled, y)] * 2, test=(filled, y), task="language", classes=24, holdout=0.0)
    assert torch.equal(other.clients[0].x, fed.clients[0].x)
    result = unskew.run(fed, model={"hf": str(opt)}, rounds=1, lr=0.1, engine="inline", eval_clients=5)
    assert result.summary["perplexity"] > 1
    assert result.summary["clients_evaluated_on"].startswith("nothing")
    for bad, words in (
        ((x.astype(float), y), "must be token ids"),
        ((x, y + 30), "tokens from 0 to 23"),
        ((x, y[:, 0]), "token ids"),
    ):
        with pytest.raises(DataError, match=words):
            unskew.Federation.from_arrays([bad], test=(x, y), task="language", classes=24)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: np.where(x < 0, x, x + 30), "client 0 contain the token .* the model knows 0 to 23"),
        (lambda x: x - 9, "client 0 contain the token -10,"),
        (lambda x: x[:, ::-1], "client 0 have tokens after padding"),
    ],
)
def test_tokens_that_the_model_cannot_take_are_refused(change, words, opt):
    x = padded().numpy()
    bad = change(x).copy()
    labels = np.arange(len(x)) % 3
    for fed in (
        unskew.Federation.from_arrays([(bad, x)], test=(x, x), task="language", classes=24),
        unskew.Federation.from_arrays([(bad, labels)], test=(x, labels), classes=3),
    ):
        with pytest.raises(DataError, match=words):
            unskew.run(fed, model={"hf": str(opt)}, rounds=1, engine="inline")


# ---- training ---------------------------------------------------------------------------------------------------------

KINDS = {
    "causal": {},
    "dropout": {"model_options": {"config": {"dropout": 0.2, "attention_dropout": 0.1}}},
    "lora": {"model_options": {"lora": {**LORA, "dropout": 0.1}}},
    "classes": {"label": "label", "method": "fedpvr:layers=1"},
    "classes-lora": {"label": "label", "model_options": {"lora": LORA}, "method": "moon"},
}


ON_ENGINES = [(kind, engine) for kind in KINDS for engine in ("processes", "vectorized")]
QUICK = [("dropout", "vectorized")]


@pytest.mark.parametrize(("kind", "engine"), slow_but(QUICK, ON_ENGINES))
def test_engines_agree(kind, engine, opt, texts):
    reference, other = run(opt, texts, **KINDS[kind]), run(opt, texts, engine=engine, **KINDS[kind])
    assert_engines_agree(other.vector, reference.vector)
    assert other.summary["bytes_up"] == reference.summary["bytes_up"]


FITTING = [name for name in METHODS if "language" in describe_method(name)["tasks"]]
SUMS = ["fedals:auto,longest=2,budget=0.9", "fedals:alpha=2,split=1+scaffold"]
RANKED = {name: f"{name}:ranks=2/1" for name in ("flora", "hetlora")}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in FITTING])
def test_a_method_for_another_task_refuses(name, opt, texts):
    with pytest.raises(ConfigError, match="does not support the task 'language', because "):
        run(opt, texts, method=name)


@pytest.mark.parametrize("name", slow_but([SUMS[1], "flora"], [*FITTING, *SUMS]))
def test_the_vectorized_engine_gives_the_same_vector(name, opt, texts):
    """By default a method that asks the task for something, and one that splits the model."""
    given = {"optimizer": "sgd", "lr": 0.05, "server_data": 5, "rounds": 3}
    given["method"] = SMALL_COHORT.get(name, name)
    if name in NEED_FACTORS:
        given |= {"method": RANKED.get(name, name), "model": {"hf": str(opt), "lora": LORA}}
    reference = run(opt, texts, **given)
    other = run(opt, texts, **given, engine="vectorized")
    assert torch.isfinite(reference.vector).all()
    assert_close(other.vector, reference.vector, MAGNIFIED)


@pytest.mark.parametrize("name", ["fedcog:start_round=0,n=4", "fedreg", "vhl"])
def test_methods_that_make_inputs_refuse_texts_with_labels(name, opt, texts):
    with pytest.raises(ConfigError, match="generates inputs, but text tokens are discrete"):
        run(opt, texts, label="label", method=name)


def test_dropout_is_decided_by_the_seed_alone(opt, texts):
    first = run(opt, texts, **KINDS["dropout"])
    torch.manual_seed(99)
    assert torch.equal(run(opt, texts, **KINDS["dropout"]).vector, first.vector)
    assert not torch.allclose(run(opt, texts).vector, first.vector)


class OnlySecondFactors(unskew.ClientRule):
    """Freezes the factors A in every step, though they are part of the vector."""

    name, summary, paper = "only-b", "", ""

    def trainable_mask(self, ctx, carry, batch):
        parts = [
            torch.full((size,), "lora_A" not in name) for name, size in zip(ctx.spec.names, ctx.spec.sizes, strict=True)
        ]
        return torch.cat(parts)


def test_lora_with_a_frozen_first_factor_trains_and_sends_only_the_second(opt, texts):
    both = run(opt, texts, model={"hf": str(opt), "lora": LORA}, method=OnlySecondFactors())
    second = run(opt, texts, model={"hf": str(opt), "lora": {**LORA, "freeze_a": True}})
    expected, weights = dict(both.model.named_parameters()), dict(second.model.named_parameters())
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    assert len(trained) == 3 * 2
    assert all("lora_B" in name for name in trained)
    for name, weight in weights.items():
        assert_close(weight, expected[name], FEW)
    assert second.summary["bytes_up"] == 3 * 2 * second.summary["parameters"] * 8
    assert second.summary["parameters"] < both.summary["parameters"]


def test_lora_trains_as_in_peft_with_torch_optim(opt, texts):
    import peft
    from transformers import OPTForCausalLM

    values = options(
        opt, texts, model={"hf": str(opt), "lora": LORA}, clients=1, partition="iid", rounds=1, holdout=0.0
    )
    values |= {"local_steps": 4, "batch_size": 1000, "weight_decay": 0.1}
    config = experiment(values)
    result = run_experiment(config)
    fed = load_texts(
        f"text:{texts}",
        partition="iid",
        clients=1,
        holdout=0.0,
        text=["premise", "hypothesis"],
        tokenizer=str(opt),
        block=14,
    )
    names = [n for n, p in result.model.named_parameters() if p.requires_grad]
    assert len(names) == 3 * 2 * 2
    net = OPTForCausalLM.from_pretrained(opt, dtype=torch.float64, attn_implementation="eager")
    theirs = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "fc1"])).train()
    from unskew.runs.build_model import initial_spec

    spec = initial_spec(config, fed, None, method("fedavg"))
    start = spec.parameters(spec.flatten())
    weights = dict(theirs.named_parameters())
    mine = {n: "base_model.model." + n.removeprefix("net.") for n in start}
    with torch.no_grad():
        for name, value in start.items():
            weights[mine[name]].copy_(value)
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], 0.01, weight_decay=0.1)
    x, y = fed.clients[0].x, fed.clients[0].y
    for _ in range(4):
        optimizer.zero_grad()
        logits = theirs(input_ids=x.clamp_min(0), attention_mask=(x >= 0).long()).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1).backward()
        optimizer.step()
    moved = dict(result.model.named_parameters())
    for name in start:
        assert_close(moved[name], weights[mine[name]], FEW, dtype=torch.float32)  # their softmax is in float32
        assert not torch.equal(moved[name], start[name])


def test_frozen_parameters_are_shared_not_sent_and_not_in_the_file(opt, texts, tmp_path):
    result = run(
        opt, texts, tmp_path / "run", model={"hf": str(opt), "lora": LORA}, precision="fp32", method="scaffold"
    )
    d = 3 * (2 * (16 + 16) + 2 * (16 + 24))
    assert result.summary["parameters"] == d == len(result.vector)
    assert result.summary["bytes_up"] == 2 * 3 * 2 * 4 * d
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 12
        about = json.loads(file.metadata()["about"])
    assert about["model"] == f"hf:{opt}"
    config = experiment(load_yaml(tmp_path / "run" / "config.yaml"))
    assert config.model_options == {"lora": LORA}
    from unskew.data.load import federation_of
    from unskew.runs.validation import resolve_run

    fed = federation_of(config.data_spec, config.seed)
    resolved = resolve_run(config, fed, None, method("fedavg"))
    parts = assemble(resolved, PreparedData(fed, config.training), pick_device("cpu"))
    spec = resolved.spec
    frozen = [p for p in spec.module.parameters() if not p.requires_grad]
    copies = [p for p in parts.evaluator.model.module.parameters() if not p.requires_grad]
    assert len(frozen) > 30
    assert all(a is b for a, b in zip(frozen, copies, strict=True))
    assert about["frozen"] == spec.frozen


def test_a_trained_model_is_saved_as_a_folder_that_loads_again(opt, texts, tmp_path):
    from transformers import OPTForCausalLM

    for name, model in (("whole", {"hf": str(opt)}), ("lora", {"hf": str(opt), "lora": {**LORA, "alpha": 64}})):
        result = run(opt, texts, model=model, precision="fp32", lr=0.05)
        folder = result.model.save(tmp_path / name)
        x = padded()
        again = resolve_model(f"hf:{folder}", (9,), 24, {}, "language").eval()
        plain = OPTForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            if name == "whole":
                assert torch.equal(again(x), result.model(x))
            assert_close(again(x), result.model(x), FEW)
            assert_close(plain(x.clamp_min(0)).logits[0], result.model(x)[0], FEW)
        assert not any("lora" in key for key in plain.state_dict())


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_factors_of_a_tied_output_layer_leave_the_embedding_unchanged(kind, opt, texts, tmp_path):
    from transformers import AutoModelForCausalLM

    own = {"vocab_size": 24, "tie_word_embeddings": True}
    own |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    own |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = {"hf": str(opt)} if kind == "opt" else {"hf": "llama", "pretrained": False, "config": own}
    lora = {"r": 2, "alpha": 16, "targets": ["q_proj", "lm_head"]}
    text = {"columns": ["premise"], "tokenizer": str(opt), "block": 14}
    changes = {"model": {**model, "lora": lora}, "precision": "fp32", "lr": 0.1, "text": text}
    result = run(opt, texts, **changes)
    x = padded()
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(result.model.save(tmp_path / "saved")).eval()
        assert_close(plain(x.clamp_min(0)).logits[0], result.model(x)[0], FEW)
        for method in ("flora", "fedex"):
            again = run(opt, texts, **changes, method=method, rounds=1, participation=1.0).model
            before, weight = again.net.get_input_embeddings().weight, again.net.lm_head.base_layer.weight
            assert torch.equal(before, result.model.net.get_input_embeddings().weight)
            # With equal initial weights, flora adds products to that of the output layer, and fedex residuals.
            assert not torch.equal(before, weight)


def test_lora_of_a_language_model_trains_only_factors():
    size = {"vocab_size": 24, "is_decoder": True, **BERT}
    model = resolve_model(
        "hf:roberta", (9,), 24, {"pretrained": False, "config": size, "lora": {"r": 2, "targets": "query"}}, "language"
    )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2  # two layers
    assert all("query.lora_" in name for name in trained)


def test_fedals_moves_only_the_head_between_averages_of_the_body(opt, texts):
    class Watching:
        def start(self, config, rounds_done): ...
        def round(self, row):
            seen.append((parts.server.state.v.clone(), parts.server.traffic.total.up))

        def end(self, summary): ...

    seen = []
    config = experiment(options(opt, texts, rounds=4, method="fedals:alpha=3,split=1", precision="fp32"))
    from unskew.data.load import federation_of
    from unskew.runs.validation import resolve_run

    fed, rule = federation_of(config.data_spec, config.seed), method(config.method)
    resolved = resolve_run(config, fed, None, rule)
    spec = resolved.spec
    start = spec.flatten()
    parts = assemble(resolved, PreparedData(fed, config.training), pick_device("cpu"), None, [Watching()])
    Session(parts).run(resume=False)
    body, head = split_at_depth(layer_groups(spec), 1)
    inside = torch.zeros(spec.size, dtype=torch.bool)
    for group in body:
        for piece in group.slices:
            inside[piece] = True
    assert 0 < int(inside.sum()) < spec.size
    sizes = [sum(g.size for g in head), sum(g.size for g in head), spec.size, sum(g.size for g in head)]
    before, sent = start, 0
    for (v, up), size, whole in zip(seen, sizes, (False, False, True, False), strict=True):
        assert up - sent == 3 * 4 * size
        assert bool((v != before)[inside].any()) == whole
        assert bool((v != before)[~inside].any())
        before, sent = v, up


@pytest.mark.parametrize(
    "lora", [pytest.param(None, id="whole", marks=pytest.mark.slow), pytest.param(LORA, id="lora")]
)
def test_a_resumed_run_equals_an_uninterrupted_one(lora, opt, texts, tmp_path):
    settings = {
        "method": "fedals:alpha=2,split=1+scaffold",
        "model": {"hf": str(opt), "lora": lora},
        "checkpoint_every": 1,
    }
    run(opt, texts, tmp_path / "whole", rounds=4, **settings)
    run(opt, texts, tmp_path / "parts", rounds=2, **settings)
    resume(tmp_path / "parts", rounds=4)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_is_not_resumed_on_another_base(opt, texts, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(opt, base)
    settings = options(
        opt, texts, model={"hf": str(base), "lora": LORA}, text={"columns": ["premise"], "tokenizer": "bytes"}
    )
    settings["model_options"] = {"pretrained": False, "config": {"vocab_size": 257}}
    unskew.run(**settings, out=tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["model_options"] == {"lora": LORA, "pretrained": False, "config": {"vocab_size": 257}}
    changed = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**changed, "init_std": 0.5}))
    with pytest.raises(CheckpointError, match="frozen parameters differ from those of the run"):
        resume(tmp_path / "run", rounds=3)


def test_a_models_own_frozen_head_leaves_the_last_layer_as_head(texts):
    from torch import nn

    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    module[4].requires_grad_(False)
    spec = ModelSpec(module, (5,), 3)
    assert (spec.head_name, spec.head_trains, spec.parts["head"]) == ("4", False, [slice(24, 44)])
    draws = np.random.default_rng(0)
    pairs = [(draws.normal(size=(20, 5)), draws.integers(0, 3, 20)) for _ in range(3)]
    fed = unskew.Federation.from_arrays(pairs, test=pairs[0], classes=3)
    for name in ("fedrep", "scaffold", "fedals:alpha=2"):
        results = [
            unskew.run(fed, model=module, method=name, rounds=2, precision="fp64", workers=2, engine=e)
            for e in ("inline", "processes", "vectorized")
        ]
        for other in results[1:]:
            assert_engines_agree(other.vector, results[0].vector)
        assert torch.equal(results[0].model[4].weight, module[4].weight.double())
    with pytest.raises(ConfigError, match="is frozen"):
        unskew.run(fed, model=module, method="fedgen", rounds=1)
    with pytest.raises(ConfigError, match="The head '4' has no trainable parameters"):
        ModelSpec(module, (5,), 3, head="4")


# ---- the configuration ------------------------------------------------------------------------------------------------


def test_a_model_is_written_as_a_name_or_as_a_mapping(opt):
    by_mapping = experiment({"model": {"hf": str(opt), "lora": {"r": 4}}})
    by_name = experiment({"model": f"hf:{opt}", "model_options": {"lora": {"r": 4}}})
    assert by_mapping == by_name == experiment(yaml.safe_load(by_mapping.to_yaml()))
    assert experiment({"model": {"name": "mlp", "hidden": [3]}}).model_options == {"hidden": [3]}
    with pytest.raises(ConfigError, match="a mapping must contain the model as hf"):
        experiment({"model": {"lora": {}}})
    assert experiment({"text": {"columns": "premise, hypothesis"}}).text.columns == ("premise", "hypothesis")
    with pytest.raises(ConfigError, match=r"no option 'text.blok'. Did you mean 'text.block'"):
        experiment({"text": {"blok": 3}})


def test_models_that_cannot_be_are_refused_with_a_sentence(opt, texts, tmp_path):
    def refused(words, name=opt, task="language", **changes):
        with pytest.raises(ConfigError, match=words):
            resolve_model(f"hf:{name}", (9,), 24, changes, task)

    old = tmp_path / "old"
    shutil.copytree(opt, old)
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    refused(r"contains no safetensors \(only pytorch_model.bin, which may execute code", old)
    (old / "pytorch_model.bin").unlink()
    refused(r"contains no safetensors \(no weights\)", old)
    refused("The folder /nowhere does not exist", "/nowhere")
    refused("cannot be loaded", "no-such-model")
    own = {"hidden_size": 15, "num_attention_heads": 2}
    refused("'opt' cannot be built: embed_dim must be divisible by num_heads", "opt", pretrained=False, config=own)
    own = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 2]]}
    refused("'gpt_neo' cannot be built: .*: ValueError: ", "gpt_neo", pretrained=False, config=own)
    own = {"hidden_size": 16, "n_layer": 1, "n_head": 2}
    refused("'bloom' has no attention: sdpa. Remove", "bloom", pretrained=False, config=own, attention="sdpa")
    refused("lora has no option 'rank'", lora={"rank": 3})
    refused(r"lora.r=0 is not valid", lora={"r": 0})
    refused("lora must be a mapping", lora=3)
    refused(r"lora.targets=\['query'\] does not fit the model .*: fc1, fc2, k_proj", lora={"targets": ["query"]})
    refused(r"no layer is called v_prj\).*: fc1, fc2, k_proj", lora={"targets": ["q_proj", "v_prj"]})
    refused(r"no layer is called query\)", lora={"targets": "query"})
    refused("model.decoder.embed_tokens is an embedding.* Remove embed_tokens", lora={"targets": ["embed_tokens"]})
    refused("no entry of the configuration .* 'hiden'", config={"hiden": 3})
    refused("has no option 'weights'", weights="x")
    refused("size is only for image models", size=3)
    refused("uses later tokens", "bert", pretrained=False, config={"vocab_size": 24, **BERT})
    evil = tmp_path / "evil"
    shutil.copytree(opt, evil)
    config = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(
        json.dumps(
            {
                **config,
                "model_type": "mine",
                "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"},
            }
        )
    )
    (evil / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused("cannot be loaded", evil)
    assert not (tmp_path / "ran").exists()
    broken = tmp_path / "broken"
    shutil.copytree(opt, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    refused("cannot be loaded", broken)
    with pytest.raises(ConfigError, match="has 24 tokens, but the tokenizer of the data has 257"):
        run(opt, texts, text={"columns": ["premise"], "tokenizer": "bytes"})
    long = {"pretrained": False, "config": {**OPT, "vocab_size": 24, "max_position_embeddings": 8}}
    with pytest.raises(ConfigError, match=r"longest text has 20 tokens\. If the .* fewer positions, set text\.block"):
        ModelSpec(
            resolve_model("hf:opt", (20,), 24, long, "language"), (20,), 24, input_dtype=torch.int64, per_token=True
        )
    with pytest.raises(ConfigError, match="does not accept inputs of shape"):
        unskew.run(data="gaussians", model={"hf": str(opt)}, rounds=1, clients=2, partition="iid")


@pytest.mark.slow
def test_the_command_line_from_a_folder_and_a_file(capsys, opt, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = ("--data", f"text:{texts}", "--set", "text.columns=[premise, hypothesis]", "--model", f"hf:{opt}",
              "--clients", "3", "--rounds", "2", "--local-steps", "2",
              "--lr", "0.1", "--engine", "inline", "--partition")  # fmt: skip
    done = call(capsys, "run", *shared, "natural:genre", "--out", "a")
    assert done.code == 0, done.err
    assert "test loss, last round" in done.out
    again = call(capsys, "run", "a/config.yaml", "--out", "b", "--json")
    assert again.json()["loss"] == json.loads((tmp_path / "a" / "summary.json").read_text())["loss"]
    assert_same_run("a", "b")
    both = call(
        capsys, "compare", "fedavg", "fedals:alpha=2", "--seeds", "1", *shared, "iid", "--out", "c", "--target", "0.01"
    )
    assert both.code == 0, both.err
    assert "lower is better" in both.out
    written = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert {"loss", "best_loss", "perplexity", "best_perplexity", "accuracy"} <= set(written[0])
    refused = call(capsys, "run", *shared, "dirichlet:1")
    assert (refused.code, "has no label. Use iid" in refused.err) == (2, True)
    shown = call(
        capsys,
        "partition",
        "sentences",
        "--partition",
        "natural:genre",
        "--json",
        "--text",
        "premise",
        "--tokenizer",
        "bytes",
    )
    assert shown.json()["class_names"][0] == "fiction"


@pytest.mark.slow
def test_comparison_of_language_models_ranks_losses(opt, texts):
    compared = unskew.compare(methods=["fedavg", "ditto"], seeds=2, **{
        k: v for k, v in options(opt, texts, rounds=3, eval_every=1).items() if k != "method"
    })  # fmt: skip
    row = compared.rows()[0]
    summaries = compared.summaries["fedavg"]
    assert row["best_loss"] == pytest.approx(np.mean([s["best_loss"] for s in summaries]))
    for summary, history in zip(summaries, compared.histories["fedavg"], strict=True):
        assert summary["best_loss"] == min(line["loss"] for line in history)
        assert summary["best_perplexity"] == pytest.approx(math.exp(summary["best_loss"]))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison_table(compared.rows()))
    console.print(summary_table(summaries[0]))
    text = console.export_text()
    assert f"{row['loss']:.4f} ± {row['loss_std']:.4f}" in text
    assert f"{summaries[0]['loss']:.4f}  (perplexity " in text
