"""Synthetic(alpha, beta) and FCUBE: sizes, marginals and labels that follow from their definitions."""

import numpy as np
import pytest
import sklearn.datasets

import unskew
from unskew.data.sources.registry import load_source
from unskew.errors import ConfigError


def every(source):
    x = np.concatenate([source.train.x.numpy(), source.test.x.numpy()]).astype(np.float64)
    y = np.concatenate([source.train.y.numpy(), source.test.y.numpy()])
    return x, y, np.concatenate([source.train.columns["client"], source.test.columns["client"]])


@pytest.mark.parametrize(("alpha", "beta"), [(0, 0), (1, 1), (0.5, 20)])
def test_synthetic_has_the_marginals_of_its_definition(alpha, beta):
    source = load_source(f"synthetic:{alpha},{beta}")
    x, y, client = every(source)
    assert x.shape[1] == 60
    assert set(y) <= set(range(10))
    sizes = np.bincount(client)
    assert len(sizes) == 30
    assert sizes.min() >= 50
    # log(size - 50) is N(4, 2), apart from truncation to integers and zeros.
    logs = np.log(np.maximum(sizes - 50, 1))
    assert abs(logs.mean() - 4) < 5 * 2 / np.sqrt(30)
    assert 1 < logs.std() < 3
    test_sizes = np.bincount(source.test.columns["client"], minlength=30)
    assert np.abs(test_sizes - sizes / 10).max() <= 1
    largest = x[client == sizes.argmax()]
    expected = np.arange(1, 61) ** -1.2
    assert largest.var(0) == pytest.approx(expected, rel=6 * np.sqrt(2 / len(largest)))
    # Centers: within a client N(B_k, 1) over 60 features, so that a client's mean has variance beta^2 + 1/60.
    centers = np.array([x[client == k].mean(0).mean() for k in range(30)])
    deviation = np.sqrt(beta**2 + 1 / 60)
    assert 0.5 * deviation < np.sqrt(np.square(centers).mean()) < 1.6 * deviation


def test_the_labels_of_a_client_are_linearly_separable():
    x, y, client = every(load_source("synthetic:1,1"))
    k = np.bincount(client).argmax()
    inputs, labels = np.column_stack([x[client == k], np.ones((client == k).sum())]), y[client == k]
    # A multiclass perceptron on separable data reaches a much higher accuracy on its client than on the others.
    weights = np.zeros((61, 10))
    for _ in range(20):
        for row, label in zip(inputs[:2000], labels[:2000], strict=True):
            guess = int((row @ weights).argmax())
            if guess != label:
                weights[:, label] += row
                weights[:, guess] -= row
    others = np.column_stack([x[client != k], np.ones((client != k).sum())])
    own = ((inputs @ weights).argmax(1) == labels).mean()
    assert own > 0.9
    assert own > ((others @ weights).argmax(1) == y[client != k]).mean() + 0.3


def test_fcube_is_two_octants_per_client():
    source = load_source("fcube")
    assert (len(source.train), len(source.test), source.classes) == (4000, 1000, 2)
    x, y, client = every(source)
    assert np.array_equal(y, x[:, 0] > 0)
    assert np.abs(x).max() <= 1
    assert x.var(0) == pytest.approx([1 / 3] * 3, rel=0.05)
    for k in range(4):
        signs = {tuple(row) for row in np.sign(x[client == k]).astype(int)}
        assert len(signs) == 2
        a, b = signs
        assert a == tuple(-s for s in b)
    assert np.bincount(client) == pytest.approx([1250] * 4, abs=5 * np.sqrt(5000 * 0.25 * 0.75))


def test_the_natural_partition_has_the_clients():
    for name, count in (("synthetic:1,1", 30), ("fcube", 4)):
        fed = unskew.load_federation(name, partition="natural:client")
        assert len(fed.clients) == count
        assert fed.client_names == tuple(map(str, range(count)))


@pytest.mark.parametrize("name", ["synthetic", "synthetic:1", "synthetic:a,b", "synthetic:-1,1", "synthetic:nan,1"])
def test_wrong_parameters_raise(name):
    with pytest.raises(ConfigError, match="synthetic:ALPHA,BETA"):
        load_source(name)


def test_paths_and_labels_are_rejected():
    with pytest.raises(ConfigError, match="is built in"):
        load_source("synthetic:1,1", label="y")
    with pytest.raises(ConfigError, match="is built in"):
        load_source("fcube", path="x")


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "diabetes"])
def test_tables_of_scikit_learn_have_all_rows_once(name):
    source = load_source(name)
    expected = getattr(sklearn.datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    x, y = (
        np.concatenate([part, other]) for part, other in zip(arrays(source.train), arrays(source.test), strict=True)
    )
    rows = np.column_stack([x, y])
    given = np.column_stack([expected.data, expected.target]).astype(np.float32)
    assert np.array_equal(rows[np.lexsort(rows.T)], given[np.lexsort(given.T)])
    assert len(source.test) == round(0.2 * len(given))
    assert np.allclose(source.train.columns[expected.feature_names[0]], source.train.x[:, 0], rtol=1e-6)
    if name != "diabetes":
        shares = [np.bincount(part.y) / len(part) for part in (source.train, source.test)]
        assert np.abs(shares[0] - shares[1]).max() < source.classes / len(source.test) + 1e-9


def arrays(part):
    return part.x.numpy(), part.y.numpy().reshape(len(part), 1).astype(np.float32)
