"""DENSE and FedDM against NumPy and closed forms: ensembles, generator losses, matching, perturbations, what is sent."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.federations import SmallBatchNorm, Spy, blobs
from support.protocol import an_update
from support.tolerance import TRAINING, assert_close, near, tolerance
from torch import nn

import unskew
from unskew.data.pixel_scaling import PixelScaling
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods import dense as dense_file
from unskew.methods.dense import Dense, divergence, ensemble_logits
from unskew.methods.feddm import FedDM, shortened
from unskew.models.spec import ModelSpec
from unskew.protocol.updates import Aggregate
from unskew.simulation.server_trainer import ServerTrainer

QUICK = "dense:epochs=2,g_steps=2,batch=6"
SHAPE = (2, 6, 6)


def linear_spec():
    torch.manual_seed(1)
    return ModelSpec(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), SHAPE, 3, dtype=torch.float64)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def run(method, fed=None, model=None, **options):
    torch.manual_seed(0)
    given = {"rounds": 1, "local_epochs": 2, "batch_size": 8, "lr": 0.05, "precision": "fp64", "engine": "inline"}
    return unskew.run(fed or blobs([9, 14, 7]), model=model or SmallBatchNorm(), method=method, **{**given, **options})


# ---- DENSE --------------------------------------------------------------------------------------------------------------


def test_the_ensemble_is_the_mean_of_logits():
    spec, draws = linear_spec(), torch.Generator().manual_seed(0)
    vs = [torch.randn(spec.size, generator=draws, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(5, *SHAPE, generator=draws, dtype=torch.float64)
    W = [(v[: 3 * 72].view(3, 72).numpy(), v[3 * 72 :].numpy()) for v in vs]
    expected = np.mean([x.flatten(1).numpy() @ w.T + c for w, c in W], 0)
    assert_close(ensemble_logits(spec, [(v, v[:0]) for v in vs], x).numpy(), expected)


def test_rounds_before_the_first_distillation_are_those_of_fedavg_with_a_compressed_broadcast():
    """The server keeps what the code of the broadcast loses."""
    code = "topk:share=0.2,down=true"
    given = {"rounds": 4, "eval_every": 1}
    both = run(f"{QUICK},start_round=3+{code}", **given), run(f"fedavg+{code}", **given)
    mine, theirs = ([row["loss"] for row in result.history] for result in both)
    assert mine[:3] == theirs[:3]
    assert mine[3] != theirs[3]


def test_the_generators_loss_in_closed_form():
    spec, draws = linear_spec(), torch.Generator().manual_seed(0)
    vs = [torch.randn(spec.size, generator=draws, dtype=torch.float64) for _ in range(3)]
    x, y = torch.randn(7, *SHAPE, generator=draws, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0, 0])
    E = ensemble_logits(spec, [(v, v[:0]) for v in vs[:2]], x).numpy()
    S = spec.forward(vs[2], vs[2][:0], x).logits.numpy()
    p, q = softmax(E), softmax(S)
    ce = -np.log(p[np.arange(7), y]).mean()
    apart = E.argmax(1) != S.argmax(1)
    assert 0 < apart.sum() < 7
    kl = np.where(apart, (p * np.log(p / q)).sum(1), 0).mean()
    for weight in (0.0, 0.5):
        rule = Dense(lambda_adv=weight, lambda_bn=3.0)
        loss = rule.generator_loss(spec, [(v, v[:0]) for v in vs[:2]], (vs[2], vs[2][:0]), x, y)
        assert float(loss) == near(ce - weight * kl, TRAINING)  # no BatchNorm: its term is zero


def test_the_term_of_batch_statistics_is_the_mean_over_clients():
    torch.manual_seed(0)
    spec = ModelSpec(SmallBatchNorm(dropout=0.0), SHAPE, 3, dtype=torch.float64)
    v, draws = spec.flatten(), torch.Generator().manual_seed(0)
    bs = [torch.rand(8, generator=draws, dtype=torch.float64) + 0.1 for _ in range(2)]
    x, y = torch.randn(5, *SHAPE, generator=draws, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1])
    h = spec.load(v, bs[0]).conv(x).detach().numpy()
    mean, var = h.mean((0, 2, 3)), h.var((0, 2, 3))
    names = spec.buffer_names
    distances = []
    for b in bs:
        known = {n.rpartition(".")[2]: t.numpy() for n, t in spec.buffers(b).items()}
        distances.append(np.linalg.norm(known["running_mean"] - mean) + np.linalg.norm(known["running_var"] - var))
    assert len(names) == 2
    models = [(v, b) for b in bs]

    def loss(weight):
        return float(Dense(lambda_bn=weight, lambda_adv=0.0).generator_loss(spec, models, models[0], x, y))

    assert loss(1.0) - loss(0.0) == near(np.mean(distances), TRAINING)


def test_the_student_matches_the_ensemble_at_temperature_t():
    draws = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(6, 4, generator=draws, dtype=torch.float64) for _ in range(2))
    p, q = softmax(teacher.numpy() / 3), softmax(student.numpy() / 3)
    expected = 9 * (p * np.log(p / q)).sum(1).mean()
    assert float(Dense(t=3.0).distillation(student, teacher)) == near(expected)
    assert float(divergence(teacher, teacher).abs().max()) < tolerance()


@pytest.mark.slow
def test_generation_lowers_its_loss_and_gives_images():
    spec, draws = linear_spec(), torch.Generator().manual_seed(0)
    models = [(torch.randn(spec.size, generator=draws, dtype=torch.float64), spec.flatten()[:0]) for _ in range(2)]
    key, pixels = torch.tensor(5), PixelScaling((0.5,), (0.25,))

    def made(steps):
        x = Dense(g_steps=steps, batch=8, g_lr=0.01, lambda_adv=0.0).generate(spec, models, models[0], key, pixels)
        y = (dense_file.uniform(dense_file.fold(key, 0), (8,)) * 3).long()
        return x, float(F.cross_entropy(ensemble_logits(spec, models, x), y))

    (x, before), (_, after) = made(1), made(8)
    assert after < before
    intensities = pixels.intensities(x)
    assert 0 <= float(intensities.min()) < float(intensities.max()) <= 1


def test_rounds_before_the_first_distillation_are_fedavgs():
    never, plain = run(f"{QUICK},start_round=2", rounds=2, base_run=True), run("fedavg", rounds=2)
    assert torch.equal(never.vector, plain.vector)
    last = run(f"{QUICK},start_round=2", rounds=3)
    assert not torch.allclose(last.vector, run("fedavg", rounds=3).vector)
    assert last.summary["bytes_up"] == run("fedavg", rounds=3).summary["bytes_up"]


def test_the_student_keeps_its_optimizer_and_sees_augmented_images(monkeypatch):
    """The second pass begins with the momentum that the first left; teacher and student see the same images."""
    seen, real = [], ServerTrainer.train

    def train(trainer, v, b, key, **given):
        moments = None if given["moments"] is None else [m.clone() for m in given["moments"]]
        trained = real(trainer, v, b, key, **given)
        after = None if given["moments"] is None else [m.clone() for m in given["moments"]]
        seen.append((given["x"], given["y"], moments, after))
        return trained

    monkeypatch.setattr(ServerTrainer, "train", train)
    kept = run(f"{QUICK},start_round=0")
    (x, y, none, first), (more, wanted, second, _) = seen
    assert (len(x), len(more), none) == (6, 12, [])
    assert torch.equal(first[0], second[0])
    assert bool(first[0].any())
    assert not torch.equal(more[:6], x)
    assert not torch.equal(wanted[:6], y)
    seen.clear()
    anew = run(f"{QUICK},keep_optimizer=false,augment=false")
    (x, y, none, _), (more, wanted, still, _) = seen
    assert none is still is None
    assert torch.equal(more[:6], x)
    assert torch.equal(wanted[:6], y)
    assert not torch.equal(kept.vector, anew.vector)


@pytest.mark.slow
def test_the_student_comes_nearer_to_the_ensemble_than_the_average():
    spy, fed = Spy(), blobs([20, 20, 20])
    torch.manual_seed(0)  # of the model below; else it is the draw of whatever ran before
    options = {
        "fed": fed,
        "local_epochs": 30,
        "model": nn.Sequential(nn.Flatten(), nn.Linear(72, 12), nn.ReLU(), nn.Linear(12, 3)),
    }
    average = run(spy, **options)
    student = run("dense:epochs=6,g_steps=3,batch=24,t=1,lr=0.05", **options)
    spec = ModelSpec(average.model, SHAPE, 3, dtype=torch.float64)
    x = fed.test[0].double()
    teacher = ensemble_logits(spec, [(v, v[:0]) for v, _ in spy.seen], x)
    far, near = (float(divergence(teacher, r.model(x).detach()).mean()) for r in (average, student))
    assert near < 0.8 * far


def test_dense_makes_images_only():
    x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 0, 1])
    with pytest.raises(ConfigError, match="dense generates images"):
        unskew.run(unskew.Federation.from_arrays([(x, y)], test=(x, y)), model="logistic", method="dense", rounds=1)


# ---- FedDM --------------------------------------------------------------------------------------------------------------


class Ctx:
    """What FedDM's matching reads."""

    def __init__(self, spec):
        self.spec, self.b_global = spec, spec.flatten_buffers()


def test_the_matching_loss_is_numpys():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.Tanh(), nn.Linear(4, 3))
    spec, draws = ModelSpec(net, SHAPE, 3, dtype=torch.float64), torch.Generator().manual_seed(0)
    v, rule = spec.flatten(), FedDM(images=2)
    x, y = torch.randn(6, *SHAPE, generator=draws, dtype=torch.float64), torch.tensor([0, 0, 1, 0, 1, 1])
    made = torch.randn(3, 2, *SHAPE, generator=draws, dtype=torch.float64)
    present = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)

    def both(x):
        W1, b1, W2, b2 = (p.detach().double().numpy() for p in net.parameters())
        h = np.tanh(x.flatten(1).numpy() @ W1.T + b1)
        return h, h @ W2.T + b2

    real, ours = both(x), both(made.flatten(0, 1))
    expected = 0
    for r, o in zip(real, ours, strict=True):
        for c in (0, 1):
            expected += np.square(r[y.numpy() == c].mean(0) - o[2 * c : 2 * c + 2].mean(0)).sum()
    assert float(rule.distance(Ctx(spec), v, x, y, made, present)) == near(expected, TRAINING)
    only = rule.distance(
        Ctx(spec), v, x[y == 0], y[y == 0], made, present
    )  # a class that is not in the batch counts nothing
    absent = rule.distance(Ctx(spec), v, x, y, made, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    assert float(only) == near(float(absent))


def test_perturbations_are_cut_at_the_radius():
    draws = torch.Generator().manual_seed(0)
    long = torch.randn(1000, generator=draws, dtype=torch.float64)
    assert float(torch.linalg.vector_norm(shortened(long, 5.0))) == pytest.approx(5)
    torch.testing.assert_close(shortened(long, 5.0) / 5, long / long.norm())
    assert torch.equal(shortened(long * 1e-3, 5.0), long * 1e-3)
    assert torch.equal(shortened(torch.zeros(3), 5.0), torch.zeros(3))


def test_images_are_sent_instead_of_the_model_and_only_of_classes_present():
    fed = blobs([9, 14, 7])
    result = run("feddm:images=4,server_epochs=1", fed, rounds=2)
    classes = [len(set(c.y.tolist())) for c in fed.clients]
    values = sum(b.numel() for b in SmallBatchNorm().buffers() if b.is_floating_point())
    assert result.summary["buffer_bytes_up"] == 2 * 3 * 8 * values > 0
    images = 2 * sum(4 * n * (72 * 4 + 1) for n in classes)
    assert result.summary["bytes_up"] == images + 2 * 3 * 8 * values
    size = result.summary["parameters"]
    statistics = result.summary["buffer_bytes_down"]
    assert result.summary["bytes_down"] == 2 * 3 * size * 8 + statistics


@pytest.mark.parametrize("rho", [0.05, 1.0])
def test_the_server_stays_in_the_ball(rho):
    vectors = [run(f"feddm:images=4,server_epochs=40,server_lr=0.5,rho={rho}", rounds=r).vector for r in (1, 2)]
    start = run("feddm:images=4,server_epochs=1,server_lr=1e-12").vector
    for before, after in ((start, vectors[0]), (vectors[0], vectors[1])):
        assert float((after - before).norm()) <= rho * (1 + 1e-9)
    if rho == 0.05:
        assert float((vectors[0] - start).norm()) == pytest.approx(rho)


def test_matching_lowers_the_distance_and_goes_on_in_the_next_round():
    one = run(
        "feddm:start=noise,image_lr=0.3,server_epochs=1,rho=0.1",
        rounds=2,
        local_epochs=None,
        local_steps=40,
        batch_size=20,
    )
    few = run(
        "feddm:start=noise,image_lr=0.3,server_epochs=1,rho=0.1",
        rounds=1,
        local_epochs=None,
        local_steps=2,
        batch_size=20,
    )
    assert one.history[0]["train_loss"] < 0.8 * few.history[0]["train_loss"]
    assert one.history[1]["train_loss"] < one.history[0]["train_loss"]


@pytest.mark.parametrize("start", ["real", "average", "noise"])
def test_images_begin_from_real_inputs_their_averages_or_noise(start):
    """With a step so small that nothing moves, what is uploaded is the beginning."""
    sent = []

    class Look(FedDM):
        name = "look"

        def step(self, state, updates):
            sent.extend((u.client, u.upload["look"]["x"], u.upload["look"]["y"]) for u in updates)
            return {"v": state["v"]}

    fed = blobs([9, 14, 7])
    run(Look(images=3, start=start, image_lr=1e-30), fed)
    for client, x, y in sent:
        data = fed.clients[client]
        assert sorted(set(y.tolist())) == sorted(set(data.y.tolist()))
        assert len(x) == 3 * len(set(y.tolist()))
        near = torch.cdist(x.flatten(1).float(), data.x.flatten(1)).min(1)
        if start == "real":
            assert float(near.values.max()) < 1e-3
            assert torch.equal(data.y[near.indices], y.long())
        else:
            assert float(near.values.min()) > 1e-2
        if start == "average":
            for c in set(y.tolist()):
                assert float((x[y == c].mean(0) - data.x[data.y == c].mean(0)).abs().max()) < 0.8


def test_the_server_learns_from_what_clients_send():
    """Ten images of each class at each of three clients with half the classes: the digits are told apart after one upload."""
    options = {
        "data": "digits",
        "clients": 3,
        "partition": "classes:5",
        "local_steps": 20,
        "engine": "inline",
        "rounds": 1,
    }
    result = unskew.run(
        method="feddm:image_lr=0.1,rho=100,server_lr=0.05,server_epochs=40", model="logistic", **options
    )
    assert result.summary["accuracy"] > 0.7
    alone = unskew.run(method="fedavg", model="logistic", lr=0.05, **options)
    assert result.summary["accuracy"] > alone.summary["accuracy"] + 0.1


def test_what_trains_no_model_cannot_be_combined_with_what_acts_on_it():
    for other in ("fedprox", "fedals"):
        with pytest.raises(MethodConflictError, match="do not train a model"):
            unskew.method(f"feddm+{other}")
    with pytest.raises(MethodConflictError, match="slot 'server'"):
        unskew.method("feddm+dense")
    x, y = np.zeros((4, 3), "int64"), np.array([0, 1, 0, 1])
    with pytest.raises(ConfigError, match="token ids"):
        unskew.run(
            unskew.Federation.from_arrays([(x, y)], test=(x, y)), model=nn.Linear(3, 2), method="feddm", rounds=1
        )


@pytest.mark.parametrize("name", ["dense", "feddm"])
def test_single_updates_are_refused_under_secure_aggregation(name):
    with pytest.raises(MethodConflictError, match=f"{name} reads the update of each individual client"):
        run(name, secure_aggregation="required")


def test_uploads_of_different_shapes_are_not_added_up():
    def sized(n):
        tensors = {"one": {"x": torch.ones(n)}, "two": {"x": torch.ones(2)}}
        return an_update(delta=torch.zeros(2), upload=tensors)

    total = Aggregate(frozenset({"one"}))
    total.add(sized(3))
    total.add(sized(5))
    assert set(total.upload) == {"two"}
    assert total.upload["two"]["x"].tolist() == [2, 2]
