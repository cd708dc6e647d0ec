"""kNN-Per against scikit-learn's nearest neighbors, and in its limits."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from support.batch_loop import BODY, CLASSES, FEATURES, HIDDEN, OPTIONS, flat, skewed, two_layers
from torch import nn

import unskew
from unskew.methods.knnper import HeadWithNeighbors, KNNPer
from unskew.serving.load import open_run

EXACT = 1e-12


def train(expression, fed=None, engine="inline", **options):
    budget = {**OPTIONS, "participation": 0.5, "precision": "fp64", "engine": engine, **options}
    return unskew.run(fed or skewed(), model=two_layers(), method=expression, **budget)


def shared(v):
    """The parameters of ``two_layers`` in those of a run, where the samples are between body and head."""
    return np.concatenate([v[: BODY.stop], v[len(v) - CLASSES * (HIDDEN + 1) :]])


def papers_model(v, x):
    """Features and probabilities of ``two_layers`` at ``v [d]``, in NumPy."""
    w, b, u, c = np.split(v, np.cumsum([HIDDEN * FEATURES, HIDDEN, CLASSES * HIDDEN]))
    a = np.tanh(x @ w.reshape(HIDDEN, FEATURES).T + b)
    z = np.exp(a @ u.reshape(CLASSES, HIDDEN).T + c)
    return a, z / z.sum(1, keepdims=True)


@pytest.mark.parametrize(("k", "lam", "scale"), [(3, 0.5, 1.0), (5, 0.8, 0.2), (9, 0.3, 1.0), (30, 0.5, 2.0)])
def test_a_personal_model_mixes_with_scikit_learns_neighbors(k, lam, scale, tmp_path):
    fed = skewed(sizes=(12, 11, 9, 13))
    result = train(f"knnper:k={k},lam={lam},scale={scale},capacity=40", fed, out=tmp_path / "run")
    inputs = np.random.default_rng(0).normal(size=(50, FEATURES))
    v = shared(result.vector.numpy())
    a, p = papers_model(v, inputs)
    for client in range(4):
        with torch.no_grad():
            module = open_run(tmp_path / "run", client_number=client, model=two_layers()).module
            mixed = torch.softmax(module(torch.tensor(inputs)), 1).numpy()
        x, y = fed.clients[client].x.double().numpy(), fed.clients[client].y.numpy()
        neighbors = KNeighborsClassifier(min(k, len(y)), weights=lambda d: np.exp(-(d**2) / (HIDDEN * scale)))
        neighbors.fit(papers_model(v, x)[0], y)
        found = np.zeros_like(p)
        found[:, neighbors.classes_] = neighbors.predict_proba(a)
        np.testing.assert_allclose(mixed, lam * found + (1 - lam) * p, rtol=0, atol=EXACT)


def test_a_client_with_more_samples_than_the_capacity_stores_some_of_its_own(tmp_path):
    fed = skewed(sizes=(12, 6, 9, 13))
    train("knnper:capacity=8", fed, out=tmp_path / "run")
    for client, data in enumerate(fed.clients):
        head = open_run(tmp_path / "run", client_number=client, model=two_layers()).module.get_submodule("2")
        count = min(8, data.num_samples)
        assert int((head.labels > 0).sum()) == count
        with torch.no_grad():
            a = torch.tanh(
                open_run(tmp_path / "run", client_number=client, model=two_layers()).module[0](data.x.double())
            )
        known = {(tuple(row.tolist()), int(c)) for row, c in zip(a.round(decimals=9), data.y, strict=True)}
        rows = zip(head.keys[:count].round(decimals=9), head.labels[:count].long() - 1, strict=True)
        stored = {(tuple(row.tolist()), int(c)) for row, c in rows}
        assert len(stored) == count
        assert stored <= known


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_training_and_traffic_are_those_of_fedavg(engine):
    one, other = train("knnper", engine=engine), train("fedavg", engine=engine)
    np.testing.assert_allclose(shared(one.vector.numpy()), other.vector.numpy(), rtol=0, atol=EXACT)
    assert one.summary["accuracy"] == other.summary["accuracy"]
    visits, d = 4 * 2, len(flat(two_layers()))
    assert one.summary["bytes_up"] == one.summary["bytes_down"] == visits * d * 8


def test_without_the_neighbors_a_client_has_the_global_model():
    options = {"model": "mlp", "clients": 4, "rounds": 2, "local_steps": 5, "batch_size": 16, "engine": "inline"}
    summary = unskew.run(method="knnper:lam=0", **options).summary
    assert summary["personal_accuracy_mean"] == summary["client_accuracy_mean"]


def test_a_certain_model_has_a_finite_loss():
    linear = nn.Linear(1, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[200.0], [0.0]]))
        linear.bias.zero_()
    head = HeadWithNeighbors(linear, KNNPer(k=1, lam=0.5, capacity=1)).eval()
    with torch.no_grad():
        head.keys.fill_(1.0)
        head.labels.fill_(1.0)  # class 0, like the model
        logits = head(torch.ones(1, 1))
    assert logits.argmax() == 0
    assert 80 < nn.functional.cross_entropy(logits, torch.tensor([1])) < 100
