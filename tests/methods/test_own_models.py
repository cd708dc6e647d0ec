"""Clients with models of different architectures, against a loop over the papers' formulas."""

import itertools
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from support.batch_loop import CLASSES, FEATURES, Recorder, classifier, client_states, initial, local, run, skewed
from support.class_means import WIDTH, Watch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import unskew
from unskew.errors import CheckpointError, ConfigError
from unskew.methods.fedgh import FedGH

EXACT = 1e-12
HEAD = WIDTH * CLASSES + CLASSES
METHODS = ("fedproto:ld=3", "fedtgp:epochs=3", "fedgh:epochs=3", "local")
MIXED = [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [12, 8], "norm": "batch"}]
DIGITS = {"data": "digits", "clients": 5, "partition": "classes:2", "holdout": 0.2, "local_epochs": 1, "lr": 0.1}
pytestmark = pytest.mark.filterwarnings("ignore:With fed(proto|tgp|gh), clients send")


class OwnWatch(Watch):
    supports_several_models = True


class OwnRecorder(Recorder):
    supports_several_models = True


def networks():
    """Three architectures with features of the same shape."""
    torch.manual_seed(0)
    bodies = (
        [nn.Linear(FEATURES, WIDTH), nn.Tanh()],
        [nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, WIDTH), nn.Tanh()],
        [nn.Linear(FEATURES, 9), nn.ReLU(), nn.Linear(9, WIDTH), nn.Sigmoid()],
    )
    return [nn.Sequential(*body, nn.Linear(WIDTH, CLASSES)).double() for body in bodies]


def start_of(net):
    return parameters_to_vector(net.parameters()).detach()


def outputs(net, v, x):
    """Features and logits of a network at the parameters ``v [d]``."""
    ends = torch.split(v, [p.numel() for p in net.parameters()])
    named = {name: part.view(p.shape) for (name, p), part in zip(net.named_parameters(), ends, strict=True)}
    a = x
    for index, layer in enumerate(net):
        own = {name.split(".")[1]: p for name, p in named.items() if name.startswith(f"{index}.")}
        before, a = a, functional_call(layer, own, (a,))
    return before, a


def class_means(net, v, client):
    a = outputs(net, v, client.x.double())[0]
    return {int(c): a[client.y == c].mean(0) for c in client.y.unique()}


def pulled_slope(net, known, ld):
    """The gradient of the cross-entropy with the pull of features towards ``known`` means."""

    def objective(v, x, y):
        a, z = outputs(net, v, x)
        pulls = [((a[i] - known[c]) ** 2).mean() for i, c in enumerate(y.tolist()) if c in known]
        return cross_entropy(z, y) + ld * sum(pulls) / len(y)

    return torch.func.grad(objective)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedproto_with_three_architectures_is_the_papers_loop(participation):
    fed, watch, nets = skewed(), OwnWatch(), networks()
    result, cohorts = run(["fedproto:ld=3", watch], participation, fed, nets, recorder=OwnRecorder())
    own, means, trained = {}, {}, []
    for cohort in cohorts:
        sent = []
        for k, batches in cohort.items():
            net = nets[k % 3]
            own[k] = local(own.get(k, start_of(net)), batches, pulled_slope(net, means, 3.0))
            trained.append(own[k])
            sent.append(class_means(net, own[k], fed.clients[k]))
        classes = {c for each in sent for c in each}
        new = {c: [each[c] for each in sent if c in each] for c in classes}
        means = {**means, **{c: sum(vectors) / len(vectors) for c, vectors in new.items()}}
    assert {len(v) for v in trained} == {len(start_of(net)) for net in nets}
    for found, expected in zip(watch.models, trained, strict=True):
        assert float((found - expected).abs().max()) < EXACT
    assert torch.equal(result.vector, start_of(nets[0]))
    clients = sum(map(len, cohorts))
    assert result.summary["bytes_up"] == clients * (CLASSES * WIDTH + CLASSES) * 8  # no part of a model
    assert result.summary["model_parameters"] == [len(start_of(net)) for net in nets]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedgh_gives_all_architectures_the_head_of_the_server(participation, monkeypatch):
    fed, watch, nets = skewed(), OwnWatch(), networks()
    heads, sent, update = [], [], FedGH.server_update

    def recorded(self, state, updates):
        new = update(self, state, updates)
        heads.append(new["head"])
        sent.append({u.client: u.upload["fedgh"]["means"] for u in updates})
        return new

    monkeypatch.setattr(FedGH, "server_update", recorded)
    _, cohorts = run(["fedgh:epochs=2,lr=0.5", watch], participation, fed, nets, recorder=OwnRecorder())
    own, trained = {}, []
    for t, cohort in enumerate(cohorts):
        for k, batches in cohort.items():
            net = nets[k % 3]
            v = own.get(k, start_of(net))
            v = torch.cat([v[:-HEAD], heads[t - 1]]) if t else v
            own[k] = local(
                v, batches, torch.func.grad(lambda v, x, y, net=net: cross_entropy(outputs(net, v, x)[1], y))
            )
            trained.append(own[k])
            for c, mean in class_means(net, own[k], fed.clients[k]).items():
                assert float((sent[t][k][c] - mean).abs().max()) < EXACT
    for found, expected in zip(watch.models, trained, strict=True):
        assert float((found - expected).abs().max()) < EXACT


def test_a_client_is_evaluated_and_served_with_its_own_architecture(tmp_path):
    fed, nets = skewed((8, 9, 7, 10, 6)), networks()
    arrays = [(client.x.numpy(), client.y.numpy()) for client in fed.clients]
    fed = unskew.Federation.from_arrays(arrays, test=arrays[0], classes=CLASSES, holdout=0.3)
    result = unskew.run(
        fed, model=nets, method="fedproto", rounds=3, local_epochs=2, batch_size=4, lr=0.2, precision="fp64",
        participation=0.6, engine="inline", out=tmp_path,
    )  # fmt: skip
    own = {k: tensors["model"] for k, tensors in client_states(tmp_path).items()}
    assert 2 <= len(own) < 5  # the others never took part and have their initial models
    x = fed.test[0].double()
    for k, row in enumerate(result.clients):
        v, client = own.get(k, start_of(nets[k % 3])), fed.clients[k]
        right = outputs(nets[k % 3], v, client.x_test.double())[1].argmax(1) == client.y_test
        assert row["personal_accuracy"] == pytest.approx(float(right.double().mean()))
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            served = unskew.load_predictor(tmp_path, client_number=k, model=networks())
        found = torch.as_tensor(served.predict_proba(x))
        assert float((found - outputs(nets[k % 3], v, x)[1].softmax(1)).abs().max()) < 1e-7  # in float32
        assert any("the initial model of its architecture serves it" in str(n.message) for n in notes) is (k not in own)


def test_unseen_clients_are_evaluated_with_the_initial_model_of_their_architecture(tmp_path):
    """With the model that serves them, on the samples that the partition gives them."""
    data = {key: DIGITS[key] for key in ("data", "partition", "holdout")}
    fed = unskew.load_federation(**data, clients=7, unseen=0.3)
    assert (len(fed.clients), len(fed.unseen)) == (5, 2)
    given = {"rounds": 1, "local_steps": 1, "engine": "inline", "precision": "fp64"}
    result = unskew.run(fed, model=[*MIXED, "logistic"], method="local", out=tmp_path / "run", **given)
    rows = [row for row in result.clients if row.get("unseen")]
    assert [row["client"] for row in rows] == [5, 6]
    for row, client in zip(rows, fed.unseen, strict=True):
        with pytest.warns(RuntimeWarning, match="the initial model of its architecture serves it"):
            served = unskew.load_predictor(tmp_path / "run", client_number=row["client"])
        chances, y = torch.as_tensor(served.predict_proba(client.x_test)).double(), client.y_test
        assert row["accuracy"] == pytest.approx(float((chances.argmax(1) == y).double().mean()))
        assert row["loss"] == pytest.approx(float(-chances[range(len(y)), y].log().mean()), rel=1e-5)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("method", METHODS)
def test_two_equal_architectures_are_one_model(method, buffers, tmp_path):
    entry = {"name": "mlp", "hidden": [8], "norm": "batch"}
    options = {**DIGITS, "method": method, "rounds": 3, "participation": 0.6, "buffers": buffers, "engine": "inline"}
    single = unskew.run(model=entry, out=tmp_path / "single", **options)
    double = unskew.run(model=[entry, entry], out=tmp_path / "double", **options)
    assert torch.equal(single.vector, double.vector)
    own = [[{n: v for n, v in row.items() if n.startswith("personal")} for row in r.clients] for r in (single, double)]
    assert own[0] == own[1]
    states = [client_states(tmp_path / name) for name in ("single", "double")]
    assert states[0].keys() == states[1].keys()
    for k in states[0]:
        assert all(torch.equal(t, states[1][k][name]) for name, t in states[0][k].items())
    timed = {"seconds", "setup_seconds", "train_seconds"}
    rows = [[{n: v for n, v in row.items() if n not in timed} for row in r.history] for r in (single, double)]
    assert json.dumps(rows[0]) == json.dumps(rows[1])


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one_on_every_engine(method, tmp_path):
    options = {**DIGITS, "model": MIXED, "method": method, "participation": 0.6}
    whole = unskew.run(rounds=4, out=tmp_path / "whole", engine="inline", **options)
    unskew.run(rounds=2, out=tmp_path / "part", engine="processes", workers=2, **options)
    resumed = unskew.resume(tmp_path / "part", rounds=4)
    assert resumed.clients == whole.clients
    files = [
        {path.name: load_file(path) for path in sorted((tmp_path / name / "checkpoints").glob("*4/*.safetensors"))}
        for name in ("whole", "part")
    ]
    assert files[0].keys() == files[1].keys()
    for name, tensors in files[0].items():
        assert tensors.keys() == files[1][name].keys()
        assert all(torch.equal(t, files[1][name][key]) for key, t in tensors.items())
    assert {len(own["model"]) for own in client_states(tmp_path / "part").values()} == {8 * 65 + 90, 12 * 65 + 234}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedrep", "fedamp", "pooled", "ditto", "fedproto+fedprox"])
def test_methods_with_a_common_model_are_rejected(method):
    with pytest.raises(ConfigError, match=r"support this: fedproto, fedtgp, fedgh, local"):
        unskew.run(method=method, model="mlp,logistic", rounds=1, **DIGITS)


def test_a_checkpoint_of_other_models_is_not_called_corrupted(tmp_path):
    def net(*sizes):
        return nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in itertools.pairwise((64, *sizes, 10))))

    options = {**DIGITS, "method": "local", "engine": "inline"}
    unskew.run(rounds=1, model=[net(4), net()], out=tmp_path / "run", **options)
    for others in ([net(4), net(5)], [net(), net(4)], [net(4), net(5), net()], [net(4)]):
        with pytest.raises(CheckpointError, match=r"for another model\. Use the model of its run, or the same models"):
            unskew.run(rounds=2, model=others, start_from=str(tmp_path / "run"), **options)
        with pytest.raises(CheckpointError, match=r"for another model\. Use the model of its run, or the same models"):
            unskew.resume(tmp_path / "run", rounds=2, model=others)
    with pytest.raises(CheckpointError, match=r"another model of client .*\. Use the models of the run"):
        unskew.load_predictor(tmp_path / "run", client_number=1, model=[net(4), net(5)])
    with pytest.raises(ConfigError, match=r"no model 'Sequential'.* pass it again there: model="):
        unskew.resume(tmp_path / "run", rounds=2)
    with pytest.raises(ConfigError, match=r"no model 'Sequential'.* pass it again there: model="):
        unskew.load_predictor(tmp_path / "run")


@pytest.mark.parametrize("way", ["resumed", "branched"])
def test_clients_that_never_took_part_go_on_from_the_initial_models_of_the_run(way, tmp_path):
    """Also if the modules that are passed again have other values."""
    given = {**DIGITS, "method": "local", "participation": 0.2, "engine": "inline", "precision": "fp64"}
    fed = unskew.load_federation(**{key: DIGITS[key] for key in ("data", "clients", "partition", "holdout")})

    def nets(seed):
        torch.manual_seed(seed)
        return [nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10)) for width in (4, 5)]

    given = {key: value for key, value in given.items() if key not in DIGITS or key in ("local_epochs", "lr")}
    whole = unskew.run(fed, model=nets(0), rounds=4, out=tmp_path / "whole", **given)
    unskew.run(fed, model=nets(0), rounds=1, out=tmp_path / "part", **given)
    if way == "resumed":
        again = unskew.resume(tmp_path / "part", rounds=4, federation=fed, model=nets(1))
    else:
        again = unskew.run(
            fed, model=nets(1), rounds=4, start_from=str(tmp_path / "part"), out=tmp_path / "again", **given
        )
    assert again.clients == whole.clients
    assert again.history[-1]["train_loss"] == whole.history[-1]["train_loss"]


@pytest.mark.parametrize("count", [3, 4])
def test_models_that_no_client_has_give_a_warning(count):
    options = {**DIGITS, "clients": 3, "partition": "iid", "method": "local", "rounds": 1, "engine": "inline"}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        unskew.run(model=["logistic"] * count, **options)
    assert any("The last 1 of 4 models are not used" in str(note.message) for note in notes) is (count == 4)


def test_architectures_that_do_not_fit_are_rejected():
    with pytest.raises(ConfigError, match=r"fedproto .* different shapes: \(200,\), \(64,\)"):
        unskew.run(method="fedproto", model=["mlp", "logistic"], rounds=1, **DIGITS)
    heads = [nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)) for bias in (True, False)]
    with pytest.raises(ConfigError, match="fedgh gives all clients one head"):
        run("fedgh", 1.0, None, heads, recorder=OwnRecorder())


@pytest.mark.parametrize("options", [{"engine": "vectorized"}, {"engine": "inline", "clients_per_group": 2}])
def test_clients_are_not_trained_together(options):
    with pytest.raises(ConfigError, match="trained one at a time"):
        unskew.run(method="local", model="mlp,logistic", rounds=1, **options, **DIGITS)


def test_diagnostics_that_compare_models_are_rejected():
    with pytest.raises(ConfigError, match="diagnose=consensus"):
        unskew.run(method="local", model="mlp,logistic", rounds=1, diagnose=["consensus"], **DIGITS)
    with pytest.raises(ConfigError, match="diagnosis measures one model"):
        unskew.diagnose(unskew.load_federation("digits", clients=3), model="mlp,logistic", method="local")


def test_too_many_models_of_the_reference_are_rejected(monkeypatch):
    monkeypatch.setattr("unskew.methods.references.LARGEST", 8 * len(initial()) * len(skewed().clients) - 1)
    with pytest.raises(ConfigError, match="local stores a model for each client"):
        unskew.run(skewed(), model=classifier(), method="local", rounds=1, local_steps=1, precision="fp64")
