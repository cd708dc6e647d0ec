"""FedUV against loops over its formula, and in its limits."""

import math

import pytest
import torch
from support.batch_loop import BODY, CLASSES, HIDDEN, average, deep_loss, features, flat, local, run, skewed, two_layers
from torch import nn

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.feduv import crowding, variance_gap
from unskew.methods.registry import method

EXACT = 1e-12


def terms(p, a):
    """Both terms of probabilities ``[B, C]`` and features ``[B, f]``, one pair after the other."""
    n, classes = p.shape
    gaps = []
    for c in range(classes):
        mean = p[:, c].sum() / n
        std = torch.sqrt(((p[:, c] - mean) ** 2).sum() / (n - 1))
        gaps.append(torch.relu(1 / math.sqrt(classes) - std))
    distances = torch.stack([((a[i] - a[j]) ** 2).sum() for i in range(n) for j in range(i + 1, n)])
    return torch.stack(gaps).mean(), torch.exp(-distances / distances[distances > 0].median()).mean()


def outputs(v, x):
    a, (u, c) = features(v, x), torch.split(v[BODY.stop :], [CLASSES * HIDDEN, CLASSES])
    return (a @ u.view(CLASSES, HIDDEN).T + c).softmax(1), a


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation):
    result, cohorts = run("feduv:lam=1.5,mu=0.7", participation, model=two_layers())

    def slope(v, x, y):
        v = v.clone().requires_grad_()
        variance, spread = terms(*outputs(v, x)) if len(x) > 1 else (0.0, 0.0)
        (g,) = torch.autograd.grad(deep_loss(v, x, y) + 1.5 * variance + 0.7 * spread, v)
        return g

    v, fed = flat(two_layers()), skewed()
    for cohort in cohorts:
        v = average(fed, {k: local(v, batches, slope) for k, batches in cohort.items()})
    assert float((result.vector - v).abs().max()) < EXACT


def test_without_both_terms_it_is_fedavg_and_each_term_changes_the_gradient():
    plain = run("fedavg", model=two_layers())[0].vector
    assert torch.equal(run("feduv:lam=0,mu=0", model=two_layers())[0].vector, plain)
    variance, spread = (run(f"feduv:{o}", model=two_layers())[0].vector for o in ("mu=0", "lam=0"))
    assert float((variance - plain).abs().max()) > 1e-4
    assert float((spread - plain)[BODY].abs().max()) > 1e-4


@pytest.mark.parametrize("size", [2, 5, 9])
def test_both_terms_and_their_gradients_are_those_of_a_loop_over_pairs(size):
    torch.manual_seed(size)
    z, a = (torch.randn(size, n, dtype=torch.float64, requires_grad=True) for n in (CLASSES, 6))
    for own, loop in zip((variance_gap(z.softmax(1)), crowding(a)), terms(z.softmax(1), a), strict=True):
        assert float((own - loop).detach()) == pytest.approx(0, abs=EXACT)
        gradients = [torch.autograd.grad(t, (z, a), retain_graph=True, allow_unused=True) for t in (own, loop)]
        for mine, other in zip(*gradients, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or float((mine - other).abs().max()) < EXACT


def test_one_prediction_of_each_class_has_no_gap_and_equal_predictions_the_largest():
    one_hot = torch.eye(CLASSES, dtype=torch.float64)
    assert float(variance_gap(one_hot)) == pytest.approx(0, abs=EXACT)
    equal = torch.full((6, CLASSES), 1 / CLASSES, dtype=torch.float64, requires_grad=True)
    gap = variance_gap(equal)
    assert float(gap.detach()) == pytest.approx(CLASSES**-0.5)
    gap.backward()
    assert not equal.grad.any()


def test_two_samples_give_1_over_e_without_a_gradient_and_equal_ones_1():
    a = torch.tensor([[1.0, 2.0], [0.5, 4.0]], dtype=torch.float64, requires_grad=True)
    value = crowding(a)
    value.backward()
    assert float(value.detach()) == pytest.approx(math.exp(-1))
    assert float(a.grad.abs().max()) < EXACT
    assert float(crowding(torch.ones(4, 3))) == 1


def test_equal_samples_do_not_count_in_the_median():
    a = torch.tensor([[0.0], [0.0], [0.0], [3.0], [10.0]], dtype=torch.float64)
    # Nonzero squared distances: 9, 9, 9, 49, 100, 100, 100; three pairs are equal.
    expected = (3 + 3 * math.exp(-9 / 49) + math.exp(-1) + 3 * math.exp(-100 / 49)) / 10
    assert float(crowding(a)) == pytest.approx(expected, abs=EXACT)


def test_a_step_along_the_terms_raises_the_variance_and_spreads_the_features():
    torch.manual_seed(0)
    z, a = (torch.randn(8, n, dtype=torch.float64, requires_grad=True) for n in (CLASSES, 5))
    (gz,), (ga,) = torch.autograd.grad(variance_gap(z.softmax(1)), z), torch.autograd.grad(crowding(a), a)
    assert (z - 0.1 * gz).softmax(1).std(0).mean() > z.softmax(1).std(0).mean()
    assert crowding(a - 0.01 * ga) < crowding(a)


def test_a_batch_of_one_sample_trains_without_the_terms():
    options = {"batch_size": 1, "model": two_layers()}
    assert torch.equal(run("feduv", **options)[0].vector, run("fedavg", **options)[0].vector)


def test_a_model_without_a_body_is_warned_about():
    with pytest.warns(UserWarning, match="mu has no effect"):
        run("feduv", rounds=1)


def test_it_sends_the_model_only():
    summary = run("feduv", 0.5, model=two_layers())[0].summary
    assert summary["bytes_down"] == summary["bytes_up"] == 4 * 2 * summary["parameters"] * 8


def test_other_tasks_and_sample_privacy_are_rejected():
    with pytest.raises(MethodConflictError, match="feduv changes the loss of a batch"):
        method("feduv+dpsgd:noise=1")
    clients = [(torch.randn(9, 3).numpy(), torch.randn(9).numpy())] * 2
    fed = unskew.Federation.from_arrays(clients, test=clients[0], task="regression", holdout=0)
    with pytest.raises(ConfigError, match="feduv"):
        unskew.run(fed, model=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), method="feduv", rounds=1)
