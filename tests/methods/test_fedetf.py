"""FedETF against a loop over the paper's formula, and in its limits."""

import math

import numpy as np
import pytest
import torch
from support.batch_loop import (
    BODY,
    CLASSES,
    DECAY,
    FEATURES,
    HIDDEN,
    LR,
    MOMENTUM,
    average,
    features,
    local,
    run,
    skewed,
    two_layers,
)
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.errors import ConfigError
from unskew.methods.fedetf import FedETF, equal_angle_vectors

EXACT = 1e-12
WIDTH, SCALE = 6, 4.0
SIZES = [1, WIDTH * HIDDEN, WIDTH]
"""Sizes of the head's parameters; the module's own one comes before those of the projection."""


def in_model(width):
    """The class vectors of a model, which is created in single precision."""
    return equal_angle_vectors(width, CLASSES).float().double()


def loss(v, x, y, counts, gamma):
    s, u, c = torch.split(v[BODY.stop :], SIZES)
    h = features(v, x) @ u.view(WIDTH, HIDDEN).T + c
    z = s * (h / torch.sqrt((h**2).sum(1, keepdim=True))) @ in_model(WIDTH)
    return cross_entropy(z + gamma * torch.log(torch.where(counts > 0, counts, 1.0)), y)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("gamma", [1.0, 0.0])
def test_a_run_is_the_papers_loop(gamma, participation):
    expression = f"fedetf:width={WIDTH},scale={SCALE},gamma={gamma}"
    start = run(expression, rounds=1, lr=1e-300, weight_decay=0.0, model=two_layers())[0].vector
    result, cohorts = run(expression, participation, model=two_layers())
    slope, fed = torch.func.grad(loss), skewed()
    counts = [torch.bincount(client.y, minlength=CLASSES).double() for client in fed.clients]
    assert float(start[BODY.stop]) == SCALE
    v = start
    for cohort in cohorts:
        ends = {
            k: local(v, batches, lambda u, x, y, n=counts[k]: slope(u, x, y, n, gamma), LR, MOMENTUM, DECAY)
            for k, batches in cohort.items()
        }
        v = average(fed, ends)
    assert float((result.vector - v).abs().max()) < EXACT
    assert float(result.vector[BODY.stop]) != SCALE


@pytest.mark.parametrize(("width", "classes"), [(4, 4), (9, 4), (3, 2)])
def test_class_vectors_are_unit_vectors_of_equal_angles(width, classes):
    m = equal_angle_vectors(width, classes)
    expected = classes / (classes - 1) * (np.eye(classes) - 1 / classes)
    assert float((m.T @ m - torch.from_numpy(expected)).abs().max()) < EXACT
    assert torch.equal(m, equal_angle_vectors(width, classes))


def test_with_equal_class_counts_the_correction_has_no_effect():
    draws = np.random.default_rng(2)
    clients = [(draws.normal(size=(n, FEATURES)), np.arange(n) % CLASSES) for n in (8, 12, 16, 8)]
    fed = unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0)
    one, other = (run(f"fedetf:gamma={g}", 0.5, fed, two_layers())[0].vector for g in (0, 1.7))
    assert float((one - other).abs().max()) < EXACT
    one, other = (run(f"fedetf:gamma={g}", 0.5, model=two_layers())[0].vector for g in (0, 1.7))
    assert float((one - other).abs().max()) > 1e-4


def test_the_gradient_of_projected_features_is_orthogonal_to_them():
    head = FedETF(width=WIDTH).new_head(nn.Linear(WIDTH, CLASSES).double())
    with torch.no_grad():
        head.projection.weight.copy_(torch.eye(WIDTH))
        head.projection.bias.zero_()
    a = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    cross_entropy(head(a), torch.randint(CLASSES, (5,))).backward()
    assert a.grad.abs().max() > 1e-3
    assert float((a.grad * a.detach()).sum(1).abs().max()) < EXACT


def test_class_vectors_are_constants_that_are_neither_sent_nor_trained():
    result, _ = run("fedetf:width=5", 0.5, model=two_layers())
    size = BODY.stop + 1 + 5 * HIDDEN + 5
    assert result.summary["parameters"] == size
    assert result.summary["bytes_down"] == result.summary["bytes_up"] == 4 * 2 * size * 8
    assert torch.equal(result.model[2].frame, in_model(5))


def test_without_a_width_the_larger_one_of_classes_and_features_is_used():
    for size, width in ((3, CLASSES), (20, 20)):
        assert FedETF().new_head(nn.Linear(size, CLASSES)).projection.out_features == width


def test_a_width_below_the_number_of_classes_is_rejected():
    with pytest.raises(ConfigError, match=r"there are 4 classes and width=3\. Use width=4 or more"):
        run("fedetf:width=3", model=two_layers())


def test_a_projection_of_moon_comes_before_the_classifier_and_fine_tuning_after_the_run():
    summary = run("moon:projection=5+fedetf", rounds=2, model=two_layers())[0].summary
    assert math.isfinite(summary["accuracy"])
    assert "personal_accuracy_mean" in run("fedetf+ft", rounds=1, model=two_layers())[0].summary
