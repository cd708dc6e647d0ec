"""Fed+FT, HFCL, FedDF and Center: against NumPy, torch and each other, with delays and on every engine."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.running import Stop, StopAfter, call
from support.slow import slow_but
from support.tolerance import MAGNIFIED, TRAINING, assert_close

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.simulation.network import Network
from unskew.testing import assert_engines_agree

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES = [9, 14, 11, 8, 12, 10]
LEARNERS = ["fedft:epochs=2,lr=0.02", "hfcl", "feddf:epochs=2,optimizer=adam,lr=0.01"]


def outside(fed):
    """The same federation, whose server holds another data set: other inputs, labels of seven classes."""
    draws = np.random.default_rng(3)
    x = torch.tensor(draws.normal(size=(21, 2, 6, 6)).astype("float32"))
    return replace(fed, server=replace(fed.server, x=x, y=torch.arange(21) % 7, in_domain=False))


def train(method, delay="half-normal:2", rounds=6, fed=None, model=None, **options):
    torch.manual_seed(0)
    given = {"lr": 0.05, "batch_size": 8, "local_epochs": 1, "precision": "fp64", "participation": 0.5}
    given |= {"engine": "inline", "network": {"delay": delay}, **options}
    model = SmallBatchNorm() if model is None else model
    return unskew.run(fed or blobs(SIZES), model=model, method=method, rounds=rounds, **given)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class Logistic:
    """Softmax regression in NumPy float64; the vector is the weight, row by row, then the bias, as in PyTorch."""

    def __init__(self, fed):
        self.fed = fed
        self.clients = [self.arrays(c.x, c.y) for c in fed.clients]
        self.server = self.arrays(fed.server.x, fed.server.y)

    @staticmethod
    def arrays(x, y):
        return x.flatten(1).numpy().astype(float), y.numpy()

    @staticmethod
    def logits(v, x):
        return x @ v[: 3 * x.shape[1]].reshape(3, -1).T + v[3 * x.shape[1] :]

    def descend(self, v, x, targets, lr, steps):
        """Full batches of mean cross-entropy, which for soft targets has the gradient of the divergence."""
        for _ in range(steps):
            error = (softmax(self.logits(v, x)) - targets) / len(x)
            v = v - lr * np.concatenate([(error.T @ x).ravel(), error.sum(0)])
        return v

    def local(self, v, k, lr=0.1, steps=2):
        x, y = self.clients[k]
        return self.descend(v, x, np.eye(3)[y], lr, steps) - v


@pytest.mark.parametrize("method", ["fedft:epochs=3,lr=0.2", "hfcl", "hfcl:n_s=4,steps=3", "feddf:epochs=3,lr=0.2"])
def test_rounds_with_delays_are_those_of_numpy(monkeypatch, method):
    """Logistic regression, full batches; who arrives when is taken from the run, all else is computed here."""
    events, real = [], Network.deliver

    def deliver(network, round, results):
        results = list(results)
        arrived = list(real(network, round, results))
        events.append(([u.client for u in results], [(u.origin_round, u.client) for u in arrived]))
        return iter(arrived)

    monkeypatch.setattr(Network, "deliver", deliver)
    fed = blobs([6, 9, 7, 8])
    options = {"model": "logistic", "batch_size": 100, "lr": 0.1, "local_epochs": 2, "rounds": 7}
    first = train("fedavg", fed=fed, **{**options, "rounds": 1}, delay="fixed:5").vector.numpy()
    events.clear()
    result = train(method, fed=fed, **options)
    world, v, sent = Logistic(fed), first, []
    n = np.array([6.0, 9, 7, 8])
    x, y = world.server
    for _, arrived in events:
        sent.append(v)
        if not arrived:
            continue
        deltas = [world.local(sent[origin_round], k) for origin_round, k in arrived]
        p = np.array([n[k] for _, k in arrived])
        mean = v + sum(w * d for w, d in zip(p / p.sum(), deltas, strict=True))
        if method.startswith("fedft"):
            v = world.descend(mean, x, np.eye(3)[y], 0.2, 3)
        elif method.startswith("hfcl"):
            n_s, steps = (4, 3) if "n_s" in method else (len(y), 2)
            own = world.descend(v, x, np.eye(3)[y], 0.1, steps)
            v = v + (p.sum() * (mean - v) + n_s * (own - v)) / (p.sum() + n_s)
        else:
            logits = [
                world.logits(sent[origin_round] + d, x) for (origin_round, _), d in zip(arrived, deltas, strict=True)
            ]
            v = world.descend(mean, x, softmax(np.mean(logits, axis=0)), 0.2, 3)
    assert sum(len(arrived) for _, arrived in events) > 6
    assert any(t != origin_round for t, (_, arrived) in enumerate(events) for origin_round, _ in arrived)
    assert_close(result.vector.numpy(), v, TRAINING)


NOTHING = ["fedft:epochs=0", "fedft:steps=0", "hfcl:n_s=0", "feddf:steps=0", "feddf:epochs=0"]


@pytest.mark.parametrize("nothing", slow_but(["fedft:epochs=0", "hfcl:n_s=0", "feddf:steps=0"], NOTHING))
def test_without_training_at_the_server_it_is_fedavg(nothing):
    for fed in [blobs(SIZES)] + [outside(blobs(SIZES))] * nothing.startswith("feddf"):
        plain, found = train("fedavg", fed=fed), train(nothing, fed=fed)
        assert torch.equal(found.vector, plain.vector)
        for (name, mine), theirs in zip(found.model.named_buffers(), plain.model.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)


def test_a_server_with_a_clients_data_counts_as_that_client():
    """HFCL over two clients and a server equals FedAvg over three clients, when all batches are the whole data."""
    fed = blobs([8, 11, 6])
    x, y = fed.clients[2].x, fed.clients[2].y
    pairs = [(c.x.numpy(), c.y.numpy()) for c in fed.clients]
    test = (fed.test[0].numpy(), fed.test[1].numpy())
    two = unskew.Federation.from_arrays(pairs[:2], test, (x.numpy(), y.numpy()), classes=3, holdout=0.0)
    options = {"delay": "none", "participation": 1.0, "batch_size": 100, "model": SmallBatchNorm(dropout=0.0)}
    for weights in ("samples", "uniform"):
        three = train("fedavg", fed=fed, client_weighting=weights, **copy.deepcopy(options))
        hybrid = train("hfcl", fed=two, client_weighting=weights, **copy.deepcopy(options))
        assert_close(hybrid.vector, three.vector, TRAINING)
        assert_close(hybrid.model.norm.running_var, three.model.norm.running_var, TRAINING)


class HalfReal(unskew.DataRule):
    name, summary, paper = "half-real", "half of what clients hold is synthetic", "none"

    def client_payload(self, prepared, seed, workspace):
        return replace(prepared, counted=prepared.federation.sizes // 2)


def test_the_server_counts_by_its_samples_or_as_one_client():
    """However few samples clients have, and with synthetic ones beside, which count in no mean."""
    single = blobs([2, 2, 2])  # of two samples one is held out
    for fed, before in ((single, []), (blobs(SIZES), [HalfReal()])):
        for weights, n_s in (("samples", len(fed.server.y)), ("uniform", 1)):
            methods = ([*before, "hfcl"], [*before, f"hfcl:n_s={n_s}"])
            by_itself, asked = (train(m, fed=fed, client_weighting=weights, delay="none") for m in methods)
            assert torch.equal(by_itself.vector, asked.vector)


@pytest.mark.parametrize(
    "fed", [blobs(SIZES), blobs([9] * 6), outside(blobs(SIZES))], ids=["unequal", "equal", "other"]
)
def test_the_student_of_a_single_teacher_that_it_equals_stays(fed):
    """One arrival a round: the average is that client's model, of whose rounding noise Adam must not make steps."""
    options = {"fed": fed, "participation": 0.1, "delay": "none", "precision": "fp32"}
    distilled = train("feddf:epochs=3,optimizer=adam,lr=0.02", **options)
    plain = train("fedavg", **options)
    assert torch.equal(distilled.vector, plain.vector)
    assert all(map(torch.equal, distilled.model.buffers(), plain.model.buffers()))
    assert [row["feddf_loss"] for row in distilled.history] == [0] * len(distilled.history)


def test_the_student_learns_from_a_single_teacher_that_started_from_an_older_model():
    options = {"model": "logistic", "participation": 0.1, "delay": "fixed:1"}
    assert not torch.equal(train("feddf:epochs=3,lr=1", **options).vector, train("fedavg", **options).vector)


@pytest.mark.slow
def test_distillation_brings_the_average_nearer_to_the_ensemble():
    """Out of domain too, and its labels do not matter."""
    options = {"model": "mlp", "delay": "none", "participation": 1.0, "rounds": 1, "local_epochs": 10, "lr": 0.2}
    fed = outside(blobs(SIZES))
    few, many = (train(f"feddf:steps={n},batch=100,lr=0.3", fed=fed, **options) for n in (1, 60))
    assert many.history[-1]["feddf_loss"] < few.history[-1]["feddf_loss"]
    other = replace(fed, server=replace(fed.server, y=fed.server.y.flip(0)))
    assert torch.equal(train("feddf:steps=60,batch=100,lr=0.3", fed=other, **options).vector, many.vector)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_center_is_a_plain_loop_of_torch_over_all_rounds(optimizer):
    """The optimizer's state is kept from round to round; full batches, BatchNorm in training mode."""
    torch.manual_seed(0)
    module = SmallBatchNorm(dropout=0.0).double().train()
    options = {"model": copy.deepcopy(module), "batch_size": 100, "lr": 0.02, "delay": "none", "weight_decay": 0.01}
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    result = train("center:epochs=3", rounds=4, optimizer=optimizer, **options, **momentum)
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    steps, fed = kind(module.parameters(), lr=0.02, weight_decay=0.01, **momentum), blobs(SIZES)
    for _ in range(12):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(module(fed.server.x.double()), fed.server.y).backward()
        steps.step()
    for (name, mine), theirs in zip(result.model.state_dict().items(), module.state_dict().values(), strict=True):
        if theirs.is_floating_point():  # counters of batches are the server's
            assert_close(mine, theirs, MAGNIFIED, msg=name)
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 0
    assert [row["cohort"] for row in result.history] == [0] * 4
    assert result.history[0]["center_loss"] > result.history[-1]["center_loss"]


@pytest.mark.parametrize("method", slow_but(LEARNERS[1:2], [*LEARNERS, "center:epochs=1,optimizer=adam"]))
def test_engines_agree_and_runs_go_on(tmp_path, method):
    options = {"rounds": 5, "network": {"delay": "half-normal:2", "drop": 0.2}}
    whole = train(method, **options)
    assert_engines_agree(train(method, engine="vectorized", **options).vector, whole.vector)
    with pytest.raises(Stop):
        train(method, out=tmp_path / "a", checkpoint_every=1, callbacks=[StopAfter(3)], **options)
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm())
    assert torch.equal(rest.vector, whole.vector)
    name = f"{method.partition(':')[0]}_loss"
    assert [row[name] for row in rest.history] == [row[name] for row in whole.history]


def test_a_round_without_arrivals_leaves_the_model_as_it_is():
    for method in LEARNERS:
        result = train(method, delay="fixed:2", rounds=3, participation=1.0)
        assert [row["updates"] for row in result.history] == [0, 0, 6]
        losses = [row["loss"] for row in result.history]
        assert losses[0] == losses[1] != losses[2]


def test_only_feddf_needs_single_updates():
    for method in ("fedft", "hfcl"):
        hidden = train(method, rounds=2, secure_aggregation="required")
        assert torch.equal(hidden.vector, train(method, rounds=2).vector)
    with pytest.raises(MethodConflictError, match="feddf reads the update of each individual client"):
        train("feddf", secure_aggregation="required")


@pytest.mark.parametrize("method", ["fedft", "hfcl", "feddf", "center"])
def test_without_data_at_the_server_they_are_refused_with_what_to_do(method):
    with pytest.raises(ConfigError, match=f"{method} needs data at the server: give --server-data 1000"):
        train(method, fed=blobs(SIZES, server=False))
    if method != "feddf":
        with pytest.raises(ConfigError, match=f"{method} learns from the server's labels"):
            train(method, fed=outside(blobs(SIZES)))
    with pytest.raises(ConfigError, match="both epochs and steps"):
        train(f"{method}:epochs=1,steps=2")
    for wrong in ("epochs=-1", "steps=1.5", "lr=0", "batch=0", "optimizer=rmsprop", "lr=inf"):
        with pytest.raises(ConfigError, match=f"{method}:{wrong.split('=')[0]}"):
            unskew.method(f"{method}:{wrong}")


def test_center_with_what_acts_at_clients_is_refused():
    for other in ("fedprox", "fedals", "vhl"):
        with pytest.raises(MethodConflictError, match=f"{other}, which acts at clients, has no effect"):
            unskew.method(f"center+{other}")


def test_server_methods_require_server_data_and_run_with_it(capsys, tmp_path):
    told = ["run", "--clients", "4", "--model", "logistic", "--local-steps", "1", "--rounds", "2", "--engine", "inline"]
    refused = call(capsys, *told, "--method", "hfcl", "--out", tmp_path / "a")
    assert refused.code == 2
    assert "--server-data 1000" in refused.err
    for number, method in enumerate(("fedft:epochs=1,lr=1e-3", "hfcl", "feddf:steps=2", "center")):
        done = call(
            capsys,
            *told,
            "--server-data",
            "100",
            "--delay",
            "fixed:1",
            "--method",
            method,
            "--out",
            tmp_path / str(number),
        )
        assert done.code == 0, done.err
