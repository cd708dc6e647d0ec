"""FedGH against a loop over the paper's formulas, and in its limits."""

import pytest
import torch
from support.batch_loop import CLASSES, Recorder, local, run, skewed
from support.class_means import WIDTH, Watch, class_means, network, outputs, recorded_keys
from torch import nn
from torch.nn.functional import cross_entropy

from unskew.errors import ConfigError
from unskew.methods.fedgh import FedGH
from unskew.methods.own_models import PURPOSE
from unskew.seeding import fold, uniform

EXACT = 1e-12
HEAD = WIDTH * CLASSES + CLASSES
slope = torch.func.grad(lambda v, x, y: cross_entropy(outputs(v, x)[1], y))
pytestmark = pytest.mark.filterwarnings("ignore:With fedgh, clients send")


class Starts(Recorder):
    """Also records the models that training starts from."""

    def __init__(self):
        super().__init__()
        self.starts = []

    def begin(self, ctx):
        self.starts.append(ctx.v_global.clone())
        return super().begin(ctx)


@pytest.fixture
def keys(monkeypatch):
    """The server's keys of the rounds, from which it draws the order of class means."""
    return recorded_keys(monkeypatch, FedGH)


def start_of():
    return torch.nn.utils.parameters_to_vector(network().parameters()).detach()


def trained_head(head, sent, key, epochs, lr, batch):
    """The head after SGD of PyTorch on the class means."""
    layer = nn.Linear(WIDTH, CLASSES).double()
    nn.utils.vector_to_parameters(head.clone(), layer.parameters())
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    rows = [(own[c], c) for own in sent for c in sorted(own)]
    for epoch in range(epochs):
        order = uniform(fold(fold(key, PURPOSE), epoch), (len(rows),)).argsort().tolist()
        for start in range(0, len(rows), batch):
            picked = [rows[i] for i in order[start : start + batch]]
            optimizer.zero_grad()
            means, classes = torch.stack([m for m, _ in picked]), torch.tensor([c for _, c in picked])
            cross_entropy(layer(means), classes).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(layer.parameters()).detach()


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("epochs", "lr", "batch"), [(5, 0.5, 3), (20, 0.05, 10)])
def test_a_run_is_the_papers_loop(epochs, lr, batch, participation, keys):
    fed, watch = skewed(), Watch()
    method = [f"fedgh:epochs={epochs},lr={lr},batch={batch}", watch]
    result, cohorts = run(method, participation, fed, network())
    start = start_of()
    own, trained, head = {}, [], start[-HEAD:]
    for key, cohort in zip(keys, cohorts, strict=True):
        sent = []
        for k, batches in cohort.items():
            v = torch.cat([own.get(k, start)[:-HEAD], head])
            own[k] = local(v, batches, slope)
            trained.append(own[k])
            sent.append(class_means(own[k], fed.clients[k]))
        head = trained_head(head, sent, key, epochs, lr, batch)
    for found, expected in zip(watch.models, trained, strict=True):
        assert float((found - expected).abs().max()) < EXACT
    assert torch.equal(result.vector, start)


def test_without_epochs_every_round_starts_with_the_initial_head():
    recorder, watch = Starts(), Watch()
    run(["fedgh:epochs=0", watch], 1.0, None, network(), recorder=recorder, outermost=True)
    assert len(recorder.starts) == 16
    for v in recorder.starts:
        assert torch.equal(v[-HEAD:], start_of()[-HEAD:])
    for before, after in zip(watch.models[:-4], recorder.starts[4:], strict=True):
        assert torch.equal(before[:-HEAD], after[:-HEAD])  # the own body
        assert not torch.equal(before[-HEAD:], after[-HEAD:])


def test_one_client_is_a_softmax_regression_on_its_means():
    """The gradient of the head is ``(p - y) m``; at the optimum it vanishes, also with the means of one client only."""
    heads, update = [], FedGH.server_update
    sent = []

    def recorded(self, state, updates):
        sent.append(updates.individual[0].upload["fedgh"])
        heads.append(update(self, state, updates)["head"])
        return {"head": heads[-1]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedGH, "server_update", recorded)
        run("fedgh:epochs=1,lr=0.3,batch=99", 1.0, skewed((9,), present=3), network(), rounds=1)
    present = sent[0]["present"] > 0
    means, classes = sent[0]["means"][present], present.nonzero()[:, 0]
    before = start_of()[-HEAD:]
    w, b = before[:-CLASSES].view(CLASSES, WIDTH), before[-CLASSES:]
    error = torch.softmax(means @ w.T + b, 1)
    error[torch.arange(3), classes] -= 1
    expected = torch.cat([(w - 0.3 * error.T @ means / 3).flatten(), b - 0.3 * error.mean(0)])
    assert float((heads[0] - expected).abs().max()) < EXACT


def test_a_model_that_is_only_a_head_is_sent_in_full():
    """The head is then as long as the model."""
    result, _ = run("fedgh:epochs=1")
    assert result.summary["bytes_down"] == 3 * 4 * (5 * CLASSES + CLASSES) * 8


def test_bytes_are_those_of_the_formula():
    """The head down from the second round on; class means and a flag per class up."""
    summary = run("fedgh:epochs=1", 1.0, None, network())[0].summary
    assert summary["bytes_up"] == 4 * 4 * (CLASSES * WIDTH + CLASSES) * 8
    assert summary["bytes_down"] == 3 * 4 * HEAD * 8


def test_a_frozen_head_is_rejected():
    model = network()
    model[2].requires_grad_(False)
    with pytest.raises(ConfigError, match="fedgh trains the head of the model, but '2' is frozen"):
        run("fedgh", 1.0, None, model)
