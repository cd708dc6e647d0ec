"""FedTGP against a loop over the paper's formulas, and in its limits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.batch_loop import CLASSES, local, run, skewed
from support.class_means import WIDTH, Watch, class_means, network, pulled_slope, recorded_keys
from torch.nn.functional import cross_entropy, relu

from unskew.methods.fedtgp import FedTGP, distances, draw_network
from unskew.methods.own_models import PURPOSE
from unskew.seeding import fold, uniform

EXACT = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore:With fedtgp, clients send")


@pytest.fixture
def keys(monkeypatch):
    """The server's keys of the rounds, from which it draws the first network and the order of class means."""
    return recorded_keys(monkeypatch, FedTGP)


def parts(values):
    """The embedding and the layers of a network ``[p]``."""
    sizes = [CLASSES * WIDTH, WIDTH * WIDTH, WIDTH, WIDTH * WIDTH, WIDTH]
    e, w1, b1, w2, b2 = torch.split(values, sizes)
    return e.view(CLASSES, WIDTH), w1.view(WIDTH, WIDTH), b1, w2.view(WIDTH, WIDTH), b2


def generate(values):
    e, w1, b1, w2, b2 = parts(values)
    return relu(e @ w1.T + b1) @ w2.T + b2


def margin_of(sent, threshold):
    classes = sorted({c for own in sent for c in own})
    mean = {c: torch.stack([own[c] for own in sent if c in own]).mean(0) for c in classes}
    gaps = [min(float((mean[c] - mean[d]).norm()) for d in classes if d != c) for c in classes]
    return min(max(gaps), threshold)


def objective(values, rows, margin):
    """The mean cross-entropy of a list of pairs of class mean and class."""
    generated = generate(values)
    total = 0
    for m, c in rows:
        z = torch.stack([-((m - t).square().sum().sqrt() + margin * (d == c)) for d, t in enumerate(generated)])
        total = total + cross_entropy(z[None], torch.tensor([c]))
    return total / len(rows)


def server_round(values, sent, key, epochs, lr, batch, threshold):
    rows = [(own[c], c) for own in sent for c in sorted(own)]
    margin = margin_of(sent, threshold)
    for epoch in range(epochs):
        order = uniform(fold(fold(key, PURPOSE), epoch), (len(rows),)).argsort().tolist()
        for start in range(0, len(rows), batch):
            picked = [rows[i] for i in order[start : start + batch]]
            values = values - lr * torch.func.grad(objective)(values, picked, margin)
    return values


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("ld", "epochs", "lr", "batch", "threshold"), [(10, 3, 0.1, 3, 100), (2, 4, 0.3, 10, 0.2)])
def test_a_run_is_the_papers_loop(ld, epochs, lr, batch, threshold, participation, keys):
    fed, watch = skewed(), Watch()
    options = f"ld={ld},epochs={epochs},lr={lr},batch={batch},threshold={threshold}"
    result, cohorts = run([f"fedtgp:{options}", watch], participation, fed, network(), lr=0.05)
    start = torch.nn.utils.parameters_to_vector(network().parameters()).detach()
    own, known, trained, values = {}, {}, [], draw_network(keys[0], CLASSES, WIDTH)
    seen, margins = set(), []
    for key, cohort in zip(keys, cohorts, strict=True):
        sent = []
        for k, batches in cohort.items():
            own[k] = local(own.get(k, start), batches, pulled_slope(known, ld), lr=0.05)
            trained.append(own[k])
            sent.append(class_means(own[k], fed.clients[k]))
        values = server_round(values, sent, key, epochs, lr, batch, threshold)
        seen |= {c for one in sent for c in one}
        margins.append(margin_of(sent, threshold))
        known = {c: t for c, t in enumerate(generate(values)) if c in seen}
    for found, expected in zip(watch.models, trained, strict=True):
        assert float((found - expected).abs().max()) < EXACT
    assert torch.equal(result.vector, start)
    assert (threshold in margins) == (threshold < 1)  # the parameters cover both sides of the threshold


class Sent(list):
    """Updates of a round."""

    key = torch.tensor(1)


def test_one_step_of_the_server_is_the_gradient_by_hand():
    """Two classes of one client each, one feature, and layers that change nothing: prototypes 2 and 0.5, means 3 and 1."""

    def upload(mean, c):
        means, present = torch.zeros(2, 2, 1, dtype=torch.float64).unbind()
        means[c], present[c] = mean, 1
        return SimpleNamespace(upload={"fedtgp": {"means": means, "present": present[:, 0]}})

    network = torch.tensor([2.0, 0.5, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    state = {"network": network, "known": torch.ones(2, dtype=torch.float64), "means": network[:2, None]}
    new = FedTGP(epochs=1, lr=0.1).server_update(state, Sent([upload(3.0, 0), upload(1.0, 1)]))
    margin = 2.0
    p = 1 / (1 + np.exp(-2.5 + 1.0 + margin))  # of class 0 for mean 3, at distances 1 and 2.5
    q = 1 / (1 + np.exp(-0.5 - margin + 1.0))  # of class 0 for mean 1, at distances 1 and 0.5
    # The distance of mean 3 falls with both prototypes; that of mean 1 rises with 2 and falls with 0.5.
    slope = np.array([(p - 1) - q, (1 - p) + (1 - q - 1)]) / 2
    assert np.allclose(new["network"][:2].numpy(), network[:2].numpy() - 0.1 * slope, rtol=0, atol=EXACT)


def test_the_margin_is_the_largest_distance_to_a_nearest_class():
    means = torch.tensor([[0.0], [1.0], [4.0], [9.0]])
    assert FedTGP().margin(means, torch.tensor([True, True, True, False])) == 3
    assert FedTGP(threshold=2).margin(means, torch.tensor([True, True, True, False])) == 2
    assert FedTGP().margin(means, torch.tensor([True, False, False, False])) == 100  # of one class alone


def test_the_gradient_at_equal_vectors_is_finite():
    points = torch.ones(2, 3, dtype=torch.float64)
    slope = torch.func.grad(lambda b: distances(points, b).sum())(points)
    assert torch.equal(slope, torch.zeros_like(slope))


def test_the_first_network_is_drawn_as_by_pytorch():
    classes, width = 300, 40
    embedding, *layers = torch.split(
        draw_network(torch.tensor(5), classes, width), [classes * width, width**2, width, width**2, width]
    )
    assert float(embedding.mean()) == pytest.approx(0, abs=0.05)  # 5 standard errors: 5 / sqrt(12,000)
    assert float(embedding.std()) == pytest.approx(1, abs=0.04)
    for layer in layers:
        assert float(layer.abs().max()) <= width**-0.5
    assert float(layers[0].std()) == pytest.approx((width * 3) ** -0.5, rel=0.1)


def test_without_pull_clients_train_alone():
    free, alone = Watch(), Watch()
    run(["fedtgp:ld=0,epochs=1", free], 1.0, None, network())
    run(["fedproto:ld=0", alone], 1.0, None, network())
    assert all(torch.equal(a, b) for a, b in zip(free.models, alone.models, strict=True))
