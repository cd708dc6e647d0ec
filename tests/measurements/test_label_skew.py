"""Label skew from two exchanges of sums, against loops over the pooled rows."""

import math

import pytest
import torch

import unskew
from unskew.measurements.label_skew import LabelSkew, label_skew_metrics
from unskew.measurements.site_differences import site_differences
from unskew.sums.base import ClientRows
from unskew.sums.exchange import SimulatedExchange
from unskew.sums.statistics import skew_metrics


@pytest.fixture(scope="module")
def digits():
    return unskew.load_federation("digits", partition="dirichlet:0.3", clients=6, holdout=0.0)


def by_rows(labels, classes):
    """The metrics of a list of labels per client, row by row."""
    everyone = [label for own in labels for label in own]
    q = [sum(label == c for label in everyone) / len(everyone) for c in range(classes)]
    distances, gaps, effective, roots = [], [], [], []
    between = 0.0
    for own in labels:
        p = [sum(label == c for label in own) / len(own) for c in range(classes)]
        distances.append(sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)
        gaps.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
        effective.append(math.exp(-sum(a * math.log(a) for a in p if a > 0)))
        roots.append(((1 - 1 / len(labels)) / len(own)) ** 0.5)
        between += len(own) * sum((a - b) ** 2 for a, b in zip(p, q, strict=True))
    K, n = len(labels), len(everyone)
    scatter = n * sum(b * (1 - b) for b in q)
    return {
        "label_distance_mean": sum(distances) / K,
        "label_distance_chance": sum(math.sqrt(b * (1 - b)) for b in q) / math.sqrt(2 * math.pi) * sum(roots) / K,
        "label_entropy_gap": sum(gaps) / K,
        "effective_clients": n**2 / sum(len(own) ** 2 for own in labels),
        "effective_classes": sum(effective) / K,
        "label_between": (between - (K - 1) * (scatter - between) / (n - K)) / scatter,
        "label_distance_max": max(distances),
    }


def test_label_skew_from_sums_equals_loops_over_rows(digits):
    expected = by_rows([client.y.tolist() for client in digits.clients], digits.classes)
    rows = [ClientRows(y=c.y, class_counts=lambda c=c: c.y.bincount(minlength=10)) for c in digits.clients]
    found = skew_metrics(SimulatedExchange(lambda: rows), [LabelSkew(digits.classes)])
    assert found.pop("label_distance_max") is None
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-14)
    simulated = label_skew_metrics(digits, range(6))
    assert simulated == pytest.approx({name: expected[name] for name in simulated}, rel=1e-14)
    assert site_differences(digits).label_between == pytest.approx(expected["label_between"], rel=1e-12)


def test_a_subset_of_clients_is_compared_with_itself_and_the_effective_number_counts_all(digits):
    found = label_skew_metrics(digits, [0, 3])
    labels = [client.y.tolist() for client in digits.clients]
    expected = by_rows([labels[0], labels[3]], digits.classes)
    assert found["label_distance_mean"] == pytest.approx(expected["label_distance_mean"], rel=1e-14)
    assert found["effective_clients"] == pytest.approx(by_rows(labels, digits.classes)["effective_clients"])


def test_noisy_counts_below_0_count_as_0():
    counts = [torch.tensor([5, -2, 0]), torch.tensor([-1, 1, 4])]
    rows = [ClientRows(y=torch.zeros(5), class_counts=lambda own=own: own) for own in counts]
    found = skew_metrics(SimulatedExchange(lambda: rows), [LabelSkew(3)])
    assert all(value is None or math.isfinite(value) for value in found.values())
