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
    client_states,
    flat,
    local,
    run,
    skewed,
    two_layers,
)
from torch import nn
from torch.nn.functional import cross_entropy

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.fedrod import FedRoD
from unskew.methods.registry import method

EXACT = 1e-12
HEAD = CLASSES * HIDDEN + CLASSES
SHARED = slice(0, BODY.stop + HEAD)
PERSONAL = slice(SHARED.stop, SHARED.stop + HEAD)


def losses(v, x, y, counts, gamma):
    """The losses of the generic and of the personal head at the parameters ``v [d]``."""
    w, b, g, c, p, e = torch.split(v, [HIDDEN * FEATURES, HIDDEN] + 2 * [CLASSES * HIDDEN, CLASSES])
    a = torch.tanh(x @ w.view(HIDDEN, FEATURES).T + b)
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
        size = {k: fed.clients[k].num_samples for k in cohort}
        x = x.clone()
        x[SHARED] = sum(size[k] * own[k][SHARED] for k in cohort) / sum(size.values())
    assert float((result.vector - x).abs().max()) < EXACT
    assert not result.vector[PERSONAL].any()
    states = client_states(tmp_path / "run")
    assert set(states) == set(own)
    for k, v in own.items():
        assert float((states[k]["model"] - v).abs().max()) < EXACT
        assert states[k]["model"][PERSONAL].any()


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


def test_a_bare_linear_model_gets_two_heads_and_others_are_rejected():
    bare, name = FedRoD().adapt(nn.Linear(3, 2, bias=False), "")
    x = torch.randn(4, 3)
    assert torch.equal(bare(x), bare.get_submodule(name).generic(x))
    with pytest.raises(ConfigError, match="fedrod needs a model with a linear head"):
        FedRoD().adapt(nn.Sequential(nn.Conv2d(1, 2, 1)), "0")


@pytest.mark.parametrize("other", ["fedlc", "fedrs", "ditto", "ft", "apfl", "fedrep", "fedper", "fedbn", "scaffold"])
def test_rules_with_another_loss_or_personal_model_are_rejected(other):
    for expression in (f"fedrod+{other}", f"{other}+fedrod"):
        with pytest.raises(MethodConflictError):
            method(expression)


def test_clients_with_one_class_train_only_the_personal_head_and_a_warning_says_so():
    with pytest.warns(UserWarning, match="4 of 4 clients have samples of one class only.*Only their personal heads"):
        result, _ = run("fedrod", fed=skewed(present=1), model=two_layers(), momentum=0.0, weight_decay=0.0)
    assert torch.equal(result.vector, with_personal_head())
