"""FedNova against Algorithm 1 in NumPy, and where it goes when clients take unequal numbers of steps."""

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.quadratic import Quadratics, gradient, optimum, problem, sizes
from support.tolerance import TRAINING, assert_close, near

import unskew
from unskew.engines.batches import BatchPlan
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.registry import method
from unskew.protocol.training_config import Training


def weight_of_gradients(steps, rho):
    """``||a_k||_1``: how far SGD gets in so many steps where every gradient is 1 and the rate, too."""
    moment = moved = 0.0
    for _ in range(steps):
        moment = rho * moment + 1.0
        moved += moment
    return moved


def algorithm_1(A, b, training, rounds, cohort, p):
    """The clients' batches are the run's; all else is NumPy."""
    x, path = np.zeros(A[0].shape[1]), []
    for t in range(rounds):
        chosen = cohort(t)
        share = {k: p[k] / sum(p[j] for j in chosen) for k in chosen}
        direction, tau_eff = np.zeros_like(x), 0.0
        for k in chosen:
            v, moment = x.copy(), np.zeros_like(x)
            batches = BatchPlan(training, len(A[k]), 0, t, k).batches
            for rows in (index.numpy() for index in batches):
                moment = training.momentum * moment + gradient(A[k][rows], b[k][rows], v)
                v -= training.lr * moment
            length = weight_of_gradients(len(batches), training.momentum)
            direction += share[k] * (v - x) / length
            tau_eff += share[k] * length
        x = x + tau_eff * direction
        path.append(x)
    return path


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_it_is_algorithm_1_with_unequal_steps(momentum, engine):
    A, b = problem(sizes=(3, 7, 5, 9))
    training = Training(local_epochs=2, batch_size=2, lr=0.03, momentum=momentum, precision="fp64")
    run = Quadratics(A, b, "fednova", training, participation=0.75, engine=engine)
    found = run.rounds(3)
    assert_close(found, algorithm_1(A, b, training, 3, run.sampler.draw, sizes(A)), TRAINING)
    plain = Quadratics(A, b, "fedavg", training, participation=0.75).rounds(3)[-1]
    assert np.abs(plain - found[-1]).max() > 0.01, "the test could not fail otherwise"


@pytest.mark.parametrize("budget", [{"local_steps": 4}, {"local_steps": 4, "momentum": 0.9, "weight_decay": 0.1}])
def test_with_equal_steps_it_is_fedavg(budget):
    A, b = problem()
    training = Training(batch_size=2, lr=0.03, precision="fp64", **budget)
    mine, plain = (Quadratics(A, b, name, training, participation=0.75).rounds(4) for name in ("fednova", "fedavg"))
    assert_close(mine, plain, TRAINING)


@pytest.mark.slow
def test_it_goes_to_the_optimum_from_which_unequal_epochs_lead_fedavg_away():
    """All samples of a client are the same, so a step has no noise. FedAvg goes where steps count, as the paper says."""
    A = [np.full((n, 1), a) for n, a in ((1, 1.0), (5, 0.7), (2, 1.3))]
    b = [np.full(len(a), y) for a, y in zip(A, (3.0, -1.0, 0.5), strict=True)]
    training, p = Training(local_epochs=1, batch_size=1, lr=0.02, precision="fp64"), np.full(3, 1 / 3)
    best, by_steps = float(optimum(A, b, p)[0]), float(optimum(A, b, sizes(A))[0])
    nova, average = (
        float(Quadratics(A, b, name, training, "uniform").rounds(120)[-1][0]) for name in ("fednova", "fedavg")
    )
    # What is left is of the order of the rate times the steps.
    assert abs(nova - best) < 0.1 * abs(average - best)
    assert abs(average - by_steps) < 0.1 * abs(average - best)


def train(chosen, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "engine": "inline", **options}
    return unskew.run(blobs([12, 23, 17]), model=SmallBatchNorm(dropout=0.0), method=chosen, **given)


def test_a_client_sends_one_number_more_and_sums_suffice():
    mine, plain = train("fednova", secure_aggregation="required").summary, train("fedavg").summary
    assert mine["bytes_up"] == plain["bytes_up"] + 3 * 3 * 8
    assert mine["buffer_bytes_up"] == plain["buffer_bytes_up"] > 0
    assert mine["bytes_down"] == plain["bytes_down"]


def test_the_local_models_that_are_measured_are_the_clients_own():
    options = {"local_steps": 4, "diagnose": "local_models"}
    mine, plain = (train(name, **options) for name in ("fednova", "fedavg"))
    for row, expected in zip(mine.history, plain.history, strict=True):
        for name in ("local_distance", "local_accuracy", "local_personal_accuracy"):
            assert row[name] == near(expected[name], TRAINING), name
    assert_close(mine.model.norm.running_var, plain.model.norm.running_var, TRAINING)


@pytest.mark.parametrize("budget", [{"optimizer": "adam"}, {"optimizer": "adamw"}, {"momentum": 0.9, "nesterov": True}])
def test_an_optimizer_whose_gradients_add_up_otherwise_is_refused(budget):
    with pytest.raises(ConfigError, match="Use optimizer=sgd without nesterov"):
        train("fednova", **budget)


@pytest.mark.parametrize("other", ["fedals", "fedrep", "fedbn", "fedgen"])
def test_sums_that_read_or_cut_the_update_are_refused(other):
    for spelling in (f"fednova+{other}", f"{other}+fednova"):
        with pytest.raises(MethodConflictError, match=f"fednova.*{other}|{other}.*fednova"):
            method(spelling)
