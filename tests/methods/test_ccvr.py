"""CCVR: distributions of the pooled features for every split, the calibrated head, its traffic and its limits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.running import Stop
from torch import nn

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.ccvr import CCVR, class_distributions
from unskew.simulation.server import Server

CLASSES, FEATURES = 3, 4


class Affine(nn.Module):
    """A body that passes inputs on, except in training mode, and a linear head."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.body = nn.Dropout(dropout)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def samples(n, seed):
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, n - CLASSES)])
    return rng.normal(size=(n, FEATURES)) * [1.0, 2.0, 0.5, 1.0] + y[:, None], y


def stop(*_):
    raise Stop


def federation(cuts=(200, 500), n=1200):
    x, y = samples(n, 0)
    edges = [0, *cuts, n]
    clients = [(x[a:b], y[a:b]) for a, b in pairwise(edges)]
    return unskew.Federation.from_arrays(clients, test=samples(300, 1), classes=CLASSES, holdout=0, normalize=False)


def train(method, fed=None, dropout=0.5, **options):
    given = {"rounds": 2, "lr": 0.05, "local_steps": 3, "engine": "inline", "precision": "fp64", **options}
    torch.manual_seed(0)
    return unskew.run(fed or federation(), model=Affine(dropout), method=method, **given)


def sums_of(x, y, cov):
    one_hot = np.eye(CLASSES)[y]
    products = np.einsum("nc,ni,nj->cij", one_hot, x, x) if cov == "full" else one_hot.T @ x**2
    return {"counts": one_hot.sum(0), "features": one_hot.T @ x, "products": products}


@pytest.fixture
def sent(monkeypatch):
    """The sums that the server has received."""
    received = {}

    def update(self, state, updates):
        received.update(updates.aggregate.upload.get("ccvr", {}))
        return original(self, state, updates)

    original = CCVR.server_update
    monkeypatch.setattr(CCVR, "server_update", update)
    return received


@pytest.mark.parametrize("cov", ["full", "diagonal"])
@pytest.mark.parametrize("cuts", [(200, 500), (1100, 1150), (3,)])
def test_mean_and_covariance_are_those_of_the_pooled_features(sent, cov, cuts):
    train(f"ccvr:cov={cov},ridge=1e-9", federation(cuts))
    x, y = samples(1200, 0)
    for name, expected in sums_of(x, y, cov).items():
        np.testing.assert_allclose(sent[name].numpy(), expected, rtol=1e-12, atol=1e-10)
    mean, factor = class_distributions(sent, 1e-9)
    for label in range(CLASSES):
        own = x[y == label]
        np.testing.assert_allclose(mean[label], own.mean(0), atol=1e-10)
        covariance = np.cov(own.T) + 1e-9 * np.eye(FEATURES)
        if cov == "full":
            np.testing.assert_allclose(factor[label] @ factor[label].T, covariance, atol=1e-10)
        else:
            np.testing.assert_allclose(factor[label] ** 2, np.diag(covariance), atol=1e-10)


def test_classes_with_one_sample_or_none_have_the_ridge_as_variance():
    x, y = np.array([[1.0, 2, 3, 4]]), np.array([1])
    sums = {name: torch.from_numpy(t) for name, t in sums_of(x, y, "full").items()}
    mean, factor = class_distributions(sums, 0.25)
    np.testing.assert_allclose(mean[1], x[0])
    np.testing.assert_allclose(factor[1] @ factor[1].T, 0.25 * np.eye(FEATURES), atol=1e-12)
    assert not mean[0].any()


def test_the_head_tends_to_linear_discriminant_analysis():
    """With one covariance S and equal priors, the log-odds of two classes are linear with slope S^-1 (mu_a - mu_b)."""
    means = np.array([[0.0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 2, 0]])
    factor = np.array([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0, 0, 1.5, 0], [0, 0.3, 0, 0.8]])
    spec = unskew.ModelSpec(Affine().double(), (FEATURES,), CLASSES)
    rng = np.random.default_rng(0)
    count = 10_000
    drawn = [means[c] + rng.normal(size=(count, FEATURES)) @ factor.T for c in range(CLASSES)]
    features, labels = torch.from_numpy(np.concatenate(drawn)), torch.arange(CLASSES).repeat_interleave(count)
    rule = CCVR(epochs=150)
    v = rule.train_head(
        spec, torch.zeros(spec.size, dtype=torch.float64), features, labels, 0.5, len(labels), torch.tensor(5)
    )
    weight = spec.parameters(v)["head.weight"]
    precision = np.linalg.inv(factor @ factor.T)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        expected = precision @ (means[a] - means[b])
        # The standard error of a slope is about 1/sqrt(count) = 0.01 times a few units.
        np.testing.assert_allclose((weight[a] - weight[b]).numpy(), expected, atol=0.15)


def test_only_the_head_changes_and_zero_epochs_change_nothing():
    plain, calibrated, unchanged = (train(m) for m in ("fedavg", "ccvr", "ccvr:epochs=0"))
    assert torch.equal(plain.vector, unchanged.vector)
    assert not torch.equal(plain.vector, calibrated.vector)
    assert calibrated.summary["accuracy_before_closing"] == plain.summary["accuracy"]
    assert calibrated.summary["accuracy"] > plain.summary["accuracy"]
    assert [row["accuracy"] for row in calibrated.history] == [row["accuracy"] for row in plain.history]


SKEWED = {
    "data": "digits",
    "partition": "dirichlet:0.1",
    "clients": 4,
    "holdout": 0.2,
    "model": "mlp",
    "engine": "inline",
    "rounds": 3,
    "local_steps": 3,
    "batch_size": 16,
    "lr": 0.1,
    "max_train_samples": 400,
}


def test_what_judges_a_run_is_the_calibrated_model():
    kept = unskew.run(**SKEWED, method="ccvr", keep="best").summary
    assert kept["kept_accuracy"] == kept["accuracy"] != kept["accuracy_before_closing"]
    earlier = unskew.run(**{**SKEWED, "rounds": 5, "seed": 1}, method="ccvr", keep="best")
    assert earlier.summary["kept_round"] < 5
    assert earlier.summary["accuracy_before_closing"] == earlier.history[earlier.summary["kept_round"] - 1]["accuracy"]
    worst = unskew.run(**SKEWED, method="ccvr", objective="worst_client").summary
    assert worst["worst_client"] == worst["client_accuracy_worst"]
    plain = unskew.run(**SKEWED, method="ccvr")
    before, after = plain.summary["accuracy_before_closing"], plain.summary["accuracy"]
    assert after > max(row["accuracy"] for row in plain.history)  # by 20 points on these data
    assert (plain.summary["best_accuracy"], plain.summary["best_round"]) == (after, 3)
    compared = unskew.compare(
        methods=["fedavg", "ccvr"], seeds=[0], target=(before + after) / 2, references=False, **SKEWED
    )
    assert [row["rounds_to_target"] for row in compared.rows()] == [None, 3]
    reached = unskew.run(**SKEWED, method="ccvr", target=(before + after) / 2).summary
    assert reached["rounds_to_target"] == 3
    assert reached["bytes_to_target"] == reached["bytes_up"] + reached["bytes_down"]


def test_tuning_judges_the_calibrated_model():
    """With a head that the calibration leaves as it is, the value is that of FedAvg."""
    pytest.importorskip("optuna")
    space = {"lr": 0.1, "local_steps": 3, "batch_size": 16, "ccvr.samples": 100, "ccvr.lr": [1e-12, 0.05]}
    tuned = unskew.tune(methods=["ccvr"], trials=6, seeds=1, search_space=space, pruning=False, **SKEWED)
    values = {row["options"]["ccvr.lr"]: row["value"] for row in tuned.trials[1:]}  # the configuration sets no rate
    assert set(values) == {1e-12, 0.05}
    assert values[0.05] > values[1e-12]


@pytest.mark.parametrize("cov", ["full", "diagonal"])
def test_the_sums_are_sent_once(cov):
    plain, calibrated = train("fedavg"), train(f"ccvr:cov={cov}")
    values = CLASSES * (1 + FEATURES + (FEATURES**2 if cov == "full" else FEATURES))
    assert calibrated.summary["bytes_up"] - plain.summary["bytes_up"] == 3 * 8 * values
    assert calibrated.summary["bytes_down"] - plain.summary["bytes_down"] == 3 * 8 * len(plain.vector)


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_every_engine_gives_the_same_model(engine):
    plain, other = (train("scaffold+ccvr", dropout=0, engine=name) for name in ("inline", engine))
    torch.testing.assert_close(other.vector, plain.vector, rtol=1e-12, atol=1e-12)


def test_a_run_that_is_killed_before_the_survey_is_resumed_with_it(tmp_path, monkeypatch):
    result = train("ccvr")
    with monkeypatch.context() as broken:
        broken.setattr(Server, "close", stop)
        with pytest.raises(Stop):
            train("ccvr", out=tmp_path / "run")
    again = unskew.resume(tmp_path / "run", federation=federation(), model=Affine())
    assert torch.equal(again.vector, result.vector)
    assert again.summary["accuracy"] == result.summary["accuracy"]


def test_it_needs_feature_vectors_and_a_shared_model():
    with pytest.raises(MethodConflictError, match="shares only a part of it"):
        unskew.method("fedrep+ccvr")
    with pytest.raises(MethodConflictError, match="clients keep parts of the model"):
        unskew.method("fedbn+ccvr")
    images = np.zeros((12, 1, 4, 4), np.float32), np.arange(12) % 2

    class Pixelwise(nn.Module):
        """The head is applied to every pixel."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Conv2d(1, 3, 1), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.body(x).permute(0, 2, 3, 1)).mean((1, 2))

    fed = unskew.Federation.from_arrays([images], test=images, classes=2)
    with pytest.raises(ConfigError, match="draws feature vectors"):
        unskew.run(fed, model=Pixelwise(), method="ccvr", rounds=1)
