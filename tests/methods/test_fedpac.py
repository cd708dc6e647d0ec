"""FedPAC against a loop over the paper's formulas, its program against all active sets, and its limits."""

import itertools

import numpy as np
import pytest
import torch
from support.batch_loop import (
    BODY,
    CLASSES,
    FEATURES,
    HIDDEN,
    LR,
    OPTIONS,
    average,
    check_client_models,
    client_states,
    deep_loss,
    features,
    flat,
    run,
    skewed,
    two_layers,
)
from torch import nn
from torch.nn.functional import one_hot

import unskew
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.errors import ConfigError
from unskew.methods.fedpac import mixing_weights
from unskew.serving.load import open_run

EXACT = 1e-12
LAM, SHARE = 2.0, 0.4
SIZE = len(flat(two_layers()))
HEAD = slice(BODY.stop, SIZE)
BUDGET = {"momentum": 0.0, "weight_decay": 0.0}


def aligned(v, x, y, goals):
    """The loss of a step; without the second term if there are no goals."""
    loss = deep_loss(v, x, y)
    return loss if goals is None else loss + LAM * ((features(v, x) - goals[y]) ** 2).mean()


def weights_by_active_sets(shares, variances):
    """The weights of all clients: the best of the solutions for each set of clients whose weights are not 0."""
    m, gram = len(variances), shares @ shares.T
    alpha = np.eye(m)
    for k in range(m):
        best = np.inf
        for n in range(1, m + 1):
            for active in map(list, itertools.combinations(range(m), n)):
                system = np.ones((n + 1, n + 1))
                system[:n, :n], system[n, n] = 2 * (np.diag(variances) + gram)[np.ix_(active, active)], 0
                solution = np.linalg.lstsq(system, np.append(2 * gram[active, k], 1), rcond=None)[0][:n]
                x = np.zeros(m)
                x[active] = solution
                value = x**2 @ variances + np.sum((shares[k] - x @ shares) ** 2)
                if (x >= 0).all() and value < best:
                    best, alpha[k] = value, x
    alpha[alpha < 1e-3] = 0
    return alpha / alpha.sum(1, keepdims=True)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_is_the_papers_loop(participation, tmp_path):
    """Clients that were absent start from the mixture of the last round in which they took part."""
    expression, fed = f"fedpac:lam={LAM},head_share={SHARE}", skewed()
    result, cohorts = run(
        expression, participation, model=two_layers(), rounds=6, out=tmp_path / "run", **BUDGET
    )  # fmt: skip
    slope = torch.func.grad(aligned)
    x, means, known = flat(two_layers()), None, torch.zeros(CLASSES, dtype=torch.bool)
    mixtures, own = dict.fromkeys(range(len(fed.clients)), x[HEAD]), {}
    for cohort in cohorts:
        shares, variances, sums, counts = {}, {}, {}, {}
        for k, batches in cohort.items():
            inputs, y = fed.clients[k].x.double(), fed.clients[k].y
            onto, n = one_hot(y, CLASSES).double().T, len(y)
            counts[k] = onto.sum(1)
            start = torch.cat([x[BODY], mixtures[k]])
            a = features(start, inputs)
            local_means = onto @ a / counts[k].clamp_min(1)[:, None]
            q = counts[k] / n
            shares[k] = (q[:, None] * local_means).flatten().numpy()
            squares = torch.stack(
                [(a[y == c] ** 2).sum(1).mean() if counts[k][c] else a.new_zeros(()) for c in range(4)]
            )
            variances[k] = float(((q * squares).sum() - (q**2 * (local_means**2).sum(1)).sum()) / n)
            goals = None if means is None else torch.where(known[:, None], means, local_means)
            v, first = start.clone(), int(np.floor(SHARE * len(batches) + 0.5))
            for step, (u, labels) in enumerate(batches):
                trained = HEAD if step < first else BODY
                g = slope(v, u, labels, goals)
                v = v.clone()
                v[trained] -= LR * g[trained]
            own[k], sums[k] = v, onto @ features(v, inputs)
        x = x.clone()
        x[BODY] = average(fed, {k: own[k][BODY] for k in cohort})
        present = sum(counts.values())
        new = sum(sums.values()) / present.clamp_min(1)[:, None]
        means = new if means is None else torch.where(present[:, None] > 0, new, means)
        known = known | (present > 0)
        alpha = weights_by_active_sets(np.stack(list(shares.values())), np.array(list(variances.values())))
        heads = torch.stack([own[k][HEAD] for k in cohort])
        for row, k in zip(torch.from_numpy(alpha), cohort, strict=True):
            mixtures[k] = row @ heads
    assert float((result.vector - x).abs().max()) < EXACT
    check_client_models(tmp_path / "run", own)


def test_without_pull_and_mixing_it_is_fedrep_weighted_by_samples():
    options = {"participation": 0.5, "model": two_layers()}
    one = run("fedpac:lam=0,mixing=false", **options)[0]
    other = run(f"fedrep:head_share={1 / 6}", client_weighting="samples", **options)[0]
    assert torch.equal(one.vector, other.vector)
    assert one.summary["personal_accuracy_mean"] == other.summary["personal_accuracy_mean"]
    pulled, mixed = (run(f"fedpac:{o}", **options)[0].vector for o in ("mixing=false", "lam=0"))
    assert float((pulled - one.vector).abs().max()) > 1e-5
    assert float((mixed - one.vector).abs().max()) > 1e-5


def test_without_pull_and_mixing_clients_are_served_as_with_fedrep_with_batchnorm(tmp_path):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    options = {"model": model, "participation": 0.5, "drop_last": True, "engine": "inline", **OPTIONS}
    unskew.run(skewed(), method="fedpac:lam=0,mixing=false", out=tmp_path / "a", **options)
    fedrep = f"fedrep:head_share={1 / 6}"
    unskew.run(skewed(), method=fedrep, client_weighting="samples", out=tmp_path / "b", **options)
    for client in client_states(tmp_path / "a"):
        one, other = (open_run(tmp_path / name, client_number=client, model=model).module for name in "ab")
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


def test_the_weights_of_two_clients_are_the_closed_form():
    shares = torch.tensor([[0.3, 0.1, 0.2], [0.1, 0.5, 0.3]], dtype=torch.float64)
    v = torch.tensor([0.2, 0.7], dtype=torch.float64)
    apart = float(((shares[0] - shares[1]) ** 2).sum())
    expected = torch.tensor([(0.7 + apart) / (0.9 + apart), 0.7 / (0.9 + apart)], dtype=torch.float64)
    assert float((mixing_weights(shares, v)[:, 0] - expected).abs().max()) < EXACT


def test_equal_clients_are_weighted_by_their_inverse_variances():
    v = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    alpha = mixing_weights(torch.ones(3, 5, dtype=torch.float64), v)
    assert float((alpha - (1 / v) / (1 / v).sum()).abs().max()) < EXACT


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("m", [4, 6])
def test_the_weights_are_the_best_of_all_active_sets(m, scale):
    draws = np.random.default_rng(m)
    shares, v = draws.normal(size=(m, 2)), draws.uniform(0.01, 0.3, size=m)
    own = mixing_weights(torch.from_numpy(scale * shares), torch.from_numpy(scale**2 * v)).numpy()
    np.testing.assert_allclose(own, weights_by_active_sets(shares, v), rtol=0, atol=1e-10)
    assert (own == 0).any()


def test_a_client_without_variance_keeps_its_head_and_small_weights_are_0():
    shares = torch.tensor([[0.0, 0.0], [40.0, 0.0]], dtype=torch.float64)
    alpha = mixing_weights(shares, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.equal(alpha, torch.eye(2, dtype=torch.float64))


def test_a_client_is_served_by_the_last_mixture_with_the_final_body(tmp_path):
    """The last round mixes the heads that clients keep; equal clients mix them equally."""
    clients = [(np.eye(8, FEATURES), np.arange(8) % CLASSES)] * 3
    fed = unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0)
    options = {"rounds": 3, "local_steps": 4, "batch_size": 4, "lr": LR, "precision": "fp64", "engine": "inline"}
    result = unskew.run(fed, model=two_layers(), method="fedpac", out=tmp_path / "run", **options)
    heads = torch.stack([state["model"][HEAD] for state in client_states(tmp_path / "run").values()])
    assert torch.equal(result.vector[HEAD], flat(two_layers())[HEAD])
    assert heads.std(0).max() > 1e-6
    for client in range(3):
        served = flat(open_run(tmp_path / "run", client_number=client, model=two_layers()).module)
        assert float((served[BODY] - result.vector[BODY]).abs().max()) < EXACT
        assert float((served[HEAD] - heads.mean(0)).abs().max()) < EXACT


def test_the_heads_learning_rate_scales_the_first_steps(tmp_path):
    budget = {"rounds": 1, "local_epochs": None, "local_steps": 1, "batch_size": 100, "model": two_layers(), **BUDGET}
    moved = []
    for options in ("", ",head_lr=0.05"):
        folder = tmp_path / f"run{options}"
        run(f"fedpac:head_share=1{options}", out=folder, **budget)
        moved.append(torch.stack([s["model"] - flat(two_layers()) for _, s in sorted(client_states(folder).items())]))
    assert moved[0][:, HEAD].abs().max() > 1e-3
    assert float((moved[1] - moved[0] * 0.05 / LR).abs().max()) < EXACT
    with pytest.raises(ConfigError, match=r"head_lr=0\.1 scales the gradient"):
        run("fedpac:head_lr=0.1", model=two_layers(), rounds=1)


@pytest.mark.parametrize(("engine", "together"), [("inline", 3), ("vectorized", "auto")])
def test_clients_trained_together_give_the_same_models(engine, together, monkeypatch, tmp_path):
    def train(engine, together, folder):
        options = {"rounds": 3, "local_steps": 6, "batch_size": 4, "lr": 0.1, "precision": "fp64", "out": folder}
        result = unskew.run(
            skewed(), model=two_layers(), method="fedpac", engine=engine, clients_per_group=together, **options
        )
        return result.vector, {k: state["model"] for k, state in client_states(folder).items()}, result.summary

    vector, models, summary = train("inline", 1, tmp_path / "reference")
    monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)
    other, others, other_summary = train(engine, together, tmp_path / "other")
    assert float((vector - other).abs().max()) < EXACT
    assert all(float((models[k] - others[k]).abs().max()) < EXACT for k in models)
    assert summary["personal_accuracy_mean"] == other_summary["personal_accuracy_mean"]


def test_too_many_heads_for_the_server_are_rejected(monkeypatch):
    monkeypatch.setattr("unskew.methods.fedpac.MOST_BYTES", 8 * (SIZE - BODY.stop) * len(skewed().clients) - 1)
    with pytest.raises(ConfigError, match="stores a head for each client at the server"):
        run("fedpac", model=two_layers())


def test_bytes_are_those_of_body_heads_and_class_means():
    summary = run("fedpac", model=two_layers())[0].summary
    visits, means = 4 * 4, CLASSES * HIDDEN
    head = SIZE - BODY.stop
    assert summary["bytes_up"] == visits * (BODY.stop + head + 2 * means + CLASSES + 1) * 8
    assert summary["bytes_down"] == (visits * BODY.stop + 12 * (head + means + CLASSES)) * 8
