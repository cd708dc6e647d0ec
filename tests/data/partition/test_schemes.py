"""The partition classes:S,alpha=A: exactly S classes per client, and Dirichlet shares within a class."""

import numpy as np
import pytest

from unskew.data.partition.partitioner import make_partition
from unskew.errors import ConfigError, DataError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))


def counts_of(spec, clients, seed=0, labels=LABELS):
    parts = make_partition(spec, labels, clients, seed, classes=10)
    assert sorted(parts.order.tolist()) == list(range(len(labels)))  # every sample once
    return np.stack([np.bincount(labels[parts.indices(k)], minlength=10) for k in range(clients)])


@pytest.mark.parametrize("each", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 100.0])
def test_each_client_has_exactly_s_classes(each, alpha):
    for seed in range(5):
        counts = counts_of(f"classes:{each},alpha={alpha}", 13, seed)
        assert ((counts > 0).sum(1) == each).all()
        per_class = (counts > 0).sum(0)
        assert per_class.max() - per_class.min() <= 1
        assert counts.sum(0).tolist() == [200] * 10


def test_shares_have_the_mean_and_variance_of_a_dirichlet_draw():
    # All clients have all classes: the rest, 200 - K samples, is Dirichlet(alpha) with variance (1/K)(1-1/K)/(K alpha + 1).
    clients, alpha, rest = 4, 0.5, 196
    shares = np.concatenate([(counts_of("classes:10,alpha=0.5", clients, seed) - 1) / rest for seed in range(300)], 1)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    n = shares.shape[1]
    assert np.abs(shares.mean(1) - 1 / clients).max() < 5 * np.sqrt(variance / n) + 1 / rest  # rounding: one sample
    assert shares.var(1) == pytest.approx(np.full(clients, variance), rel=0.1)


def test_a_large_alpha_divides_equally_and_seeds_matter():
    counts = counts_of("classes:2,alpha=1e9", 10)
    assert counts[counts > 0].tolist() == pytest.approx([100] * 20, abs=1)
    assert (counts_of("classes:2,alpha=1", 10) == counts_of("classes:2,alpha=1", 10)).all()
    assert (counts_of("classes:2,alpha=1", 10) != counts_of("classes:2,alpha=1", 10, seed=1)).any()


def test_impossible_values_raise():
    with pytest.raises(ConfigError, match="more than the 10 classes"):
        counts_of("classes:11,alpha=1", 10)
    with pytest.raises(ConfigError, match="some would not be used"):
        counts_of("classes:2,alpha=1", 4)
    with pytest.raises(DataError, match="among 10 clients"):
        counts_of("classes:10,alpha=1", 10, labels=np.repeat(np.arange(10), 5))
    with pytest.raises(ConfigError, match="alpha"):
        counts_of("classes:2,alpha=0", 10)
