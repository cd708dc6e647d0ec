"""HeteroFL and FedRolex against narrow networks that are built, trained and merged one by one."""

import math

import pytest
import torch
from support.batch_loop import Recorder
from torch import nn
from torch.nn.functional import batch_norm, conv2d, cross_entropy, linear, relu

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.simulation.sampler import Sampler

CLASSES, CHANNELS, HIDDEN, SIDE = 3, 5, 7, 4
SHARES = (1.0, 0.5, 0.3)
ROUNDS, LR, MOMENTUM, DECAY = 4, 0.1, 0.5, 0.01


def model(norm=False):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3), nn.BatchNorm2d(CHANNELS) if norm else nn.Identity(), nn.ReLU(), nn.Flatten(),
        nn.Linear(CHANNELS * 4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES),
    )  # fmt: skip


def federation():
    draws = torch.Generator().manual_seed(5)
    clients = []
    for k in range(6):
        y = torch.tensor([k % CLASSES, (k + 1) % CLASSES] * (3 + k))
        clients.append((torch.randn(len(y), 1, SIDE, SIDE, generator=draws) + y[:, None, None, None], y))
    return unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0)


def run(method, participation=1.0, norm=False, **options):
    recorder = Recorder()
    budget = {
        "precision": "fp64",
        "rounds": ROUNDS,
        "local_epochs": 1,
        "batch_size": 4,
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
    }
    fed = federation()
    result = unskew.run(
        fed, model=model(norm), method=[recorder, method], participation=participation, engine="inline",
        **(budget | options),
    )  # fmt: skip
    return result, recorder, fed


def forward(parts, x, rate):
    """The narrow network in training: outputs of hidden layers are divided by the rate."""
    kernel, kernel_bias, *norm, first, first_bias, last, last_bias = parts
    a = conv2d(x, kernel, kernel_bias) / rate
    a = relu(batch_norm(a, None, None, *norm, training=True) if norm else a).flatten(1)
    a = relu(linear(a, first, first_bias) / rate)
    return linear(a, last, last_bias)


def chosen(width, rate, shift):
    return torch.tensor([(shift + i) % width for i in range(math.ceil(width * rate))])


def positions(rate, shift, norm):
    """Index of each tensor's rows and columns in the full model."""
    channels, hidden = chosen(CHANNELS, rate, shift), chosen(HIDDEN, rate, shift)
    pixels = (channels[:, None] * 4 + torch.arange(4)).flatten()
    every, one = torch.arange(CLASSES), torch.arange(1)
    norms = [(channels, None), (channels, None)] if norm else []
    return [(channels, one), (channels, None), *norms, (hidden, pixels), (hidden, None), (every, hidden), (every, None)]


def take(tensor, rows, columns):
    return tensor[rows] if columns is None else tensor[rows][:, columns]


def train(parts, batches, rate, counts):
    parts = [p.clone().requires_grad_(True) for p in parts]
    optimizer = torch.optim.SGD(parts, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for x, y in batches:
        optimizer.zero_grad()
        logits = forward(parts, x, rate).masked_fill(counts == 0, 0.0)
        cross_entropy(logits, y).backward()
        optimizer.step()
    return [p.detach() for p in parts]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_a_run_is_the_papers_loop(method, participation, norm):
    result, recorder, fed = run(f"{method}:rates=1/0.5/0.3", participation, norm)
    trained = iter(recorder.clients)
    sampler = Sampler(len(fed.clients), participation, 0)
    full = [p.detach().double() for p in model(norm).parameters()]
    for t in range(ROUNDS):
        sums, counts = [torch.zeros_like(p) for p in full], [torch.zeros_like(p) for p in full]
        for k in sampler.draw(t):
            rate = SHARES[k % 3]
            where = positions(rate, t if method == "fedrolex" else 0, norm)
            parts = [take(p, *index) for p, index in zip(full, where, strict=True)]
            labels = torch.bincount(fed.clients[k].y, minlength=CLASSES)
            ends = train(parts, next(trained), rate, labels)
            for total, count, end, (rows, columns) in zip(sums, counts, ends, where, strict=True):
                index = (rows,) if columns is None else (rows[:, None], columns[None, :])
                total[index] += end
                count[index] += 1
        full = [torch.where(n > 0, s / n.clamp_min(1), p) for p, s, n in zip(full, sums, counts, strict=True)]
    expected = torch.cat([p.flatten() for p in full])
    assert float((result.vector - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_full_rates_without_masks_are_fedavg(method):
    narrow = run(f"{method}:rates=1,mask_labels=false")[0]
    plain = run("fedavg", client_weighting="uniform")[0]
    assert float((narrow.vector - plain.vector).abs().max()) < 1e-14


@pytest.mark.parametrize("other", ["feddecorr", "moon:projection=0"])
def test_other_terms_of_the_loss_belong_to_the_narrow_model_in_any_order(other):
    """One pass over the batch updates the buffers: after a step, they are the momentum times the statistics of the batch."""

    def train(methods, **options):
        budget = {"precision": "fp64", "lr": LR, "engine": "inline", "local_steps": 1, "batch_size": 100}
        return unskew.run(federation(), model=model(True), method=methods, **budget, **options)

    one, two = (train(e, rounds=3) for e in (f"heterofl:rates=1/0.5+{other}", f"{other}+heterofl:rates=1/0.5"))
    assert torch.equal(one.vector, two.vector)
    inputs = [model(True)[0].double()(client.x.double()).detach() for client in federation().clients]
    mean = 0.1 * torch.stack([a.mean((0, 2, 3)) for a in inputs]).mean(0)
    found = train(f"heterofl:rates=1+{other}", rounds=1).model[1].running_mean
    assert float((found - mean).abs().max()) < 1e-12


def test_a_client_exchanges_its_part_and_its_rate():
    result = run("heterofl:rates=0.5", precision="fp32")[0]
    channels, hidden = math.ceil(CHANNELS / 2), math.ceil(HIDDEN / 2)
    size = 10 * channels + (channels * 4 + 1) * hidden + (hidden + 1) * CLASSES
    assert result.summary["bytes_up"] == ROUNDS * 6 * 4 * size
    assert result.summary["bytes_down"] == ROUNDS * 6 * 4 * (size + 1)


def test_fedrolex_trains_every_entry_in_as_many_rounds_as_units():
    start = torch.cat([p.detach().flatten() for p in model().parameters()]).double()
    stays = run("heterofl:rates=0.3", weight_decay=0.0)[0].vector == start
    rolls = run("fedrolex:rates=0.3", weight_decay=0.0, rounds=HIDDEN)[0].vector == start
    assert stays.double().mean() > 0.5
    # The kernel's weights and the biases, all of which some round trained; entries between two units that no round has
    # together keep their values.
    units = torch.cat([torch.arange(CHANNELS * 10), CHANNELS * 10 + HIDDEN * CHANNELS * 4 + torch.arange(HIDDEN)])
    assert not rolls[units].all()
    assert rolls.double().mean() < stays.double().mean()


@pytest.mark.parametrize("rates", ["0", "1.5", "half", "1/", "nan", ""])
def test_wrong_rates_name_the_syntax(rates):
    with pytest.raises(ConfigError, match="separated by slashes"):
        unskew.method("heterofl", rates=rates)


@pytest.mark.parametrize(
    ("layer", "rates", "message"),
    [(nn.GroupNorm(2, 4), "1/0.5", r"1 is a GroupNorm"), (nn.BatchNorm2d(4), "0.5", "has no rate 1")],
)
def test_models_that_cannot_be_narrowed_are_rejected(layer, rates, message):
    narrowed = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(16, CLASSES))
    with pytest.raises(ConfigError, match=message):
        unskew.run(federation(), rounds=1, method=f"fedrolex:rates={rates}", model=narrowed)


class Wired(nn.Module):
    """Two hidden layers and a head, connected in another way than one after the other."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b, self.h = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        a = torch.relu(self.a(x))
        match self.kind:
            case "parallel":
                return self.h(a + torch.relu(self.b(x)))
            case "skip":
                return self.h(a + self.b(a))
            case "twice":
                return self.h(self.a(self.b(a)))
            case "mixed":
                return self.h(self.b(a.softmax(1)))
            case "another order":
                return self.h(self.b(a.flip(1)))
        return self.h(self.b(a)) + self.b(a)[:, :CLASSES]


@pytest.mark.parametrize("method", ["heterofl:rates=1/0.5", "fedrolex:rates=1/0.5"])
@pytest.mark.parametrize("kind", ["parallel", "skip", "twice", "mixed", "another order", "after the head"])
def test_models_whose_layers_do_not_follow_each_other_are_rejected(kind, method):
    with pytest.raises(ConfigError, match=r"need layers that follow each other, but .* unit by unit"):
        unskew.run(federation(), rounds=1, method=method, model=Wired(kind))


def test_layers_between_others_may_change_values_in_place_or_units_one_by_one():
    narrowed = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES),
    )  # fmt: skip
    assert unskew.run(federation(), rounds=1, method="heterofl:rates=1/0.5", model=narrowed).vector.isfinite().all()


@pytest.mark.parametrize("other", ["scaffold", "ditto", "fedlc", "fedals"])
def test_rules_that_need_the_full_model_are_rejected(other):
    with pytest.raises(MethodConflictError):
        unskew.method(f"heterofl+{other}")
