"""FedDisco against a loop over the paper's formula, by hand, and in its limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, initial, local, loss, run, skewed
from support.protocol import facts
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.deployment.server.masked_engine import check_maskable
from unskew.deployment.server.membership import check_late_joining
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.feddisco import FedDisco
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo

EXACT = 1e-12
slope = torch.func.grad(loss)


def discrepancy(q, target, distance):
    if distance == "kl":
        return sum(a * np.log(a / b) for a, b in zip(q, target, strict=True) if a > 0)
    if distance == "cosine":
        return 1 - sum(q * target) / np.sqrt(sum(q * q) * sum(target * target))
    return sum(abs(q - target)) if distance == "l1" else np.sqrt(sum((q - target) ** 2))


def expected(fed, cohort, a, b, distance="kl", target="uniform"):
    counts = [torch.bincount(client.y, minlength=CLASSES).numpy() for client in fed.clients]
    goal = np.ones(CLASSES) / CLASSES if target == "uniform" else sum(counts) / sum(map(sum, counts))
    d = {k: discrepancy(counts[k] / sum(counts[k]), goal, distance) for k in cohort}
    if distance == "kl":
        d = {k: value / sum(d.values()) for k, value in d.items()}
    total = sum(sum(counts[k]) for k in cohort)
    p = {k: max(0.0, sum(counts[k]) / total - a * d[k] + b) for k in cohort}
    return {k: value / sum(p.values()) for k, value in p.items()}


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    ("distance", "target"), [("kl", "uniform"), ("kl", "all"), ("l1", "all"), ("l2", "uniform"), ("cosine", "all")]
)
def test_a_run_is_the_papers_loop(distance, target, participation):
    fed = skewed()
    method = f"feddisco:a=0.4,b=0.1,distance={distance},target={target}"
    result, cohorts = run(method, participation, fed)
    x = initial()
    for cohort in cohorts:
        p = expected(fed, cohort, 0.4, 0.1, distance, target)
        x = sum(p[k] * local(x, batches, slope) for k, batches in cohort.items())
    assert float((result.vector - x).abs().max()) < EXACT
    assert result.summary["client_weighting"] == "computed"


def info(counts):
    counts = np.array(counts)
    return replace(
        facts(len(counts)),
        size=lambda k: int(counts[k].sum()),
        sizes=lambda: counts.sum(1),
        class_counts=lambda: counts,
        classes=counts.shape[1],
    )


def test_the_weights_of_a_small_case():
    """KL to uniform of (2, 0), (1, 1), (3, 3) is ln 2, 0, 0; normalized 1, 0, 0. Shares are 0.2, 0.2, 0.6."""
    known = info([[2, 0], [1, 1], [3, 3]])
    assert_close(FedDisco(a=0.1, b=0.2).weights(known, [0, 1, 2]), np.array([0.3, 0.4, 0.8]) / 1.5 * 10, TRAINING)
    assert_close(FedDisco(a=0.5, b=0.1).weights(known, [0, 1, 2]), np.array([0.0, 0.3, 0.7]) * 10, TRAINING)
    assert_close(FedDisco(a=0.1, b=0.0).weights(known, [0, 1]), np.array([0.4, 0.5]) / 0.9 * 4, TRAINING)
    assert_close(FedDisco(a=9.0, b=0.0).weights(known, [0]), np.array([2.0]), TRAINING)
    assert FedDisco().weights(known, []).shape == (0,)


def test_equal_classes_give_sample_weights_up_to_the_constant():
    """Also if rounding makes the distances to their common shares differ."""
    known = info([[1, 3], [2, 6], [3, 9]])
    thirds = info([[1, 1, 1], [2, 2, 2], [7, 7, 7]])
    assert_close(FedDisco(a=9.0, b=0.0).weights(thirds, [0, 1, 2]), np.array([3, 6, 21]), TRAINING)
    shares = np.array([1, 2, 3]) / 6
    constants = {"uniform": 0.1, "all": 0.2}  # with equal discrepancies of 1/3, and without discrepancies
    for target, constant in constants.items():
        weights = FedDisco(a=0.3, b=0.2, target=target).weights(known, [0, 1, 2])
        assert_close(weights, (shares + constant) / (1 + 3 * constant) * 24, TRAINING)


def test_a_server_with_as_many_samples_as_the_clients_has_half_of_the_weight():
    """Balanced clients of equal classes: FedDisco's weights are the samples, so ``hfcl`` is as with FedAvg."""
    rows = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(0))
    clients = [(rows + k, torch.arange(8) % CLASSES) for k in range(3)]
    fed = unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0, server=clients[1])
    one, two = (run(f"{e}hfcl:n_s=24", 1.0, fed)[0].vector for e in ("feddisco+", ""))
    assert float((one - two).abs().max()) < EXACT


def test_without_both_terms_it_is_fedavg_bit_for_bit():
    assert torch.equal(run("feddisco:a=0,b=0")[0].vector, run("fedavg")[0].vector)


def test_a_client_of_weight_zero_leaves_the_mean_unchanged_but_its_traffic_counts():
    """Client 0 alone has one class, and few samples."""
    fed = skewed()
    single = (fed.clients[0].x, torch.zeros_like(fed.clients[0].y))
    clients = [single, *((client.x, client.y) for client in list(fed.clients)[1:])]
    skew = unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0)
    result, cohorts = run("feddisco:a=0.2,b=0,distance=l1", 1.0, skew)
    x = initial()
    for cohort in cohorts:
        p = expected(skew, cohort, 0.2, 0.0, "l1")
        assert p[0] == 0
        x = sum(p[k] * local(x, batches, slope) for k, batches in cohort.items() if k > 0)
    assert float((result.vector - x).abs().max()) < EXACT
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 4 * 4 * 24 * 8


@pytest.mark.parametrize("other", ["scaffold", "fedbuff", "median", "fedrep"])
def test_methods_with_weights_of_their_own_are_refused(other):
    with pytest.raises(MethodConflictError, match="weights"):
        unskew.method(f"feddisco+{other}")


@pytest.mark.parametrize("other", ["dp:noise=1", "dpsgd:noise=1"])
def test_private_methods_refuse_it(other):
    with pytest.raises(MethodConflictError, match="weights"):
        unskew.method(f"feddisco+{other}")


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_a_given_weighting_is_refused(weights):
    with pytest.raises(ConfigError, match=f"client_weighting={weights} contradicts"):
        run("feddisco", client_weighting=weights)


def test_delays_are_refused():
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run("feddisco", network={"delay": "fixed:1"})


def test_secure_aggregation_gives_the_same_vector():
    masked, plain = (run("feddisco", secure_aggregation=value)[0] for value in ("required", "off"))
    assert torch.equal(masked.vector, plain.vector)


def test_sites_refuse_masks_because_they_cannot_verify_their_weights():
    with pytest.raises(ConfigError, match="No site can verify its weight"):
        check_maskable(unskew.method("feddisco"), 4, False)


def test_no_site_may_join_later():
    fed = skewed()
    spec = ModelSpec(torch.nn.Linear(5, CLASSES), (5,), CLASSES)
    with pytest.raises(ConfigError, match="feddisco requires information on all sites"):
        check_late_joining(unskew.method("feddisco"), spec, FederationInfo.of(fed))
