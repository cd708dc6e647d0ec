"""FedALA against a loop over its formulas, in its limits, and on different engines."""

import pytest
import torch
from support.batch_loop import BODY, client_states, deep_loss, flat, local, run, skewed, two_layers

import unskew
from unskew.errors import MethodConflictError
from unskew.methods.registry import method
from unskew.runs.personal_model_files import load_personal_model
from unskew.seeding import derive, fold, uniform

EXACT = 1e-12
BATCH, ROUNDS = 4, 6
SLOPE = torch.func.grad(deep_loss)
HEAD = slice(BODY.stop, None)


class Client:
    """A client of FedALA in float64: its own model and the weights of the received head."""

    def __init__(self, number, data, eta, share):
        self.number, self.data, self.eta, self.share = number, data, eta, share
        self.own = self.weights = None
        self.passes = []

    def initial_model(self, theta, round):
        """Return the model that the client trains from in a round."""
        if self.own is None:
            return theta
        x, y = self.data.x.double(), self.data.y
        key = fold(torch.tensor(derive(0, "key", round, self.number)), 5)
        drawn = uniform(key, (len(y),)).argsort()[: int(self.share * len(y))]
        first = self.weights is None
        w = torch.ones_like(theta[HEAD]) if first else self.weights
        towards = theta[HEAD] - self.own[HEAD]

        def mixture(w):
            return torch.cat([theta[BODY], self.own[HEAD] + towards * w])

        losses = []
        while not losses or (
            first and not (len(losses) > 10 and float(torch.tensor(losses[-10:]).std(correction=0)) < 0.1)
        ):
            for rows in torch.split(drawn, BATCH):
                value = float(deep_loss(mixture(w), x[rows], y[rows]))
                w = (w - self.eta * towards * SLOPE(mixture(w), x[rows], y[rows])[HEAD]).clamp(0, 1)
            losses.append(value)
        self.weights = w
        self.passes.append(len(losses))
        return mixture(w)


def papers_loop(fed, cohorts, eta, share):
    """Return the global model, and the clients of Algorithm 1."""
    clients = [Client(k, client, eta, share) for k, client in enumerate(fed.clients)]
    x = flat(two_layers())
    for round, cohort in enumerate(cohorts):
        for k, batches in cohort.items():
            clients[k].own = local(clients[k].initial_model(x, round), batches, SLOPE)
        count = {k: float(fed.clients[k].num_samples) for k in cohort}
        x = sum(count[k] * clients[k].own for k in cohort) / sum(count.values())
    return x, clients


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("eta", "share"), [(1.0, 0.8), (20.0, 1.0)])
def test_a_run_is_the_papers_loop(eta, share, participation, tmp_path):
    fed = skewed()
    result, cohorts = run(
        f"fedala:eta={eta},share={share}", participation, fed, two_layers(), out=tmp_path / "run", rounds=ROUNDS
    )
    x, clients = papers_loop(fed, cohorts, eta, share)
    assert float((result.vector - x).abs().max()) < EXACT
    states = client_states(tmp_path / "run")
    assert any(client.weights is not None and (client.weights < 1).any() for client in clients)
    assert all(passes[0] > 10 and set(passes[1:]) <= {1} for passes in (c.passes for c in clients) if passes)
    for client in clients:
        if client.own is None:
            continue
        own = states[client.number]
        assert float((own["rules/fedala/personal"] - client.own).abs().max()) < EXACT
        if client.weights is not None:
            assert float((own["rules/fedala/w"] - client.weights).abs().max()) < EXACT
        served = client.initial_model(x, ROUNDS)
        assert float((load_personal_model(tmp_path / "run", client.number)[0] - served).abs().max()) < EXACT


def test_without_learning_it_is_fedavg():
    """The weights stay 1, so clients start from the received model, up to rounding in the mixture."""
    one, other = (run(name, 0.5, model=two_layers())[0] for name in ("fedala:eta=0", "fedavg"))
    assert float((one.vector - other.vector).abs().max()) < EXACT


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_engines_agree(engine):
    """Clients of one size could train together, but learn their weights one by one."""
    options = {"model": two_layers(), "rounds": 4, "lr": 0.2, "batch_size": 4, "local_epochs": 1, "precision": "fp64"}
    vectors = [
        unskew.run(skewed(sizes=(9, 9, 9, 9)), method="fedala:eta=10", engine=name, **options).vector
        for name in ("inline", engine)
    ]
    assert float((vectors[0] - vectors[1]).abs().max()) < EXACT


def test_traffic_is_that_of_fedavg():
    summary = run("fedala", 0.5, model=two_layers())[0].summary
    assert summary["bytes_down"] == summary["bytes_up"] == 4 * 2 * len(flat(two_layers())) * 8


@pytest.mark.parametrize("other", ["scaffold", "feddyn", "fedexp", "fedsmoo", "mime"])
def test_rules_that_need_the_received_model_find_it_in_any_order(other):
    options = {"model": two_layers(), "momentum": 0.0, "weight_decay": 0.0}
    one, two = (run(e, 0.5, **options)[0].vector for e in (f"fedala:eta=20+{other}", f"{other}+fedala:eta=20"))
    assert float((one - two).abs().max()) < EXACT
    assert float((one - run(other, 0.5, **options)[0].vector).abs().max()) > 1e-5


@pytest.mark.parametrize(
    ("other", "weights", "same"),
    [
        ("fednova", "samples", True),  # all clients take the same number of steps
        ("qfedavg:q=0", "uniform", True),
        ("smooth:beta=0", "samples", True),
        ("smooth:beta=0.5", "samples", False),
    ],
)
def test_rules_that_transform_updates_see_the_difference_to_the_received_model_in_any_order(other, weights, same):
    options = {"model": two_layers(), "local_steps": 3, "local_epochs": None, "client_weighting": weights}
    vectors = [
        run(e, 0.5, **options)[0].vector for e in (f"fedala:eta=20+{other}", f"{other}+fedala:eta=20", "fedala:eta=20")
    ]
    assert float((vectors[0] - vectors[1]).abs().max()) < EXACT
    assert (float((vectors[0] - vectors[2]).abs().max()) < EXACT) == same


@pytest.mark.parametrize("other", ["ditto", "ft", "fedper", "fedals", "ifca"])
def test_a_client_has_one_personal_model_and_sends_all_of_it(other):
    with pytest.raises(MethodConflictError, match=r"both define|only parts of the model are sent"):
        method(f"fedala+{other}")
