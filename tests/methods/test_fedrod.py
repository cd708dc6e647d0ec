"""FedRoD against a loop over the paper's formula, and in its limits."""

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
    check_client_models,
    features,
    flat,
    local,
    run,
    skewed,
    two_layers,
)
from torch.nn.functional import cross_entropy

import unskew
from unskew.methods.fedrod import FedRoD

EXACT = 1e-12
HEAD = CLASSES * HIDDEN + CLASSES
SHARED = slice(0, BODY.stop + HEAD)
PERSONAL = slice(SHARED.stop, SHARED.stop + HEAD)


def losses(v, x, y, counts, gamma):
    """The losses of the generic and of the personal head at the parameters ``v [d]``."""
    g, c, p, e = torch.split(v[BODY.stop :], 2 * [CLASSES * HIDDEN, CLASSES])
    a = features(v, x)
    generic = a @ g.view(CLASSES, HIDDEN).T + c
    personal = generic.detach() + a.detach() @ p.view(CLASSES, HIDDEN).T + e
    return cross_entropy(generic + gamma * torch.log(counts), y), cross_entropy(personal, y)


def both(v, x, y, counts, gamma):
    return sum(losses(v, x, y, counts, gamma))


def with_personal_head():
    """The initial model: that of ``two_layers`` and a personal head of zeros."""
    return torch.cat([flat(two_layers()), torch.zeros(HEAD, dtype=torch.float64)])


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("gamma", [1, 0.6])
def test_a_run_is_the_papers_loop(gamma, participation, tmp_path):
    fed = skewed()
    result, cohorts = run(f"fedrod:gamma={gamma}", participation, fed, two_layers(), out=tmp_path / "run")
    slope = torch.func.grad(both)
    counts = [torch.bincount(client.y, minlength=CLASSES).double() for client in fed.clients]
    assert all((n == 0).any() for n in counts)
    x, own = with_personal_head(), {}
    for cohort in cohorts:
        for k, batches in cohort.items():
            start = own.get(k, with_personal_head()).clone()
            start[SHARED] = x[SHARED]
            own[k] = local(start, batches, lambda v, u, y, n=counts[k]: slope(v, u, y, n, gamma), LR, MOMENTUM, DECAY)
        x = x.clone()
        x[SHARED] = average(fed, {k: own[k][SHARED] for k in cohort})
    assert float((result.vector - x).abs().max()) < EXACT
    assert not result.vector[PERSONAL].any()
    check_client_models(tmp_path / "run", own)
    assert all(v[PERSONAL].any() for v in own.values())


def test_with_equal_class_counts_the_generic_model_is_that_of_fedavg():
    draws = np.random.default_rng(2)
    clients = [(draws.normal(size=(n, FEATURES)), np.arange(n) % CLASSES) for n in (8, 12, 16, 8)]
    fed = unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0)
    two, plain = (run(name, 0.5, fed, two_layers())[0].vector for name in ("fedrod", "fedavg"))
    assert float((two[SHARED] - plain).abs().max()) < EXACT


def test_absent_classes_get_no_gradient():
    counts = torch.tensor([3.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    z = torch.randn(5, CLASSES, dtype=torch.float64, requires_grad=True)
    cross_entropy(FedRoD().adjust(z, counts), torch.tensor([0, 2, 2, 0, 0])).backward()
    assert not z.grad[:, counts == 0].any()
    assert z.grad[:, counts > 0].all()


def test_bytes_are_those_of_the_model_without_the_personal_head():
    summary = run("fedrod", 0.5, model=two_layers())[0].summary
    assert summary["parameters"] == PERSONAL.stop
    assert summary["bytes_down"] == summary["bytes_up"] == 4 * 2 * SHARED.stop * 8


def test_clients_with_one_class_train_only_the_personal_head_and_a_warning_says_so():
    with pytest.warns(UserWarning, match="4 of 4 clients have samples of one class only.*Only their personal heads"):
        result, _ = run("fedrod", fed=skewed(present=1), model=two_layers(), momentum=0.0, weight_decay=0.0)
    assert torch.equal(result.vector, with_personal_head())
