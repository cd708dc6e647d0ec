"""FedBN against a loop of modules whose BatchNorm stays where it is, and by what each client is served with."""

import copy
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.federations import SmallBatchNorm, blobs
from support.running import Stop, StopAfter
from support.tolerance import MAGNIFIED, assert_close

import unskew
from unskew.errors import MethodConflictError
from unskew.methods.registry import method
from unskew.simulation.sampler import Sampler
from unskew.testing import assert_engines_agree

BUDGET = {"lr": 0.2, "local_steps": 6, "batch_size": 100, "momentum": 0.5, "precision": "fp64", "participation": 0.4}
ROUNDS = 3


def domains():
    """Five clients whose images have another brightness and contrast each, with a test part of their own."""
    draws = np.random.default_rng(3)

    def images(n, k):
        y = draws.integers(0, 3, n)
        x = draws.normal(size=(n, 2, 6, 6)) + y[:, None, None, None]
        return ((1 + k) * x - 2 * k).astype(np.float32), y

    clients = [(*images(n, k), *images(200, k)) for k, n in enumerate((12, 23, 17, 9, 15))]
    return unskew.Federation.from_arrays(clients, test=images(40, 0), classes=3)


def train(chosen="fedbn", fed=None, **options):
    torch.manual_seed(0)
    given = {"rounds": ROUNDS, "engine": "inline", **BUDGET, **options}
    return unskew.run(fed or domains(), model=SmallBatchNorm(dropout=0.0), method=chosen, **given)


def is_shared(name):
    return not name.startswith("norm.")


def by_hand(fed, rounds, alpha=0.0):
    """The global module, and the BatchNorm of each client that took part: parameters and statistics.

    With ``alpha``, FedDyn regularizes the shared layers.
    """
    torch.manual_seed(0)
    server = SmallBatchNorm(dropout=0.0).double()
    first = {name: t.clone() for name, t in server.state_dict().items() if not is_shared(name)}
    own, cohort = {}, Sampler(len(fed.clients), BUDGET["participation"], 0).draw
    zero = {name: torch.zeros_like(p) for name, p in server.named_parameters() if is_shared(name)}
    g, h = {k: dict(zero) for k in range(len(fed.clients))}, dict(zero)
    for t in range(rounds):
        nets, received = [], {name: p.clone() for name, p in server.state_dict().items()}
        for k in cohort(t):
            net, client = copy.deepcopy(server), fed.clients[k]
            net.load_state_dict(own.get(k, first), strict=False)
            optimizer = torch.optim.SGD(net.parameters(), lr=BUDGET["lr"], momentum=BUDGET["momentum"])
            net.train()
            for _ in range(BUDGET["local_steps"]):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(client.x.double()), client.y).backward()
                for name, p in net.named_parameters():
                    if is_shared(name) and alpha:
                        p.grad += alpha * (p.detach() - received[name]) - g[k][name]
                optimizer.step()
            own[k] = {name: t.clone() for name, t in net.state_dict().items() if not is_shared(name)}
            nets.append(net.state_dict())
            g[k] = {name: old - alpha * (nets[-1][name] - received[name]) for name, old in g[k].items()}
        mean = {name: sum(net[name] for net in nets) / len(nets) for name in nets[0] if is_shared(name)}
        for name in h if alpha else ():
            h[name] = h[name] - alpha / len(g) * sum(net[name] - received[name] for net in nets)
            mean[name] = mean[name] - h[name] / alpha
        server.load_state_dict(mean, strict=False)
    return server.eval(), own


def flat(state, names):
    return torch.cat([state[name].reshape(-1) for name in names])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run, what its clients keep, and the same by hand."""
    fed, folder = domains(), tmp_path_factory.mktemp("fedbn") / "run"
    result = train(fed=fed, out=folder)
    kept = load_file(folder / f"checkpoints/{ROUNDS:07d}/clients-0000.safetensors")
    return fed, result, kept, *by_hand(fed, ROUNDS)


def test_shared_layers_and_each_clients_batchnorm_are_those_of_a_plain_loop(one):
    _, result, kept, server, own = one
    mine = result.model.state_dict()
    for name, value in server.state_dict().items():
        if value.is_floating_point():  # the BatchNorm of the global model is that of the beginning, to the bit
            assert_close(mine[name].double(), value, MAGNIFIED if is_shared(name) else 0, msg=name)
    spec = unskew.ModelSpec(result.model, (2, 6, 6), 3, dtype=torch.float64)
    assert 0 < len({name.split("/")[0] for name in kept}) == len(own) < 5, "a newcomer and one that took part"
    for k, norm in own.items():
        weights = spec.parameters(kept[f"{k}/model"])
        for name in ("norm.weight", "norm.bias"):
            assert_close(weights[name], norm[name], MAGNIFIED, msg=name)
        statistics = flat(norm, ("norm.running_mean", "norm.running_var"))
        assert_close(kept[f"{k}/statistics"], statistics, MAGNIFIED)
        assert (statistics - torch.tensor([0.0] * 4 + [1.0] * 4)).abs().min() > 1e-3, "they have moved"


def test_feddyn_does_not_regularize_what_is_never_exchanged(tmp_path):
    """Clients have no received values of it; a pull to those of the first round would grow from round to round."""
    fed, rounds = domains(), 6
    result = train("feddyn:alpha=0.3+fedbn", fed, rounds=rounds, out=tmp_path / "run")
    kept = load_file(tmp_path / f"run/checkpoints/{rounds:07d}/clients-0000.safetensors")
    server, own = by_hand(fed, rounds, alpha=0.3)
    mine, spec = result.model.state_dict(), unskew.ModelSpec(result.model, (2, 6, 6), 3, dtype=torch.float64)
    for name, value in server.state_dict().items():
        if is_shared(name):
            assert_close(mine[name].double(), value, MAGNIFIED, msg=name)
    for k, norm in own.items():
        for name in ("norm.weight", "norm.bias"):
            assert_close(spec.parameters(kept[f"{k}/model"])[name], norm[name], MAGNIFIED, msg=name)


def test_a_client_is_served_by_the_shared_layers_with_its_own_parameters_and_statistics(one):
    fed, result, _, server, own = one

    def rights(names):
        found = []
        for k, client in enumerate(fed.clients):
            net = copy.deepcopy(server)
            net.load_state_dict({n: t for n, t in own.get(k, {}).items() if n in names}, strict=False)
            with torch.no_grad():
                found.append((net.eval()(client.x_test.double()).argmax(1) == client.y_test).double().mean().item())
        return found

    parameters, statistics = ["norm.weight", "norm.bias"], ["norm.running_mean", "norm.running_var"]
    both, summary = rights(parameters + statistics), result.summary
    assert summary["personal_accuracy_mean"] == pytest.approx(np.mean(both))
    assert summary["personal_accuracy_std"] == pytest.approx(np.std(both))
    assert summary["personal_accuracy_worst"] == pytest.approx(min(both))
    for less in (parameters, statistics):
        assert np.mean(rights(less)) != pytest.approx(np.mean(both)), "the test could not fail otherwise"


def test_nothing_of_batchnorm_is_paid_for(one):
    _, result, *_ = one
    shared = 4 * 2 * 9 + 16 * 3 + 3
    for way in ("up", "down"):
        assert result.summary[f"bytes_{way}"] == ROUNDS * 2 * 8 * shared
        assert result.summary[f"buffer_bytes_{way}"] == 0
    assert result.summary["client_weighting"] == "uniform"


def test_a_model_without_batchnorm_is_that_of_fedavg_and_it_is_told():
    def run(chosen):
        options = {"rounds": 3, "engine": "inline", "client_weighting": "uniform", **BUDGET}
        return unskew.run(domains(), model="mlp", model_options={"hidden": [5]}, method=chosen, **options)

    with pytest.warns(UserWarning, match="all parameters are averaged"):
        mine = run("fedbn")
    assert torch.equal(mine.vector, run("fedavg").vector)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(rounds=1)


def test_statistics_without_trained_parameters_are_averaged_unless_buffers_are_local():
    """In a client's second round its statistics are those of the server; a warning says that they are averaged."""
    starts = []

    class Watch(unskew.ClientRule):
        name, summary, paper = "watch", "for tests", "none"

        def begin(self, ctx):
            starts.append(ctx.b_global.clone())
            return {}

    def spread(**options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(72, 4), torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 3)
        )
        starts.clear()
        budget = {**BUDGET, "participation": 1.0, "rounds": 2, "engine": "inline", **options}
        unskew.run(domains(), model=model, method=["fedbn", Watch()], **budget)
        return float((torch.stack(starts[5:]) - starts[5]).abs().max())

    with pytest.warns(UserWarning, match=r"averages the statistics of BatchNorm without .* \(2\).* Set buffers=local"):
        assert spread() == 0
    with pytest.warns(UserWarning, match="keeps no layers"):
        assert spread(buffers="local") > 0.1


@pytest.mark.parametrize("other", ["ditto", "fedrep", "fedals", "ca2fl", "feddle"])
def test_sums_that_mean_nothing_are_refused(other):
    for spelling in (f"fedbn+{other}", f"{other}+fedbn"):
        with pytest.raises(MethodConflictError, match=f"fedbn.*{other}|{other}.*fedbn"):
            method(spelling)


@pytest.mark.parametrize("chosen", ["fedbn", "fedbn+scaffold"])
def test_engines_agree(chosen):
    options = {"fed": blobs([9, 14, 11, 8, 10]), "batch_size": 7}
    mine, reference = train(chosen, engine="vectorized", **options), train(chosen, **options)
    assert_engines_agree(mine.vector, reference.vector)
    assert mine.summary["personal_accuracy_mean"] == reference.summary["personal_accuracy_mean"]


def test_a_resumed_run_goes_on_with_every_clients_batchnorm(one, tmp_path):
    fed, whole, *_ = one
    with pytest.raises(Stop):
        train(fed=fed, out=tmp_path / "run", callbacks=[StopAfter(2)])
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "run", federation=fed, model=SmallBatchNorm(dropout=0.0))
    assert torch.equal(rest.vector, whole.vector)
    for name in ("personal_accuracy_mean", "personal_accuracy_std", "bytes_up", "bytes_down"):
        assert rest.summary[name] == whole.summary[name], name
