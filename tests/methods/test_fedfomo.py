"""FedFomo against a loop over the paper's formulas, by hand, and in its limits."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.batch_loop import OPTIONS, SIZES, classifier, client_states, initial, local, loss, run, skewed

import unskew
from unskew.engines.vmap_trainer import GroupTrainer
from unskew.errors import ConfigError, DataError, MethodConflictError
from unskew.methods.fedfomo import FedFomo
from unskew.protocol.rules import START

EXACT = 1e-12
D = len(initial())
slope = torch.func.grad(loss)
pytestmark = pytest.mark.filterwarnings("ignore:With fedfomo, clients send")


def without(client, batches):
    """The samples of a client that are in none of its batches."""
    trained = torch.cat([x for x, _ in batches])
    held = [bool((trained != row).any(1).all()) for row in client.x.to(trained)]
    return client.x[held].double(), client.y[held]


@pytest.fixture
def choices(monkeypatch):
    """Clients whose models are received, for each question in order."""
    original, asked = FedFomo.chosen, []

    def recorded(rule, state, client):
        answer = original(rule, state, client)
        asked.append((client, answer.tolist()))
        return answer

    monkeypatch.setattr(FedFomo, "chosen", recorded)
    return asked


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("count", "baseline", "validation"), [(5, "last", 0.2), (2, "last", 0.4), (5, "current", 0.3), (1, "current", 0.2)]
)
def test_a_run_is_the_papers_loop(count, baseline, validation, participation, choices, tmp_path):
    fed = skewed()
    method = f"fedfomo:models={count},baseline={baseline},validation={validation}"
    result, cohorts = run(method, participation, fed, rounds=5, out=tmp_path / "run")
    models, starts, P = {}, {}, np.zeros((len(SIZES), len(SIZES)))
    asked, held, mixed = iter(choices), {}, 0
    for cohort in cohorts:
        received = {}
        for k in cohort:
            client, received[k] = next(asked)
            others = sorted(set(models) - {k})
            assert client == k
            assert len(received[k]) == len(set(received[k])) == min(count, len(others))
            assert set(received[k]) <= set(others)
            left = [P[k, j] for j in others if j not in received[k]]
            assert not left or min(P[k, received[k]]) >= max(left) - EXACT
        new, gained = {}, np.zeros_like(P)
        for k, batches in cohort.items():
            x, y = without(fed.clients[k], batches)
            assert len(y) == max(1, round(validation * SIZES[k]))
            held.setdefault(k, x)
            assert torch.equal(held[k], x)  # the same in all rounds
            own = models.get(k, initial())
            start = own
            if received[k]:
                base = starts.get(k, own) if baseline == "last" else own
                offered = [(j, models[j]) for j in received[k]] + ([(k, own)] if baseline == "last" else [])
                weights = {}
                for j, theta in offered:
                    distance = float((theta - base).norm())
                    gain = float(loss(base, x, y) - loss(theta, x, y)) / distance if distance else 0.0
                    weights[j] = max(0.0, gain)
                    gained[k, j] += gain * (j != k)
                if total := sum(weights.values()):
                    start = sum(weights[j] / total * theta for j, theta in offered)
                    mixed += 1
            starts[k] = start
            new[k] = local(start, batches, slope)
        models = {**models, **new}
        P += gained
        for _ in [k for k in cohort if received[k]]:
            next(asked)  # the server asks itself again whose models were sent
    assert mixed > 2
    states = client_states(tmp_path / "run")
    assert set(states) == set(models)
    for k, w in models.items():
        assert float((states[k]["model"] - w).abs().max()) < EXACT
    assert torch.equal(result.vector, initial())


def context(models, own, losses, count=4.0, start=None):
    """The inputs of a client that received scalar models."""
    return SimpleNamespace(
        v_global=torch.tensor([own], dtype=torch.float64),
        state={} if start is None else {"start": torch.tensor([start], dtype=torch.float64)},
        download={"models": torch.tensor(models, dtype=torch.float64)[:, None]},
        survey={"loss": count * torch.tensor(losses, dtype=torch.float64), "count": torch.tensor(count)},
    )


def test_weights_of_three_scalar_models_by_hand():
    """Losses 2 at the own model 1, and 1, 1.5 and 3 at the models 3, 0 and 2: gains 1/2, 1/2 and -1."""
    carry = FedFomo(baseline="current").begin(context([3.0, 0.0, 2.0], 1.0, [2.0, 1.0, 1.5, 3.0]))
    assert carry["gains"].tolist() == [0.5, 0.5, -1.0]
    assert carry[START].tolist() == [1.5]
    # From the baseline 0 with loss 2.5: the own model 1 with loss 2 gains 1/2, the others 1/2, 0 (no distance) and -1/4.
    carry = FedFomo().begin(context([3.0, 0.0, 2.0], 1.0, [2.5, 2.0, 1.0, 2.5, 3.0], start=0.0))
    assert carry["gains"].tolist() == [0.5, 0.0, -0.25]
    assert carry[START].tolist() == [2.0]


def test_copies_of_one_better_model_are_that_model_and_worse_models_change_nothing():
    rule = FedFomo(baseline="current")
    assert rule.begin(context([3.0, 3.0, 3.0], 1.0, [2.0, 1.0, 1.0, 1.0]))[START].tolist() == [3.0]
    assert rule.begin(context([3.0, 5.0, 2.0], 1.0, [2.0, 2.1, 9.0, np.inf]))[START].tolist() == [1.0]


@pytest.mark.parametrize("side", [-1, 1])
def test_a_model_that_differs_from_the_baseline_by_rounding_has_no_gain(side):
    """Its loss and its distance are noise, whose quotient could be any number; from the baseline 0.1 only 3 is mixed."""
    near = np.nextafter(0.1, np.inf if side > 0 else -np.inf)
    carry = FedFomo().begin(context([near, 3.0], 0.0, [2.0, 2.5, np.nextafter(2.0, 0), 1.0], start=0.1))
    assert carry["gains"].tolist() == [0.0, 1 / 2.9]
    assert carry[START].tolist() == [3.0]


def test_if_all_models_are_worse_it_is_local_training_on_the_remaining_samples(tmp_path, monkeypatch):
    """Clients whose losses of other models count a thousandfold, against local training on the rest of their samples."""

    class Worse(FedFomo):
        def survey(self, ctx, v, forward, batch):
            sums = super().survey(ctx, v, forward, batch)
            return (
                {**sums, "loss": sums["loss"] * torch.tensor([1.0] + [1e3] * (len(sums["loss"]) - 1))} if sums else sums
            )

    monkeypatch.setattr(Worse, "name", "worse")
    fed = skewed()
    _, cohorts = run([Worse(baseline="current")], fed=fed, out=tmp_path / "run")
    states = client_states(tmp_path / "run")
    for k in range(len(SIZES)):
        w = initial()
        for cohort in cohorts:
            w = local(w, cohort[k], slope)
        assert float((states[k]["model"] - w).abs().max()) < EXACT


def test_the_choice_follows_the_gains_ties_and_the_share_of_random_models():
    known, key = torch.tensor([True, True, False, True, True, True]), torch.tensor(17)
    gains = torch.zeros(6, 6)
    gains[0] = torch.tensor([9.0, 0.1, 5.0, 0.4, -0.2, 0.3])
    state = {"known": known, "gains": gains, "key": key, "models": torch.eye(6)}
    assert FedFomo(models=2).chosen(state, 0).tolist() == [3, 5]
    assert FedFomo(models=9).chosen(state, 0).tolist() == [3, 5, 1, 4]
    assert torch.equal(FedFomo(models=1).download(state, 0)["models"], torch.eye(6)[[3]])
    assert FedFomo(models=2).download(state, 6) == {}  # a client that joined later
    for rule, client in ((FedFomo(models=1), 1), (FedFomo(models=1, explore=1.0), 0)):
        drawn = [int(rule.chosen({**state, "key": torch.tensor(n)}, client)) for n in range(400)]
        counts = np.bincount(drawn, minlength=6)[[j for j in (0, 1, 3, 4, 5) if j != client]]
        assert counts.sum() == 400
        assert abs(counts - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)
    half = FedFomo(models=2, explore=0.5)
    best = sum(half.chosen({**state, "key": torch.tensor(n)}, 0).tolist() == [3, 5] for n in range(400))
    # Both by their gains; or one or both at random, in this order.
    assert abs(best / 400 - (1 / 4 + 1 / 2 * 1 / 4 + 1 / 4 * 1 / 12)) < 5 * np.sqrt(0.4 * 0.6 / 400)


@pytest.mark.parametrize("method", ["fedfomo", "fedamp"])
def test_clients_that_receive_different_tensors_are_trained_in_groups_of_equal_ones(method, tmp_path, monkeypatch):
    """In the second round, a client that took no part yet receives more models, and no mixture."""
    for size in (1, 3):
        if size > 1:
            monkeypatch.setattr(GroupTrainer, "train", GroupTrainer.mapped)  # as one network or not at all
        unskew.run(
            skewed(), model=classifier(), method=method, participation=0.75, precision="fp64", engine="inline",
            clients_per_group=size, out=tmp_path / str(size), **OPTIONS,
        )  # fmt: skip
    one, other = (client_states(tmp_path / size) for size in "13")
    for k in one:
        assert float((one[k]["model"] - other[k]["model"]).abs().max()) < EXACT


def test_bytes_are_those_of_the_formula():
    """The model and the gains up; models down, from the second round on."""
    summary = run("fedfomo:models=2")[0].summary
    visits = OPTIONS["rounds"] * len(SIZES)
    assert summary["bytes_up"] == (visits * D + (visits - len(SIZES)) * 2) * 8
    assert summary["bytes_down"] == (visits - len(SIZES)) * 2 * D * 8


def test_a_client_with_one_sample_is_rejected():
    with pytest.raises(DataError, match="has one sample, of which fedfomo can keep none for validation"):
        run("fedfomo", fed=skewed((6, 1), present=1), rounds=1)


def test_too_many_models_for_the_server_are_rejected(monkeypatch):
    monkeypatch.setattr("unskew.methods.stored_models.LARGEST", 8 * (D + len(SIZES)) * len(SIZES) - 1)
    with pytest.raises(ConfigError, match="stores a model for each client at the server"):
        run("fedfomo", rounds=1)


@pytest.mark.parametrize(
    "other", ["scaffold", "fedamp", "fedrep", "ditto", "median", "topk", "dp:noise=1", "dpsgd:noise=1"]
)
def test_rules_that_need_a_common_model_are_rejected(other):
    with pytest.raises(MethodConflictError):
        unskew.method(f"fedfomo+{other}")


def test_secure_aggregation_and_delays_are_rejected():
    with pytest.raises(ConfigError, match="secure_aggregation"):
        run("fedfomo", secure_aggregation="required")
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run("fedfomo", network={"delay": "fixed:1"})


def test_a_warning_says_that_groups_are_split(tmp_path):
    rows = [
        f"{site},{site}{patient},{patient % 3 + row},{'ny'[row % 2]}"
        for site in "ab"
        for patient in range(6)
        for row in range(4)
    ]
    (tmp_path / "visits.csv").write_text("\n".join(["site,patient,x,y", *rows]))
    options = {"method": "fedfomo", "rounds": 1, "local_steps": 1, "model": "logistic", "engine": "inline"}
    table = {"label": "y", "partition": "natural:site", "exclude": "patient", "holdout": 0.2}
    fed = unskew.load_federation(f"table:{tmp_path / 'visits.csv'}", split_by="patient", **table)
    with pytest.warns(UserWarning, match="rows of one patient"):
        unskew.run(fed, **options)
    with pytest.warns(UserWarning, match="rows of one patient"):
        unskew.run(data=f"table:{tmp_path / 'visits.csv'}", split_by="patient", **table, **options)
    fed = unskew.load_federation(f"table:{tmp_path / 'visits.csv'}", **table)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        unskew.run(fed, **options)
    assert not any("split_by" in str(one.message) for one in told)
