"""Early stopping: where a run ends, what it looks at, and that it ends there also after a stop in between."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.slow import as_slow
from support.tolerance import FEW, TRAINING, near

import unskew
from unskew.config.loader import experiment
from unskew.data.load import load_federation
from unskew.errors import CheckpointError, ConfigError
from unskew.records.recorder import Callback
from unskew.runs.early_stopping import EarlyStopping
from unskew.runs.metrics import run_metrics

SETTINGS = {
    "model": "logistic", "local_steps": 3, "lr": 1.0, "engine": "inline", "precision": "fp64", "checkpoint_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return load_federation("digits", partition="dirichlet:0.1", clients=4, holdout=0.2)


def train(federation, early_stopping, rounds=60, **options):
    return unskew.run(federation, rounds=rounds, early_stopping=early_stopping, **{**SETTINGS, **options})


@pytest.mark.parametrize("patience", [1, as_slow(3)])
def test_a_run_ends_when_nothing_better_came_for_so_many_evaluations(digits, patience):
    every = train(digits, 60, eval_every=2)
    seen = [row["validation_accuracy"] for row in every.history if row["accuracy"] is not None]
    ends = next(
        i for i in range(patience, len(seen)) if max(seen[i - patience + 1 : i + 1]) <= max(seen[: i - patience + 1])
    )
    assert 0 < ends < len(seen) - 1, "the case decides something"
    result = train(digits, patience, eval_every=2)
    assert result.history[-1]["round"] == len(result.history) == 2 * (ends + 1)
    assert torch.equal(result.vector, train(digits, None, rounds=2 * (ends + 1)).vector)
    best = max(range(ends + 1), key=seen.__getitem__)
    assert result.summary["validation_round"] == 2 * (best + 1)
    assert result.summary["accuracy_at_validation_round"] == result.history[2 * best + 1]["accuracy"]
    assert result.summary["max_rounds"] == 60


@pytest.mark.parametrize(
    ("losses", "end", "best"),
    [
        ([2.0, None, None, 1.0], 3, 1),
        ([2.0, None, 1.0, None, None, 0.5], 5, 3),
        ([2.0, 1.0, None, 3.0, 0.5], 4, 2),
        ([None, None, 1.0], 2, None),
    ],
)
def test_an_objective_that_is_not_finite_is_no_improvement(digits, losses, end, best):
    """With two evaluations; every second round is not evaluated and does not count."""
    history = []
    config = experiment({"early_stopping": 2, "rounds": 99, "objective": "loss"})
    metrics = run_metrics(config, digits)
    stopping = EarlyStopping(config, SimpleNamespace(federation=digits), history, metrics)
    for k, loss in enumerate(losses, 1):
        history += [{"round": 2 * k - 1}, {"round": 2 * k, "validation_loss": loss, "accuracy": 0.1, "loss": 1.0}]
        assert stopping.should_stop == (k >= end), k
        if stopping.should_stop:
            break
    summary = stopping.summary()
    assert summary.get("validation_round") == (None if best is None else 2 * best)
    assert summary["max_rounds"] == 99


def test_rounds_of_the_run_it_starts_from_do_not_count(digits, tmp_path):
    """Otherwise a run could end before its first round, and keep a model that is not that of its best round."""
    first = train(digits, 1, rounds=9, lr=20.0, out=tmp_path / "first")
    done = len(first.history)
    assert done < 9
    options = {"lr": 0.1, "keep": "best", "method": "scaffold", "start_from": str(tmp_path / "first")}
    own = train(digits, 3, rounds=done + 4, out=tmp_path / "own", **options)
    assert len(own.history) > done
    scores = [row["validation_accuracy"] for row in own.history[done:]]
    best = done + 1 + int(np.argmax(scores))
    assert own.summary["validation_round"] == own.summary["kept_round"] == best
    assert own.summary["validation_accuracy"] == max(scores)
    again = train(digits, 3, rounds=done + 1, out=tmp_path / "again", **options)
    resumed = unskew.resume(tmp_path / "again", rounds=done + 4, federation=digits)
    assert again.summary["rounds"] == done + 1
    for name in ("rounds", "validation_round", "kept_round", "kept_accuracy"):
        assert resumed.summary[name] == own.summary[name], name


def test_it_looks_at_all_that_clients_hold_out_and_at_nothing_else(digits):
    result = train(digits, 2, rounds=2)
    x, y = (torch.cat([getattr(client, name) for client in digits.clients]) for name in ("x_test", "y_test"))
    known = digits.normalization
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (known.mean, known.std))
    logits = result.model.double()((x.double() * known.scale - mean) / std)
    assert result.summary["validation_accuracy"] == max(row["validation_accuracy"] for row in result.history)
    right = (logits.argmax(1) == y).double().mean()
    assert result.history[-1]["validation_accuracy"] == near(float(right), FEW)
    loss = torch.nn.functional.cross_entropy(logits, y)
    assert result.history[-1]["validation_loss"] == near(float(loss.detach()), TRAINING)


@pytest.mark.parametrize("objective", ["auto", "perplexity"])
def test_texts_count_by_their_tokens(objective):
    """The first client's texts have one target each, those of the second, which it predicts, eleven."""
    rng = np.random.default_rng(0)
    texts = np.concatenate([np.full((40, 1), 6), rng.integers(0, 7, (40, 11))], 1)
    texts[20:, 1:] = 2
    following = np.roll(texts, -1, 1)
    following[:, -1] = -1
    following[:20, 1:] = -1
    parts = [(texts[:20], following[:20]), (texts[20:], following[20:])]
    data = unskew.Federation.from_arrays(parts, parts[0], task="language", holdout=0.5)
    options = {**SETTINGS, "rounds": 2, "early_stopping": 2, "objective": objective}
    model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 7))
    result = unskew.run(data, **{**options, "model": model})
    x, y = (torch.cat([getattr(client, name) for client in data.clients]) for name in ("x_test", "y_test"))
    logits = result.model.double()(x)
    loss = float(torch.nn.functional.cross_entropy(logits.mT, y, ignore_index=-1).detach())
    right = (logits.argmax(-1) == y)[y >= 0].double().mean()
    last = result.history[-1]
    assert last["validation_loss"] == near(loss, TRAINING)
    assert last["validation_accuracy"] == near(float(right), FEW)
    assert last.get("validation_perplexity", np.exp(loss)) == near(np.exp(loss), TRAINING)


def test_a_run_that_was_stopped_in_between_ends_at_the_same_round(digits, tmp_path):
    class Stop(Callback):
        def round(self, row):
            if row["round"] == 2:
                raise KeyboardInterrupt

    whole = train(digits, 2)
    with pytest.raises(KeyboardInterrupt):
        train(digits, 2, out=tmp_path / "run", callbacks=[Stop()])
    rest = unskew.resume(tmp_path / "run", federation=digits)
    assert torch.equal(rest.vector, whole.vector)
    assert [row["accuracy"] for row in rest.history] == [row["accuracy"] for row in whole.history]
    with pytest.raises(CheckpointError, match="complete"):
        unskew.resume(tmp_path / "run", federation=digits)


def test_what_has_no_meaning_is_refused(digits):
    nothing_held_out = load_federation("digits", partition="iid", clients=3, holdout=0)
    with pytest.raises(ConfigError, match="Set holdout above 0"):
        train(nothing_held_out, 2)
    with pytest.raises(ConfigError, match="eval_clients=0"):
        train(digits, 2, eval_clients=0)
    with pytest.raises(ConfigError, match="early_stopping=0"):
        train(digits, 0)


@pytest.mark.parametrize(
    ("method", "warns"), [("fedper", True), ("fedproto", True), ("ditto", False), ("fedavg", False)]
)
def test_early_stopping_warns_where_clients_keep_parts_of_their_models(method, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unskew.run(
            data="digits",
            clients=3,
            model="mlp",
            rounds=2,
            local_steps=1,
            engine="inline",
            early_stopping=5,
            method=method,
        )
    assert any("judges the global model" in str(entry.message) for entry in caught) == warns


def test_the_concordance_on_held_out_samples_is_that_of_all_clients_together():
    """A client without comparable pairs has none of its own, and would leave a mean over clients undefined."""
    draws = np.random.default_rng(0)
    clients = []
    for n in (40, 40, 3):
        x = draws.normal(size=(n, 2)).astype(np.float32)
        y = np.column_stack([draws.exponential(np.exp(-x[:, 0])) + 0.1, draws.random(n) < 0.7])
        clients.append((x, y, x[: n // 3], y[: n // 3]))
    federation = unskew.Federation.from_arrays(clients, test=clients[0][:2], task="survival")
    result = unskew.run(federation, model="proportional", rounds=2, local_steps=2, early_stopping=2, engine="inline")
    times, events = np.concatenate([y for _, _, _, y in clients]).T
    inputs = torch.from_numpy(np.concatenate([x for _, _, x, _ in clients]))
    risks = -federation.objective.outputs(result.model(inputs))[:, -1].detach().numpy()
    concordant, comparable = 0.0, 0
    for i in np.flatnonzero(events):
        later = (times > times[i]) | ((times == times[i]) & (events == 0))
        comparable += later.sum()
        concordant += (risks[i] > risks[later]).sum() + (risks[i] == risks[later]).sum() / 2
    assert result.history[-1]["validation_concordance"] == pytest.approx(concordant / comparable)
