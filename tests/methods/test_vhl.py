"""VHL: the virtual set, its cost, and the loss against NumPy."""

import dataclasses

import numpy as np
import pytest
import torch
from support.federations import SmallBatchNorm, blobs
from support.protocol import context, holdings, prepared
from support.running import Stop, StopAfter, assert_same_run
from support.slow import slow_but
from support.tolerance import FEW, MAGNIFIED, TRAINING, assert_close, near
from torch import nn

import unskew
from unskew.engines.batches import InputNormalizer
from unskew.generators.virtual.gaussian import gaussian_clusters
from unskew.generators.virtual.style import modulated_conv, style_images
from unskew.methods.vhl import VHL, alignment_loss
from unskew.models.execution import Batch
from unskew.protocol.rules import ClientRule
from unskew.tasks.classification import Classification

SIZES = [12, 23, 17]


def train(method, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "precision": "fp64", "engine": "inline", **options}
    return unskew.run(blobs(SIZES), model=SmallBatchNorm(dropout=0.0), method=method, **given)


def images(dtype=np.uint8, shape=(6, 6, 3), clients=3, classes=3):
    draws = np.random.default_rng(0)
    x, y = draws.integers(0, 256, (8, *shape)).astype(dtype), np.arange(8) % classes
    return unskew.Federation.from_arrays([(x, y)] * clients, test=(x, y), classes=classes, holdout=0.0)


def contrast(z, y, virtual, labels, temperature):
    """The alignment, anchor by anchor."""
    terms = []
    for anchor, label in zip(z, y, strict=True):
        if not (labels == label).any():
            continue
        cosines = [anchor @ w / np.linalg.norm(anchor) / np.linalg.norm(w) / temperature for w in virtual]
        total = np.sum(np.exp(cosines))
        terms.append(np.mean([np.log(total) - c for c, k in zip(cosines, labels, strict=True) if k == label]))
    return np.mean(terms) if terms else 0.0


def cross_entropy(logits, y):
    return -np.mean([row[k] - np.log(np.exp(row).sum()) for row, k in zip(logits, y, strict=True)])


def test_the_alignment_equals_the_formula_and_skips_anchors_without_a_positive():
    draws = np.random.default_rng(0)
    z, virtual = draws.normal(size=(7, 4)), draws.normal(size=(9, 4))
    y, labels = np.array([0, 1, 2, 3, 0, 1, 2]), np.array([0, 1, 2] * 3)
    found = alignment_loss(*(torch.tensor(t) for t in (z, y, virtual, labels)), 0.2)
    assert float(found) == near(contrast(z, y, virtual, labels, 0.2))
    nothing = alignment_loss(torch.tensor(z), torch.full((7,), 5), torch.tensor(virtual), torch.tensor(labels), 0.2)
    assert float(nothing) == 0.0


@pytest.mark.parametrize(("step", "aligned"), [(0, True), (5, True), (6, False)])
def test_the_loss_equals_numpy(step, aligned):
    """Two epochs of three steps with alignment; then it ends."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3))
    spec = unskew.ModelSpec(net, (2, 6, 6), 3, dtype=torch.float64)
    rule = VHL(per_class=4, lam=0.7, virtual=0.3, align_epochs=2, virtual_batch=5, temperature=0.5)
    ready = prepared(rule, blobs(SIZES))
    fed, common = ready.federation, ready.common["vhl"]
    ctx = context(
        spec,
        model=lambda u, x, track=True: spec.forward(u, spec.flatten_buffers(), x),
        task=Classification(),
        key=torch.tensor(11),
        epoch_steps=torch.tensor(3.0),
        common=common,
        client_info=rule.client_info(holdings(fed, 1)),
    )
    carry = rule.begin(ctx)
    batch = Batch(fed.clients[1].x[:6].double(), fed.clients[1].y[:6], torch.tensor(0), torch.tensor(step))

    def loss_fn(v, batch):
        return ctx.task.loss(ctx.model(v, batch.x, batch.track).logits, batch.y)

    found = rule.loss(loss_fn, ctx, carry)(spec.flatten(), batch)

    w1, b1, w2, b2 = (p.numpy() for p in spec.parameters(spec.flatten()).values())
    at = (int(carry["start"]) + 5 * step + np.arange(5)) % 12
    x, virtual = batch.x.numpy().reshape(6, -1), common["x"].double().numpy()[at].reshape(5, -1)
    y, labels = batch.y.numpy(), at % 3
    h, h_virtual = np.tanh(x @ w1.T + b1), np.tanh(virtual @ w1.T + b1)
    expected = cross_entropy(h @ w2.T + b2, y) + 0.3 * cross_entropy(h_virtual @ w2.T + b2, labels)
    expected += 0.7 * contrast(h, y, h_virtual, labels, 0.5) * aligned
    assert float(found) == near(expected, TRAINING)


@pytest.mark.parametrize("same", ["vhl:lam=0,virtual=0", "vhl:align_epochs=0,virtual=0"])
def test_reductions_to_fedavg(same):
    assert torch.equal(train(same).vector, train("fedavg").vector)


def test_alignment_acts_in_the_first_epochs_only():
    def vector(epochs, local):
        return train(f"vhl:virtual=0,align_epochs={epochs}", local_epochs=local, rounds=1).vector

    assert torch.equal(vector(1, 1), vector(5, 1))
    assert torch.equal(vector(2, 2), vector(5, 2))
    assert not torch.equal(vector(1, 2), vector(2, 2))


class EpochSteps(ClientRule):
    name, summary, paper = "epochsteps", "for tests", "none"
    seen = ()

    def end(self, ctx, carry, v):
        ctx.upload["steps"] = ctx.epoch_steps

    def server_init(self, v, federation_info):
        return {"sum": torch.zeros((), dtype=v.dtype)}

    def server_update(self, state, updates):
        type(self).seen += (float(updates.aggregate.upload[self.name]["steps"]),)
        return state


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
def test_clients_know_the_length_of_an_epoch(engine):
    EpochSteps.seen = ()
    train(EpochSteps(), engine=engine, rounds=1, local_epochs=3)
    assert EpochSteps.seen == (2 + 3 + 3,)  # 12, 23 and 17 samples in batches of 8


def test_features_come_nearer_to_the_virtual_ones_of_their_class():
    """On test samples: the cosine with virtual features of the same class, less that with the others."""
    fed = blobs([60, 60], skew=False)
    common = prepared(VHL(), fed).common["vhl"]

    def margin(method):
        torch.manual_seed(0)
        options = {"model": "mlp", "model_options": {"hidden": [32]}, "rounds": 8, "local_epochs": 5, "lr": 0.1}
        result = unskew.run(fed, method=method, precision="fp64", engine="inline", **options)
        spec = unskew.ModelSpec(result.model, (2, 6, 6), 3, dtype=torch.float64)
        z, virtual = (
            nn.functional.normalize(spec.forward(spec.flatten(), spec.flatten_buffers(), x.double()).features, dim=1)
            for x in (fed.test[0], common["x"])
        )
        cosines, same = z @ virtual.T, fed.test[1][:, None] == common["y"][None]
        return float(cosines[same].mean() - cosines[~same].mean())

    assert abs(margin("fedavg")) < 0.01
    assert margin("vhl:virtual=0,temperature=0.5") > 0.05
    assert margin("vhl:temperature=0.5") > margin("vhl:lam=0") + 0.05


def test_the_virtual_pass_leaves_statistics_alone():
    options = {"rounds": 1, "local_epochs": None, "local_steps": 1}
    for engine in ("inline", "vectorized"):
        plain, virtual = (train(m, engine=engine, **options).model.norm for m in ("fedavg", "vhl"))
        assert_close(virtual.running_mean, plain.running_mean, TRAINING)
        assert_close(virtual.running_var, plain.running_var, TRAINING)


@pytest.mark.parametrize(
    ("fed", "cost"),
    [
        (images(), 30 * (6 * 6 * 3 + 1)),  # pixels, one byte a label
        (images(np.float32), 30 * (6 * 6 * 3 * 4 + 1)),
        (images(np.uint8, (6, 6), classes=300), 3000 * (6 * 6 + 2)),  # 300 classes do not fit into a byte
        (images(np.float32, (5,)), 30 * (5 * 4 + 1)),
    ],
    ids=["pixels", "floats", "many classes", "table"],
)
def test_the_virtual_set_is_paid_for_once(fed, cost):
    options = {"model": "logistic", "rounds": 3, "local_steps": 1, "engine": "inline"}
    plain, virtual = (unskew.run(fed, method=m, **options).history for m in ("fedavg", "vhl:per_class=10"))
    for before, after in zip(plain, virtual, strict=True):
        assert after["bytes_down"] == before["bytes_down"] + 3 * cost
        assert after["bytes_up"] == before["bytes_up"]


SHAPES = [(source, shape) for source in ("gaussian", "style") for shape in ((1, 28, 28), (3, 32, 32), (2, 5, 9))]


@pytest.mark.parametrize(("source", "shape"), slow_but([SHAPES[1], SHAPES[-1]], SHAPES))
def test_each_class_is_a_cluster(source, shape):
    key, y = torch.tensor(5), torch.arange(200) % 10
    make = gaussian_clusters if source == "gaussian" else style_images
    x = make(key, y, shape)
    assert x.shape == (200, *shape)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(shape[0]), rtol=0, atol=1e-3)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(shape[0]), rtol=0, atol=1e-3)
    flat = x.flatten(1)
    centers = torch.stack([flat[:100][y[:100] == k].mean(0) for k in range(10)])
    nearest = torch.cdist(flat[100:], centers).argmin(1)
    assert (nearest == y[100:]).float().mean() > 0.9
    assert not torch.equal(x[0], x[10]), "samples of a class differ"
    assert torch.equal(make(key, y, shape), x)
    assert not torch.equal(make(torch.tensor(6), y, shape), x)


def test_a_modulated_convolution_is_one_kernel_per_sample():
    draws = torch.Generator().manual_seed(0)
    x, style, kernel = (torch.randn(s, generator=draws) for s in ((3, 4, 5, 5), (3, 4), (6, 4, 3, 3)))
    found = modulated_conv(x, style, kernel)
    for k in range(3):
        own = kernel * style[k][None, :, None, None]
        own = own / own.square().sum((1, 2, 3), keepdim=True).sqrt()
        assert_close(found[k], torch.conv2d(x[k : k + 1], own, padding=1)[0], FEW)


@pytest.mark.parametrize("source", ["gaussian", "style"])
def test_clients_see_the_virtual_set_as_they_see_their_data(source):
    """Pixels, normalized by the engine's own normalizer, are standardized but for rounding and the ends of the range."""
    rule, fed = VHL(source=source), images()
    sent, own = prepared(rule, fed).common["vhl"], rule.client_info(holdings(fed, 0))
    assert sent["x"].dtype == torch.uint8
    theirs = InputNormalizer(fed.normalization, fed.shape, torch.float64, torch.device("cpu"))(sent["x"])
    assert_close(sent["x"].double() * own["factor"] + own["offset"], theirs, MAGNIFIED)
    assert abs(float(theirs.mean())) < 0.05
    assert float(theirs.std()) == pytest.approx(1, abs=0.15)
    raw = dataclasses.replace(images(), normalization=None)
    unscaled, own = prepared(rule, raw).common["vhl"], rule.client_info(holdings(raw, 0))
    assert float((unscaled["x"] * own["factor"] + own["offset"]).mean()) == pytest.approx(127.5, abs=5)


def test_the_seed_decides_the_virtual_set():
    sets = [prepared(VHL(), images(), seed).common["vhl"]["x"] for seed in (0, 0, 1)]
    assert torch.equal(sets[0], sets[1])
    assert not torch.equal(sets[0], sets[2])


def test_a_resumed_run_equals_one_without_interruption(tmp_path):
    given = {
        "method": "vhl+scaffold",
        "model": "mlp",
        "rounds": 4,
        "lr": 0.05,
        "engine": "inline",
        "participation": 0.7,
    }
    fed = blobs(SIZES)
    unskew.run(fed, out=tmp_path / "straight", **given)
    with pytest.raises(Stop):
        unskew.run(fed, out=tmp_path / "stopped", callbacks=[StopAfter(2)], checkpoint_every=1, **given)
    unskew.resume(tmp_path / "stopped", federation=fed)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_vhl_rejects_unsupported_inputs():
    table = images(np.float32, (5,))
    with pytest.raises(unskew.UnskewError, match="style generates images, but the inputs have shape"):
        unskew.run(table, method="vhl:source=style", model="logistic", rounds=1)
    tokens = images(np.int64, (5,))
    with pytest.raises(unskew.UnskewError, match="tokens are discrete"):
        unskew.run(tokens, method="vhl", model="logistic", rounds=1)
    with pytest.raises(unskew.UnskewError, match="vhl appears twice"):
        unskew.method("vhl+vhl:lam=2")
