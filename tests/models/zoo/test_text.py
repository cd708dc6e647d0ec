"""The built-in classifier of texts and its tokenizer: a table with a text column needs no download."""

import numpy as np
import pytest
import torch
from support.running import call

import unskew
from unskew.data.readers.tokenization import make_tokenizer
from unskew.errors import ConfigError, DataError
from unskew.models.registry import build_model

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("undrawn")
OPTIONS = {"rounds": 4, "local_epochs": 2, "batch_size": 8, "optimizer": "adam", "lr": 0.01, "engine": "inline"}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Stars depend on one word; the other words say nothing."""
    rng = np.random.default_rng(0)
    words = ["the", "film", "was", "so", "long", "and", "we", "saw", "it", "twice"]
    lines = ["shop,review,stars"]
    for number in range(120):
        good = int(rng.integers(0, 2))
        text = [*rng.choice(words, rng.integers(3, 9)), ["awful", "lovely"][good]]
        lines.append(f"{'ab'[number % 2]},{' '.join(rng.permutation(text))},{[1, 5][good]}")
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_words_and_pairs_of_neighbors_are_hashed_and_a_pair_of_texts_is_told_apart():
    tokens = make_tokenizer("words")
    (first,), (again,) = tokens.pairs([("Good film!",)], 99), tokens.pairs([("good FILM !",)], 99)
    assert first == again
    assert len(first) == 3 + 2
    assert all(0 <= token < tokens.size for token in first)
    assert tokens.pairs([("Good film!",)], 3) == [first[:3]]
    pair = tokens.pairs([("good", "good")], 99)[0]
    assert len(set(pair)) == 2
    with pytest.raises(DataError, match="use bytes"):
        tokens.join([("good",)])


def test_the_model_pools_tokens_and_padding_changes_nothing():
    model = build_model("text-mlp", (5,), 3, tokens=50)
    x = torch.tensor([[3, 4, 4, -1, -1], [7, -1, -1, -1, -1]])
    weight = model.body[0].embedding.weight
    expected = torch.stack([(weight[3] + 2 * weight[4]) / 3**0.5, weight[7]])
    assert torch.allclose(model(x), model.head(expected), atol=1e-6)
    assert torch.equal(model(x), model(torch.nn.functional.pad(x, (0, 4), value=-1)))
    with pytest.raises(ConfigError, match="needs texts as token ids"):
        build_model("text-mlp", (1, 8, 8), 3)


def test_a_table_with_a_text_column_is_trained_on_and_predicted_without_a_named_model(reviews, tmp_path, capsys):
    more = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    options = ["--text", "review", "--label", "stars", "--partition", "natural:shop", *more]
    run = call(capsys, "run", "--data", f"table:{reviews}", *options, "--out", str(tmp_path / "run"), "--json")
    assert run.code == 0, run.err
    assert "using model text-mlp, the default for texts" in run.err
    assert run.json()["accuracy"] > 0.85
    (tmp_path / "new.csv").write_text("review\nlovely and so lovely\nawful film\n")
    assert unskew.load_predictor(tmp_path / "run").predict_file(tmp_path / "new.csv") == ["5", "1"]


def test_every_engine_gives_the_same_model_and_python_needs_no_name(reviews):
    fed = unskew.load_federation(
        f"table:{reviews}",
        text={"columns": "review", "tokenizer": "words"},
        label="stars",
        partition="natural:shop",
        clients=None,
    )
    first, second = (unskew.run(fed, **{**OPTIONS, "rounds": 1, "engine": e}) for e in ("inline", "vectorized"))
    assert first.summary["model"] == "text-mlp"
    assert torch.allclose(first.model.head.weight, second.model.head.weight, atol=1e-5)


def test_models_that_do_not_fit_texts_and_texts_without_labels_are_sentences(reviews):
    options = {"data": f"table:{reviews}", "text": "review", "partition": "natural:shop"}
    with pytest.raises(ConfigError, match=r"Texts require a tokenizer. Use the model text-mlp"):
        unskew.run(**options)
    with pytest.raises(ConfigError, match=r"token ids of texts. Use text-mlp or hf:NAME"):
        unskew.run(**{**options, "text": {"columns": "review", "tokenizer": "bytes"}}, label="stars", model="logistic")
    x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
    fed = unskew.Federation.from_arrays([(x, np.arange(20) % 2)], test=(x, np.arange(20) % 2))
    with pytest.raises(ConfigError, match=r"needs token ids of texts. For numbers use table-mlp"):
        unskew.run(fed, model="text-mlp")
    assert unskew.run(fed, rounds=1, engine="inline").summary["model"] == "table-mlp"
