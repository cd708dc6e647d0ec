"""FedAMP against a loop over the paper's formulas, and in its limits."""

import numpy as np
import pytest
import torch
from support.batch_loop import (
    OPTIONS,
    SIZES,
    check_client_models,
    classifier,
    client_states,
    initial,
    local,
    loss,
    run,
    skewed,
)
from support.quadratic import LR, STEPS, Quadratics
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError

EXACT = 1e-12
D = len(initial())
slope = torch.func.grad(loss)
pytestmark = pytest.mark.filterwarnings("ignore:With fedamp, clients send")


def weights(kernel, models, k, alpha, sigma, own):
    """The weights of the models in the mixture of client ``k``, by client."""
    others = [j for j in models if j != k]
    if kernel == "exponential":
        xi = {j: alpha / sigma * float(torch.exp(-(models[k] - models[j]).square().sum() / sigma)) for j in others}
        return {**xi, k: 1 - sum(xi.values())}
    raw = {j: float(torch.exp(sigma * models[k] @ models[j] / models[k].norm() / models[j].norm())) for j in others}
    own = 1 / len(models) if own is None else own
    return {**{j: (1 - own) * value / sum(raw.values()) for j, value in raw.items()}, k: own}


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("kernel", "alpha", "sigma", "lam", "own"),
    [("cosine", 1.0, 25.0, 1.0, None), ("cosine", 2.0, 3.0, 0.7, 0.4), ("exponential", 0.5, 4.0, 0.3, None)],
)
def test_a_run_is_the_papers_loop(kernel, alpha, sigma, lam, own, participation, tmp_path):
    fed = skewed()
    options = f"kernel={kernel},alpha={alpha},sigma={sigma},lam={lam}" + ("" if own is None else f",own={own}")
    result, cohorts = run(f"fedamp:{options}", participation, fed, out=tmp_path / "run")
    models = {}
    for cohort in cohorts:
        new = {}
        for k, batches in cohort.items():
            direction = slope
            if k in models and len(models) > 1:
                xi = weights(kernel, models, k, alpha, sigma, own)
                u = sum(xi[j] * models[j] for j in models)

                def direction(v, x, y, u=u):
                    return slope(v, x, y) + lam / alpha * (v - u)

            new[k] = local(models.get(k, initial()), batches, direction)
        models = {**models, **new}
    check_client_models(tmp_path / "run", models)
    assert torch.equal(result.vector, initial())
    largest = max(weights(kernel, models, k, alpha, sigma, own)[j] for k in models for j in models if j != k)
    assert result.summary["largest_weight"] == pytest.approx(largest, abs=EXACT)


def test_one_round_of_two_scalar_quadratics_is_the_closed_form():
    """The pull is a second quadratic, so ``w`` approaches the weighted mean of ``b`` and ``u`` geometrically."""
    targets, alpha, sigma, lam = (1.0, 3.0), 0.5, 2.0, 0.8
    federated = Quadratics(
        [np.ones((1, 1))] * 2, [np.array([b]) for b in targets],
        f"fedamp:kernel=exponential,alpha={alpha},sigma={sigma},lam={lam}",
    )  # fmt: skip
    federated.rounds(2)
    w = [b * (1 - (1 - LR) ** STEPS) for b in targets]
    xi = alpha / sigma * np.exp(-((w[0] - w[1]) ** 2) / sigma)
    for k, b in enumerate(targets):
        u = w[k] + xi * (w[1 - k] - w[k])
        end = (b + lam / alpha * u) / (1 + lam / alpha)
        expected = end + (1 - LR * (1 + lam / alpha)) ** STEPS * (w[k] - end)
        assert_close(federated.server.clients.store.get(k)["model"].numpy(), np.array([expected]), TRAINING)


@pytest.mark.parametrize("kernel", ["cosine", "exponential"])
def test_equal_clients_stay_equal(kernel):
    draws = np.random.default_rng(0)
    a, b = draws.normal(size=(6, 3)), draws.normal(size=6)
    federated = Quadratics([a] * 3, [b] * 3, f"fedamp:kernel={kernel}")
    federated.rounds(4)
    models = [federated.server.clients.store.get(k)["model"].numpy() for k in range(3)]
    for other in models[1:]:
        assert_close(other, models[0], TRAINING)
    assert np.abs(models[0]).max() > 0.1


def test_without_pull_it_is_local_training_bit_for_bit(tmp_path):
    for name, method in (("alone", "local"), ("free", "fedamp:lam=0")):
        unskew.run(
            skewed(), model=classifier(), method=method, participation=0.5, precision="fp64", engine="inline",
            out=tmp_path / name, **OPTIONS,
        )  # fmt: skip
    alone, free = (client_states(tmp_path / name) for name in ("alone", "free"))
    assert set(alone) == set(free) != set()
    for k in alone:
        assert torch.equal(alone[k]["model"], free[k]["model"])


def test_a_stronger_pull_brings_models_together(tmp_path):
    spread = []
    for lam in (0, 0.3, 3):
        run(f"fedamp:lam={lam}", out=tmp_path / str(lam))
        models = torch.stack([state["model"] for state in client_states(tmp_path / str(lam)).values()])
        spread.append(float((models - models.mean(0)).norm()))
    assert spread[0] > spread[1] > spread[2]


def test_bytes_are_those_of_the_formula():
    """The model up; the mixture down, from a client's second round on."""
    summary = run("fedamp")[0].summary
    visits = OPTIONS["rounds"] * len(SIZES)
    assert summary["bytes_up"] == visits * D * 8
    assert summary["bytes_down"] == (visits - len(SIZES)) * D * 8


def test_an_exponential_kernel_that_underflows_warns():
    with pytest.warns(UserWarning, match="no client's model had a weight above 1e-06 for another client"):
        run("fedamp:kernel=exponential,sigma=1e-3,alpha=1e-4")


def test_negative_weights_warn_and_options_without_an_effect_are_rejected():
    with pytest.warns(UserWarning, match="can have a negative weight"):
        run("fedamp:kernel=exponential,sigma=2,alpha=1", rounds=1)
    with pytest.raises(ConfigError, match="fedamp:own has no effect with kernel=exponential"):
        run("fedamp:kernel=exponential,own=0.5", rounds=1)


def test_too_many_models_for_the_server_are_rejected(monkeypatch):
    monkeypatch.setattr("unskew.methods.stored_models.LARGEST", 8 * D * len(SIZES) - 1)
    with pytest.raises(ConfigError, match="stores a model for each client at the server"):
        run("fedamp", rounds=1)
