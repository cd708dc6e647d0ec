"""FedProto against a loop over the paper's formulas, and in its limits."""

import pytest
import torch
from support.batch_loop import CLASSES, local, run, skewed
from support.class_means import WIDTH, Watch, class_means, network, outputs, pulled_slope
from torch.nn.functional import cross_entropy

import unskew

EXACT = 1e-12


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("ld", [1.0, 3.0])
def test_a_run_is_the_papers_loop(ld, participation):
    fed, watch = skewed(), Watch()
    result, cohorts = run([f"fedproto:ld={ld}", watch], participation, fed, network())
    start = torch.nn.utils.parameters_to_vector(network().parameters()).detach()
    own, means, trained = {}, {}, []
    for cohort in cohorts:
        sent = []
        for k, batches in cohort.items():
            own[k] = local(own.get(k, start), batches, pulled_slope(means, ld))
            trained.append(own[k])
            sent.append(class_means(own[k], fed.clients[k]))
        classes = {c for one_client in sent for c in one_client}
        new = {c: [one_client[c] for one_client in sent if c in one_client] for c in classes}
        means = {**means, **{c: sum(vectors) / len(vectors) for c, vectors in new.items()}}
    for found, expected in zip(watch.models, trained, strict=True):
        assert float((found - expected).abs().max()) < EXACT
    assert torch.equal(result.vector, start)


def test_without_pull_clients_train_alone():
    fed, watch = skewed(), Watch()
    _, cohorts = run(["fedproto:ld=0", watch], 1.0, fed, network())
    own = dict.fromkeys(range(4), torch.nn.utils.parameters_to_vector(network().parameters()).detach())
    slope = torch.func.grad(lambda v, x, y: cross_entropy(outputs(v, x)[1], y))
    for cohort in cohorts:
        own = {k: local(own[k], batches, slope) for k, batches in cohort.items()}
    for k in own:
        assert float((watch.models[-4:][k] - own[k]).abs().max()) < EXACT


def test_a_client_is_served_by_its_own_model():
    fed = unskew.load_federation("digits", clients=5, partition="classes:2", holdout=0.2)
    result = unskew.run(
        fed, model="mlp", method="fedproto", rounds=4, local_epochs=2, lr=0.1, engine="inline"
    )  # fmt: skip
    assert result.summary["personal_accuracy_mean"] > 0.8
    assert result.summary["client_accuracy_mean"] < 0.5


@pytest.mark.parametrize("method", ["fedproto", "fedtgp:epochs=1"])
def test_bytes_are_those_of_the_formula(method):
    """Class means and a flag per class, in the first round only up."""
    summary = run(method, 1.0, None, network())[0].summary
    assert summary["bytes_up"] == 4 * 4 * (CLASSES * WIDTH + CLASSES) * 8
    assert summary["bytes_down"] == 3 * 4 * (CLASSES * WIDTH + CLASSES) * 8


def test_secure_aggregation_gives_the_same_models():
    masked, plain = Watch(), Watch()
    for watch, value in ((masked, "required"), (plain, "off")):
        run(["fedproto", watch], 1.0, None, network(), secure_aggregation=value)
    assert all(torch.equal(a, b) for a, b in zip(masked.models, plain.models, strict=True))
