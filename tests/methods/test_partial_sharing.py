"""FedPer, LG-FedAvg and FedBABU against a loop over the papers' formulas, and in their limits."""

import pytest
import torch
from support.batch_loop import (
    BODY,
    DECAY,
    LR,
    MOMENTUM,
    Recorder,
    check_client_models,
    deep_loss,
    flat,
    run,
    skewed,
    two_layers,
)
from support.federations import blobs
from support.quadratic import Quadratics, gradient, problem
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.registry import method
from unskew.protocol.training_config import Training
from unskew.runs.personal_model_files import load_personal_model

EXACT = 1e-12
slope = torch.func.grad(deep_loss)
D = len(flat(two_layers()))
HEAD = slice(BODY.stop, D)
PARTS = {"fedper": BODY, "lgfedavg": HEAD, "fedbabu": BODY}
"""The part of the model that is averaged."""


def mask(*parts):
    """1 on parts of the model and 0 elsewhere, ``[d]``."""
    trains = torch.zeros(D, dtype=torch.float64)
    for part in parts:
        trains[part] = 1
    return trains


def local(v, batches, trains, rho=0.0):
    """Local SGD with momentum and weight decay on a part of the model, whose perturbation of norm ``rho`` is FedSAM's."""
    buffer = torch.zeros_like(v)
    for x, y in batches:
        g = trains * slope(v, x, y)
        buffer = MOMENTUM * buffer + trains * (slope(v + rho * g / g.norm(), x, y) + DECAY * v)
        v = v - LR * buffer
    return v


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", PARTS)
def test_a_run_is_the_papers_loop(name, participation, tmp_path):
    fed = skewed()
    result, cohorts = run(name, participation, fed, two_layers(), out=tmp_path / "run")
    x, own, part = flat(two_layers()), {}, PARTS[name]
    for cohort in cohorts:
        count = {k: 1.0 if name == "lgfedavg" else float(fed.clients[k].num_samples) for k in cohort}
        for k, batches in cohort.items():
            start = own.get(k, flat(two_layers())).clone()
            start[part] = x[part]
            own[k] = local(start, batches, mask(BODY) if name == "fedbabu" else mask(BODY, HEAD))
        x = x.clone()
        x[part] = sum(count[k] * own[k][part] for k in cohort) / sum(count.values())
    assert float((result.vector - x).abs().max()) < EXACT
    check_client_models(tmp_path / "run", own)


@pytest.mark.parametrize("expression", ["fedbabu+fedsam:rho=0.5", "fedsam:rho=0.5+fedbabu"])
def test_fedsam_perturbs_only_what_is_trained(expression):
    """The radius is the norm of the perturbation of the body; a fixed head is not perturbed."""
    fed = skewed()
    result, cohorts = run(expression, fed=fed, model=two_layers())
    x, body = flat(two_layers()), mask(BODY)
    for cohort in cohorts:
        ends = {k: local(x, batches, body, rho=0.5) for k, batches in cohort.items()}
        total = sum(fed.clients[k].num_samples for k in ends)
        x = sum(fed.clients[k].num_samples / total * end for k, end in ends.items())
    assert float((result.vector - x).abs().max()) < EXACT


@pytest.mark.parametrize("tune", ["full", "head", "body"])
def test_fedbabu_tunes_the_chosen_part_from_the_initial_head(tune, tmp_path):
    """The initial head stays bit for bit until then; with a fixed body, tuning is a logistic regression on features."""
    recorder = Recorder()
    result, _ = run(f"fedbabu:tune={tune}", 0.5, model=two_layers(), recorder=recorder, out=tmp_path / "run")
    assert torch.equal(result.vector[HEAD], flat(two_layers())[HEAD])
    assert not torch.isclose(result.vector[BODY], flat(two_layers())[BODY]).any()
    assert len(recorder.final) == 4
    trains = {"full": mask(BODY, HEAD), "head": mask(HEAD), "body": mask(BODY)}[tune]
    for k, batches in enumerate(recorder.final):
        found = load_personal_model(tmp_path / "run", k)[0]
        assert float((found - local(result.vector, batches, trains)).abs().max()) < EXACT


@pytest.mark.parametrize(("method", "weights"), [("fedper:personal=0", "samples"), ("lgfedavg:share=2", "uniform")])
@pytest.mark.filterwarnings("ignore:lgfedavg keeps no layers")
def test_all_layers_shared_are_fedavg_bit_for_bit(method, weights):
    plain = run("fedavg", 0.5, model=two_layers(), client_weighting=weights)[0]
    assert torch.equal(run(method, 0.5, model=two_layers())[0].vector, plain.vector)


def test_all_layers_personal_are_local_training():
    A, b = problem()
    training = Training(local_steps=3, batch_size=100, lr=0.05, precision="fp64")
    federated = Quadratics(A, b, "fedper", training)
    federated.rounds(4)
    for k, (a, y) in enumerate(zip(A, b, strict=True)):
        v = torch.zeros(3, dtype=torch.float64).numpy()
        for _ in range(4 * 3):
            v = v - 0.05 * gradient(a, y, v)
        assert_close(federated.server.clients.store.get(k)["model"].numpy(), v, TRAINING)
    assert not federated.server.state.v.any()


@pytest.mark.parametrize("name", PARTS)
def test_bytes_are_those_of_the_shared_slices(name):
    summary = run(name, 0.5, model=two_layers())[0].summary
    visits, part = 4 * 2, PARTS[name]
    assert summary["bytes_down"] == summary["bytes_up"] == visits * (part.stop - part.start) * 8


def test_models_without_a_shared_part_and_too_many_layers_are_rejected():
    for name in ("fedper", "fedbabu"):
        with pytest.raises(ConfigError, match=f"{name} shares the body of the model"):
            run(name)
    with pytest.raises(ConfigError, match=r"fedper:personal=2 makes all 2 layers of the model personal.*personal=1 or"):
        run("fedper:personal=2", model=two_layers())
    for option in ("fedper:personal=3", "lgfedavg:share=3"):
        with pytest.raises(ConfigError, match=f"{option} is too large: the model has 2 layers"):
            run(option, model=two_layers())
    with pytest.warns(UserWarning, match="lgfedavg keeps no layers at clients"):
        run("lgfedavg")


@pytest.mark.parametrize("other", ["scaffold", "feddyn", "fedexp", "ditto", "fedgen"])
@pytest.mark.parametrize("name", PARTS)
def test_rules_that_need_the_whole_model_are_rejected(name, other):
    for expression in (f"{name}+{other}", f"{other}+{name}"):
        with pytest.raises(MethodConflictError, match=rf"^{other} .*{name}|{name} and {other} both"):
            method(expression)


@pytest.mark.parametrize("name", PARTS)
def test_fedasync_mixes_the_shared_part_only(name):
    """With weight 1 and one client per round, the last model replaces the global one, as in an average of one."""
    options = {"participation": 0.25, "model": two_layers(), "client_weighting": "uniform"}
    mixed, averaged = (run(e, **options)[0].vector for e in (f"fedasync:alpha0=1,staleness=constant+{name}", name))
    assert float((mixed - averaged).abs().max()) < EXACT


def test_fedbabu_fine_tunes_once():
    for expression in ("fedbabu+ft", "ft+fedbabu"):
        with pytest.raises(MethodConflictError, match="both define a client's personal model"):
            method(expression)


def test_fedbabu_without_evaluated_clients_warns():
    with pytest.warns(UserWarning, match="fedbabu personalizes only evaluated clients"):
        unskew.run(blobs([9, 14]), model="mlp", method="fedbabu", rounds=1, local_steps=1, eval_clients=0)
