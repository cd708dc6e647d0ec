"""The quantities of FedALS's Theorem 4.1 against a computation by hand, and samples that belong to nobody."""

import numpy as np
import pytest
import torch
from support.federations import Spy, blobs
from support.tolerance import TRAINING, near

import unskew
from unskew.data.partition.schemes import iid
from unskew.errors import DataError


def log_loss(v, x, y, classes=3):
    """Mean cross-entropy of each sample of a linear model, in NumPy."""
    n = x.shape[1]
    logits = x @ v[: classes * n].reshape(classes, n).T + v[classes * n :]
    top = logits.max(1, keepdims=True)
    return np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(len(y)), y]


def test_gaps_and_skew_are_those_by_hand():
    fed = blobs([12, 20, 16])
    run = {"model": "logistic", "rounds": 1, "lr": 0.1, "precision": "fp64", "engine": "inline"}
    row = unskew.run(fed, **run, diagnose="generalization").history[0]
    spy = Spy()
    unskew.run(fed, method=spy, **run)
    weights = np.array([w for _, w in spy.seen]) / sum(w for _, w in spy.seen)
    models = [v.numpy() for v, _ in spy.seen]
    mean = sum(w * v for w, v in zip(weights, models, strict=True))
    x, y = fed.test[0].flatten(1).double().numpy(), fed.test[1].numpy()
    gap = big = small = first = second = 0.0
    for w, v, client in zip(weights, models, fed.clients, strict=True):
        cx, cy = client.x.flatten(1).double().numpy(), client.y.numpy()
        share = np.bincount(cy, minlength=3) / len(cy)
        at = share[y] / np.bincount(y, minlength=3)[y]
        local = (at * log_loss(v, x, y)).sum() - log_loss(v, cx, cy).mean()
        skew = log_loss(mean, cx, cy).mean() - log_loss(v, cx, cy).mean()
        gap += w * ((at * log_loss(mean, x, y)).sum() - log_loss(mean, cx, cy).mean())
        big, small = big + local / 3, small + skew / 3
        first += w**3 * local
        second += 2 * w**2 * np.sqrt(max(skew, 0) * max(local, 0))
    assert row["generalization/gap"] == near(gap, TRAINING)
    assert row["generalization/local_gap"] == near(big, TRAINING)
    assert row["generalization/skew"] == near(small, TRAINING)
    assert row["generalization/bound_first"] == near(first, TRAINING)
    assert row["generalization/bound_second"] == near(second, TRAINING)
    assert row["generalization/round"] == near(2 * first + np.sqrt(2) * second, TRAINING)
    assert row["generalization/ratio"] == near(gap / big, TRAINING)


def test_the_bound_under_partial_participation_is_that_by_hand():
    """Two of four clients take part: both schemes of Appendix C, with the sum over all clients estimated from two."""
    fed = blobs([12, 20, 16, 9])
    run = {"model": "logistic", "rounds": 1, "lr": 0.1, "precision": "fp64", "engine": "inline", "participation": 0.5}
    row = unskew.run(fed, **run, diagnose="generalization").history[0]
    spy = Spy()
    unskew.run(fed, method=spy, **run)
    taking_part = [k for k, n in enumerate((12, 20, 16, 9)) if n in {int(w) for _, w in spy.seen}]
    models = [v.numpy() for v, _ in spy.seen]
    counts = np.array([12, 20, 16, 9])[taking_part]
    mean = sum(n * v for n, v in zip(counts / counts.sum(), models, strict=True))
    x, y = fed.test[0].flatten(1).double().numpy(), fed.test[1].numpy()
    expected = dict.fromkeys(("scheme1_first", "scheme1_second", "scheme2_first", "scheme2_second"), 0.0)
    for k, v in zip(taking_part, models, strict=True):
        client = fed.clients[k]
        cx, cy = client.x.flatten(1).double().numpy(), client.y.numpy()
        at = (np.bincount(cy, minlength=3) / len(cy))[y] / np.bincount(y, minlength=3)[y]
        local = (at * log_loss(v, x, y)).sum() - log_loss(v, cx, cy).mean()
        skew = log_loss(mean, cx, cy).mean() - log_loss(v, cx, cy).mean()
        w = len(cy) / 57
        for scheme, inner in (("scheme1", 1 / 2), ("scheme2", w * 4 / 2)):
            expected[f"{scheme}_first"] += 4 / 2 * w * inner**2 * local
            expected[f"{scheme}_second"] += 4 / 2 * w * 2 * inner * np.sqrt(max(skew, 0) * max(local, 0))
    for name, value in expected.items():
        assert row[f"generalization/{name}"] == near(value, TRAINING)


def test_the_trend_is_the_mean_over_evaluated_rounds_also_after_a_resume(tmp_path):
    fed = blobs([12, 20, 16])
    run = {"model": "logistic", "lr": 0.1, "engine": "inline", "eval_every": 2, "diagnose": "generalization"}
    whole = unskew.run(fed, rounds=6, **run).history
    terms = [row["generalization/round"] for row in whole if row["accuracy"] is not None]
    assert len(terms) == 3
    assert whole[-1]["generalization/trend"] == near(np.mean(terms))
    unskew.run(fed, rounds=4, **run, out=tmp_path / "r")
    again = unskew.resume(tmp_path / "r", rounds=6, federation=fed).history
    assert again[-1]["generalization/trend"] == whole[-1]["generalization/trend"]


def test_iid_clients_may_get_so_many_samples_each():
    fed = unskew.load_federation("gaussians", partition="iid,each=50", clients=4, holdout=0, seed=1)
    assert [c.num_samples for c in fed.clients] == [50] * 4
    other = unskew.load_federation("gaussians", partition="iid,each=50", clients=4, holdout=0, seed=2)
    assert not torch.equal(fed.clients[0].x, other.clients[0].x)
    owner = iid(np.zeros(100), 3, np.random.default_rng(0), each=7)
    assert np.bincount(owner + 1).tolist() == [79, 7, 7, 7]
    with pytest.raises(DataError, match="need 400"):
        iid(np.zeros(100), 4, np.random.default_rng(0), each=100)


def test_the_gaussians_are_what_they_say():
    source = unskew.data.sources.registry.load_source("gaussians")
    x, y = source.train.x.numpy(), source.train.y.numpy()
    for c in range(10):
        np.testing.assert_allclose(x[y == c].mean(0), np.full(10, c - 5.0), atol=0.15)
        np.testing.assert_allclose(np.cov(x[y == c].T), np.eye(10), atol=0.2)
