"""Heterogeneity at a model against closed forms on least squares, Lemma 1's identities, and the command."""

import json
import math
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from support.federations import SmallBatchNorm, blobs
from support.quadratic import HalfSquares, problem
from support.running import TINY, call
from support.slow import slow_but
from support.tolerance import near, tolerance
from torch import nn

import unskew
from unskew.data.federation import ArrayClients, Federation
from unskew.diagnosis.synthetic import POOL, validate_images
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.measurements import fedssyn_bounds
from unskew.measurements.gradient_dissimilarity import Gradients
from unskew.measurements.gradient_probe import GradientProbe, largest_eigenvalues
from unskew.measurements.heterogeneity import MeasurementScope, measure
from unskew.measurements.label_skew import label_skew_metrics
from unskew.measurements.update_cosines import UpdateCosines
from unskew.models.spec import ModelSpec
from unskew.tasks.registry import TASKS

SIZES = (3, 7, 5, 4)
ALL = MeasurementScope(
    clients=None, samples=None, shares=(0.0, 0.3, 0.5, 1.0), iterations=500, tolerance=1e-12, tau=4, batch=2
)


def quadratics(A, b):
    x, y = torch.tensor(np.concatenate(A)), torch.tensor(np.concatenate(b))
    offsets = np.concatenate([[0], np.cumsum([len(a) for a in A])])
    fed = Federation(ArrayClients(x, y, offsets, offsets[1:]), test=(x, y), classes=1)
    spec = ModelSpec(nn.Linear(x.shape[1], 1, bias=False), (x.shape[1],), 1, dtype=torch.float64)
    return fed, spec


def oracle(A, b, v):
    """Gradients, noise and Hessians of ``mean_j 1/2 (a_j v - b_j)^2``, in NumPy."""
    each = [a * (a @ v - y)[:, None] for a, y in zip(A, b, strict=True)]
    g = np.stack([e.mean(0) for e in each])
    noise = np.array([np.square(e - e.mean(0)).sum(1).mean() for e in each])
    return g, noise, [a.T @ a / len(a) for a in A]


def top(H):
    return np.abs(np.linalg.eigvalsh(H)).max()


@pytest.mark.parametrize("shared", slow_but([False], [True, False]))
def test_all_quantities_of_least_squares_are_the_closed_forms(shared):
    A, b = problem(SIZES)
    made_A, made_b = problem((6, 6, 6, 6), seed=9)
    if shared:
        made_A, made_b = made_A[:1] * 4, made_b[:1] * 4
    fed, spec = quadratics(A, b)
    v = np.array([0.3, -1.0, 2.0])
    pairs = [(torch.tensor(a), torch.tensor(y)) for a, y in zip(made_A, made_b, strict=True)]
    probe = GradientProbe(spec, HalfSquares(), fed, torch.tensor(v), spec.flatten_buffers())
    found = measure(probe, fed, ALL, (lambda k: pairs[0]) if shared else pairs.__getitem__)
    (g, noise, H), (gs, noise_s, Hs) = oracle(A, b, v), oracle(made_A, made_b, v)
    zeta2 = np.square(g - g.mean(0)).sum(1).mean()
    pool = noise_s.mean() + np.square(gs - gs.mean(0)).sum(1).mean()
    delta2 = np.square(g.mean(0) - gs.mean(0)).sum()
    expected = {
        "zeta2": zeta2,
        "gradient2": np.square(g.mean(0)).sum(),
        "sigma2_mean": noise.mean(),
        "sigma2_max": noise.max(),
        "sigma2_avg": noise.mean() + zeta2,
        "L_max": max(map(top, H)),
        "L_avg": top(np.mean(H, 0)),
        "delta2": delta2,
        "sigma2_synthetic": pool,
        "L_synthetic": top(np.mean(Hs, 0)),
        "epsilon": 0.1 * np.square(g.mean(0)).sum(),
    }
    assert found.metrics == pytest.approx(expected, rel=1e-6)
    for row in found.shares:
        p = row["p"]
        mixed = (1 - p) * g + p * gs
        # The noise of a mixture from its own samples, each weighted by its share.
        values = []
        for i in range(4):
            real, made = A[i] * (A[i] @ v - b[i])[:, None], made_A[i] * (made_A[i] @ v - made_b[i])[:, None]
            spread = [np.square(e - mixed[i]).sum(1).mean() for e in (real, made)]
            values.append((1 - p) * spread[0] + p * spread[1])
        assert row["zeta2"] == near(np.square(mixed - mixed.mean(0)).sum(1).mean())
        assert row["sigma2"] == near(np.mean(values))
        assert row["L"] == pytest.approx(max(top((1 - p) * h + p * s) for h, s in zip(H, Hs, strict=True)), rel=1e-6)
        assert row["zeta2_bound"] == near((1 - p) ** 2 * zeta2)
        assert row["sigma2_bound"] == near((1 - p) * noise.mean() + p * pool + p * (1 - p) * (zeta2 + delta2))
        assert row["L_bound"] == pytest.approx((1 - p) * expected["L_max"] + p * expected["L_synthetic"], rel=1e-6)
        base = fedssyn_bounds.iterations(expected["epsilon"], 4, 4, expected["L_max"], zeta2, noise.mean() / 2)
        for end in ("", "_bound"):
            steps = fedssyn_bounds.iterations(
                expected["epsilon"], 4, 4, row[f"L{end}"], row[f"zeta2{end}"], row[f"sigma2{end}"] / 2
            )
            assert row[f"rounds{end}"] == pytest.approx(steps / base, rel=1e-5)
        if shared:  # then Lemma 1's first two inequalities are equalities
            assert row["zeta2"] == near(row["zeta2_bound"])
            assert row["sigma2"] == near(row["sigma2_bound"])
            assert row["L"] <= row["L_bound"] + tolerance(size=row["L_bound"])


def test_with_strong_convexity_the_accuracy_is_one_of_the_loss():
    """By default a tenth of what bounds the distance from the minimum: ``||grad f||^2 / (2 mu)``."""
    A, b = problem(SIZES)
    fed, spec = quadratics(A, b)
    v, mu = np.array([0.3, -1.0, 2.0]), 0.2
    probe = GradientProbe(spec, HalfSquares(), fed, torch.tensor(v), spec.flatten_buffers())
    pair = fed.clients[0].x, fed.clients[0].y
    found = measure(probe, fed, replace(ALL, mu=mu, shares=(0.0, 0.5)), lambda k: pair)
    g, noise, H = oracle(A, b, v)
    epsilon = 0.1 * np.square(g.mean(0)).sum() / (2 * mu)
    assert found.metrics["epsilon"] == near(epsilon)
    zeta2 = np.square(g - g.mean(0)).sum(1).mean()
    steps = [
        fedssyn_bounds.iterations(epsilon, 4, 4, L, z, s / 2, mu)
        for L, z, s in (
            (max(map(top, H)), zeta2, noise.mean()),
            *((r["L"], r["zeta2"], r["sigma2"]) for r in found.shares),
        )
    ]
    assert [row["rounds"] for row in found.shares] == pytest.approx([s / steps[0] for s in steps[1:]], rel=1e-5)


def test_the_loss_of_a_run_is_the_one_that_is_measured(tmp_path):
    """Weights of two double every gradient; a run knows its own, and so does what it predicts numbers with."""
    fed, same = blobs([8, 6]), {"model": "logistic", "curvature": False, "synthetic_fractions": [0]}
    once, twice = (
        unskew.diagnose(fed, class_weights=weights, **same).as_json()["models"][0] for weights in (None, [2.0] * 3)
    )
    for name in ("zeta2", "gradient2", "sigma2_mean"):
        assert twice[name] == near(4 * once[name], 1e-4)
    options = {"rounds": 1, "local_steps": 1, "engine": "inline", "class_weights": "balanced"}
    unskew.run(fed, model="logistic", out=tmp_path / "run", **options)
    first = unskew.diagnose(fed, run=tmp_path / "run", curvature=False, synthetic_fractions=[0]).as_json()["models"][0]
    again = unskew.diagnose(fed, class_weights="balanced", **same).as_json()["models"][0]
    assert first["zeta2"] == near(again["zeta2"], 1e-4)
    assert first["zeta2"] != near(once["zeta2"], 1e-4)
    with pytest.raises(ConfigError, match="loss=mae requires regression"):
        unskew.diagnose(fed, loss="mae", **same)


def test_identical_clients_have_no_dissimilarity_and_identical_samples_no_noise():
    a, y = np.array([[1.0, 2.0, 3.0]] * 5), np.array([0.5] * 5)
    fed, spec = quadratics([a, a], [y, y])
    figures = measure(GradientProbe(spec, HalfSquares(), fed, torch.ones(3).double(), torch.zeros(0)), fed, ALL).metrics
    assert figures["zeta2"] == figures["sigma2_mean"] == figures["sigma2_max"] == 0
    assert figures["L_max"] == near(14)


def test_power_iteration_is_exact_on_the_eigenspace_and_never_above():
    H = torch.diag(torch.tensor([2.0, -5.0, 1.0], dtype=torch.float64))
    start = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    one, two = (largest_eigenvalues(lambda u: u @ H, start, n, 0.0) for n in (1, 400))
    assert one[1] == two[1] == 5
    assert math.sqrt(30 / 3) == pytest.approx(float(one[0]))  # ||H u|| of the first direction
    assert float(two[0]) == near(5)


def test_the_power_iteration_converges_where_eigenvalues_are_close():
    """At the tolerance of ``diagnose``, with many products allowed."""
    H = torch.diag(torch.tensor([1.0, 0.99, 0.985, 0.5, 0.1], dtype=torch.float64))
    (found,) = largest_eigenvalues(
        lambda u: u @ H, torch.ones(1, 5, dtype=torch.float64), 300, MeasurementScope().tolerance
    )
    assert 1 - 1e-4 < float(found) <= 1


def test_given_arrays_keep_their_precision():
    A, b = problem(SIZES)
    fed, _ = quadratics(A, b)
    x = np.full((2, 3), 0.1)
    kept, _ = validate_images((x, np.array([0, 0])), fed, "the set")
    assert kept.dtype == torch.float64
    assert np.array_equal(kept.numpy(), x)
    single = replace(fed, test=(fed.test[0].float(), fed.test[1]))
    assert np.array_equal(validate_images((x, np.array([0, 0])), single, "the set")[0].numpy(), x)


@pytest.mark.slow
def test_the_hessian_of_a_network_agrees_with_autograd():
    torch.manual_seed(0)
    fed = blobs([6, 9], shape=(1, 2, 2))
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    spec = ModelSpec(net, (1, 2, 2), 3, dtype=torch.float64)
    v = spec.flatten()
    probe = GradientProbe(spec, TASKS["classification"], fed, v, spec.flatten_buffers())
    found = measure(probe, fed, ALL).metrics
    x, y = fed.clients[0].x.double(), fed.clients[0].y

    def loss(v, x, y):
        return nn.functional.cross_entropy(spec.forward(v, spec.flatten_buffers(), x).logits, y)

    H = [torch.autograd.functional.hessian(lambda v, c=c: loss(v, c.x.double(), c.y), v).numpy() for c in fed.clients]
    assert found["L_max"] == pytest.approx(max(map(top, H)), rel=1e-4)
    assert found["L_avg"] == pytest.approx(top(np.mean(H, 0)), rel=1e-4)
    single = torch.stack([torch.func.grad(loss)(v, x[i : i + 1], y[i : i + 1]) for i in range(len(y))])
    scatter = (single - single.mean(0)).square().sum(1).mean()
    assert (
        measure(probe, fed, MeasurementScope(clients=None, curvature=False)).metrics["sigma2_max"]
        >= float(scatter) - tolerance()
    )
    torch.testing.assert_close(probe.moments(x, y).mean, single.mean(0))
    assert probe.moments(x, y).variance == near(float(scatter))


def test_the_gradient_of_texts_is_that_of_their_tokens():
    draws = np.random.default_rng(0)
    x, y = draws.integers(0, 20, (9, 6)), draws.integers(0, 20, (9, 6))
    for row, length in enumerate(draws.choice([1, 3, 6], 9)):
        y[row, length:] = -1
    fed = unskew.Federation.from_arrays([(x, y)] * 2, test=(x, y), task="language", classes=20, holdout=0)
    net = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 20))
    spec = unskew.diagnose(fed, model=net, head="1", precision="fp64", curvature=False).setting.spec
    v = spec.flatten()
    probe = GradientProbe(spec, fed.objective, fed, v, spec.flatten_buffers())
    client = fed.clients[0]

    def loss(v, x, y):
        return fed.objective.loss(spec.forward(v, spec.flatten_buffers(), x).logits, y)

    moments = probe.moments(client.x, client.y)
    whole = torch.func.grad(loss)(v, client.x, client.y)
    torch.testing.assert_close(moments.mean, whole)
    tokens = (client.y >= 0).sum(1).double()
    single = torch.stack([torch.func.grad(loss)(v, client.x[i : i + 1], client.y[i : i + 1]) for i in range(9)])
    scatter = tokens @ (single - whole).square().sum(1) / tokens.sum()
    assert moments.variance == near(float(scatter))


def test_corollary_one_in_numbers():
    drift = 5 * math.sqrt(2.0) + math.sqrt(5 * 3.0)
    assert fedssyn_bounds.iterations(0.1, 10, 5, 7, 2.0, 3.0) == pytest.approx(
        7 * 3 / (10 * 0.1**2) + 7 * drift / 0.1**1.5 + 7 * 5 / 0.1
    )
    assert fedssyn_bounds.iterations(0.1, 10, 5, 7, 2.0, 3.0, mu=0.5) == pytest.approx(
        3 / (0.5 * 10 * 0.1) + math.sqrt(7) * drift / (0.5 * math.sqrt(0.1)) + 7 * 5 / 0.5 * math.log(10)
    )
    assert fedssyn_bounds.iterations(1e-300, 10, 5, 2.0, 0.4, 6.0) == math.inf


def test_label_skew_equals_values_by_hand():
    x = np.zeros((4, 3), "float32")
    fed = Federation.from_arrays(
        [(x, [0, 0, 0, 0]), (x, [1, 1, 1, 1]), (x[:2], [0, 1])], test=(x, [0, 1, 0, 1]), holdout=0.0
    )
    found = label_skew_metrics(fed, [0, 1, 2])
    assert found["label_distance_max"] == pytest.approx(0.5)
    assert found["label_distance_mean"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert found["label_entropy_gap"] == pytest.approx(2 * math.log(2) / 3)
    assert found["effective_clients"] == pytest.approx(100 / 36)
    assert found["effective_classes"] == pytest.approx((1 + 1 + 2) / 3)


def test_a_run_is_looked_at_from_its_first_model_to_its_last(tmp_path):
    fed, folder = blobs([9, 12, 7]), tmp_path / "run"
    torch.manual_seed(0)
    model = SmallBatchNorm()
    options = {"rounds": 4, "checkpoint_every": 2, "local_steps": 2, "lr": 0.05, "engine": "inline"}
    result = unskew.run(fed, model=model, out=folder, **options)
    with pytest.raises(ConfigError, match="Remove this option"):
        unskew.diagnose(fed, run=folder, model="cnn")
    report = unskew.diagnose(fed, run=folder, model=model, curvature=False, synthetic_fractions=[0.0, 1.0])
    assert [p.model_label for p in report.measurements] == [
        "initial model",
        "after round 2",
        "after round 4",
        "final model",
    ]
    assert report.measurements[2].metrics == report.measurements[3].metrics
    assert report.measurements[1].metrics != report.measurements[2].metrics
    assert report.details["tau"] == 2
    # The final model's gradients are those of the module that the run returns.
    module, grads = result.model.eval(), []
    for client in fed.clients:
        module.zero_grad()
        nn.functional.cross_entropy(module(client.x), client.y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    g = torch.stack(grads)
    assert report.measurements[3].metrics["zeta2"] == pytest.approx(
        float((g - g.mean(0)).square().sum(1).mean()), rel=1e-4
    )
    (one,) = unskew.diagnose(fed, run=folder / "checkpoints" / "0000002", model=model, curvature=False).measurements
    assert one.metrics["zeta2"] == report.measurements[1].metrics["zeta2"]


def test_a_run_can_measure_its_gradients_round_by_round(tmp_path):
    fed, folder = blobs([9, 12, 7]), tmp_path / "run"
    options = {"rounds": 3, "local_steps": 2, "lr": 0.05, "engine": "inline", "checkpoint_every": 1}
    result = unskew.run(fed, model="logistic", out=folder, diagnose="gradients", **options)
    report = unskew.diagnose(fed, run=folder, curvature=False)
    for row, place in ((result.history[1], report.measurements[1]), (result.history[2], report.measurements[2])):
        for name, key in (("zeta2", "zeta2"), ("norm2", "gradient2"), ("sigma2_mean", "sigma2_mean")):
            assert row[f"gradients/{name}"] == pytest.approx(place.metrics[key], rel=1e-6)
    assert result.summary["gradients/sigma2_max"] == result.history[-1]["gradients/sigma2_max"]
    plain = unskew.run(fed, model="logistic", **options)
    assert torch.equal(plain.vector, result.vector)  # it only looks


def server_with(v, b=None, spec=None):
    """The parts of a server that diagnostics read."""
    return SimpleNamespace(
        setup=SimpleNamespace(spec=spec, seed=0), state=SimpleNamespace(v=v, b=b), observed={"measured": {}},
        aggregator=SimpleNamespace(watch=lambda watcher: None), broadcaster=SimpleNamespace(request_models=lambda: None),
    )  # fmt: skip


def test_real_and_added_data_are_told_apart_along_a_run():
    """Least squares: the real part's zeta^2 and sigma^2, and delta^2, are those of NumPy at the server's model."""
    A, b = problem(SIZES)
    made_A, made_b = problem((2, 1, 3, 2), seed=9)
    mixed = [np.concatenate(pair) for pair in zip(A, made_A, strict=True)]
    (original, spec), (fed, _) = (
        quadratics(A, b),
        quadratics(mixed, [np.concatenate(pair) for pair in zip(b, made_b, strict=True)]),
    )
    v = np.linspace(-1.0, 1.0, spec.size)
    server = server_with(torch.tensor(v), spec.flatten_buffers(), spec)
    fed, original = (replace(one, trained_for=HalfSquares()) for one in (fed, original))
    found = Gradients(server, fed, original).metrics()
    g, noise, _ = oracle(A, b, v)
    assert found["gradients/zeta2_real"] == pytest.approx(np.square(g - g.mean(0)).sum(1).mean())
    assert found["gradients/sigma2_real"] == pytest.approx(noise.mean())
    apart = g.mean(0) - oracle(made_A, made_b, v)[0].mean(0)
    assert found["gradients/delta2"] == pytest.approx(apart @ apart)
    assert "gradients/delta2" not in Gradients(server, fed, fed).metrics()


def test_given_synthetic_data_are_checked_and_used():
    fed = blobs([9, 12, 7])
    x, y = np.zeros((5, 2, 6, 6), "float32"), np.array([0, 1, 2, 0, 1])
    options = {"model": SmallBatchNorm(), "curvature": False, "synthetic_fractions": [0.5]}
    one = unskew.diagnose(fed, synthetic=(x, y), **options)
    per_client = unskew.diagnose(fed, synthetic=[(x, y)] * 3, **options)
    as_federation = unskew.diagnose(
        fed, synthetic=Federation.from_arrays([(x, y)] * 3, test=(x, y), classes=3, holdout=0.0), **options
    )
    row = one.measurements[0].shares[0]
    assert row["zeta2"] == pytest.approx(row["zeta2_bound"], rel=1e-5)
    for other in (per_client, as_federation):
        for name, value in other.measurements[0].shares[0].items():
            assert value == (None if row[name] is None else pytest.approx(row[name], rel=1e-5)), name
    for wrong, words in [
        ([(x, y)] * 2, "2 synthetic sets for 3"),
        ((x[:, :, :3], y), "shape"),
        ((x, y + 1), "contain 3"),
        (((x * 255).astype("uint8"), y), "type"),
        (((x, y),) * 3 + ("no",), "4 synthetic sets"),
    ]:
        with pytest.raises(DataError, match=words):
            unskew.diagnose(fed, synthetic=wrong, **options)


def write_images(path, x, y):
    """A parquet file as the hub has them."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    def png(image):
        out = io.BytesIO()
        Image.fromarray(image).save(out, "png")
        return {"bytes": out.getvalue(), "path": "image.png"}

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": [png(one) for one in x], "label": y}), path)


@pytest.mark.slow
def test_kept_images_are_used(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fed = unskew.load_federation("digits", partition="iid", clients=3)
    x, y = fed.clients[0].x[:9, 0].numpy(), fed.clients[0].y[:9].numpy()
    write_images(tmp_path / "run" / "synthetic" / "data" / "train-0.parquet", x, y)
    options = {"model": "logistic", "curvature": False, "synthetic_fractions": [0.5]}
    given = unskew.diagnose(fed, synthetic=(x, y), **options).measurements[0]
    for place in ("run", "run/synthetic", "run/synthetic/data/train-0.parquet"):
        found = unskew.diagnose(fed, synthetic=place, **options)
        assert found.measurements[0].metrics["delta2"] == pytest.approx(given.metrics["delta2"], rel=1e-5)
        assert found.details["synthetic"].startswith("9 of the 9 images")
    unskew.run(fed, model="logistic", rounds=1, local_steps=1, out="own", engine="inline")
    assert unskew.diagnose(fed, run="own", curvature=False).details["synthetic"] == POOL
    (tmp_path / "run" / "synthetic").rename(tmp_path / "own" / "synthetic")
    assert unskew.diagnose(fed, run="own", curvature=False).details["synthetic"].startswith("9 of the 9 images")
    (tmp_path / "own" / "synthetic").rename(tmp_path / "run" / "synthetic")
    few = unskew.diagnose(fed, synthetic="run", samples=4, **options)
    assert few.details["synthetic"].startswith("4 of the 9 images")
    shown = call(capsys, "diagnose", "--clients", "3", "--model", "logistic", "--synthetic", "run", "--json").json()
    assert shown["synthetic"].startswith("9 of the 9 images")
    outcome = call(capsys, "diagnose", "--model", "logistic", "--synthetic", "nowhere")
    assert outcome.code == 2
    assert "no synthetic images" in outcome.err
    with pytest.raises(DataError, match="shape"):
        unskew.diagnose(blobs([5], classes=10), synthetic="run", model="logistic", curvature=False)


@pytest.mark.parametrize(("hidden", "threads"), [(4, 1), (4096, 2)])
def test_small_models_are_measured_with_one_thread(monkeypatch, hidden, threads):
    """Threads of a small model wait for each other, which takes most of the time if other programs use the cores."""
    used = []
    monkeypatch.setattr("unskew.diagnosis.diagnose.num_cores", lambda: 4)
    monkeypatch.setattr(
        "unskew.diagnosis.diagnose.measure", lambda *args: used.append(torch.get_num_threads()) or measure(*args)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        unskew.diagnose(data="digits", clients=2, model=model, samples=2, curvature=False, synthetic_fractions=[0])
        assert (used, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)


def test_many_clients_are_sampled():
    fed = unskew.load_federation("digits", partition="iid", clients=60)
    with pytest.raises(ConfigError, match="sample_clients=True is not valid"):
        unskew.diagnose(fed, model="logistic", sample_clients=True)
    report = unskew.diagnose(fed, model="logistic", sample_clients=7, samples=5, curvature=False)
    assert (report.details["clients"], report.details["clients_measured"]) == (60, 7)


def test_the_command_prints_tables_draws_and_gives_json(capsys, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    args = ("--data", "digits", "--clients", "3", "--model", "logistic", "--samples", "40")
    plain = ("--synthetic-fraction", "0,0.5", "--details", "--no-cost")
    outcome = call(capsys, "diagnose", *args, *plain, "--out", "picture.png")
    assert outcome.code == 0, outcome.err
    assert "dissimilarity" in outcome.out
    assert "× fedavg" not in outcome.out
    assert Image.open("picture.png").width > 900
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    (model,) = (found := call(capsys, "diagnose", *args, "--json").json())["models"]
    assert [row["p"] for row in model["shares"]] == [0, 0.1, 0.25, 0.5, 0.75, 1]
    assert found["synthetic"] == POOL
    assert 0 < model["L_avg"] <= model["L_max"]
    rounds = [row["rounds"] for row in model["shares"]]
    assert rounds[0] == 1
    assert rounds == sorted(rounds, reverse=True)
    call(capsys, "run", *TINY, "--rounds", "2", "--out", "run")
    assert call(capsys, "diagnose", "--config", "run/config.yaml", "--no-curvature", "--json").code == 0
    models = json.loads(call(capsys, "diagnose", "run", "--no-curvature", "--json").out)["models"]
    assert [m["model"] for m in models] == ["initial model", "after round 2", "final model"]
    assert models[0]["L_max"] is None


def test_the_terminal_begins_with_the_skew_and_ends_with_the_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "clients": 5,
        "partition": "classes:2",
        "model": "logistic",
        "rounds": 20,
        "local_steps": 10,
        "engine": "inline",
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(values))
    args = ("--samples", "20", "--no-curvature", "--rounds", "15")
    outcome = call(capsys, "diagnose", "my.yaml", *args)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.strip().splitlines()
    assert "largest shifts" in outcome.out[: outcome.out.index("Strong label skew: ")]
    assert "Labels and sizes" not in outcome.out
    first = re.search(r"1\. (\S+), about \d+ s \([\d.]+ × fedavg\)", outcome.out)
    assert first is not None
    assert lines[-1].startswith(f"unskew compare fedavg {first[1]}")
    assert lines[-1].endswith(" --rounds 15 my.yaml")
    # The command runs what was diagnosed.
    compared = call(
        capsys, *lines[-1].split()[1:3], *shlex.split(lines[-1])[-3:], "--seeds", "1", "--no-references", "--json"
    )
    assert compared.code == 0, compared.err


@pytest.mark.parametrize(
    ("partition", "kind"), [("iid", "Weak or no label skew"), ("dirichlet:1", "Moderate"), ("classes:1", "Strong")]
)
def test_summary_names_the_strength_of_the_skew(partition, kind):
    fed = unskew.load_federation("digits", partition=partition, clients=10)
    report = unskew.diagnose(fed, model="logistic", samples=20, curvature=False)
    excess = report.labels["label_distance_mean"] - report.labels["label_distance_chance"]
    assert report.summary().startswith(kind)
    assert (excess >= 0.15, excess >= 0.4) == (not kind.startswith("Weak"), kind == "Strong")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "neither a run folder"),
        (["--synthetic-fraction", "0,x"], "must be a list of fractions"),
        (["--synthetic-fraction", "2"], "between 0 and 1"),
        (["--epsilon", "0"], "above 0"),
        (["--epsilon", "inf"], "and finite"),
        (["--mu", "1", "--no-curvature"], "Measure curvature"),
        (["--model", "resnet"], "no model"),
        (["--no-curvature", "--out", "x.xyz"], "known suffix"),
    ],
)
def test_diagnose_rejects_invalid_arguments(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    outcome = call(
        capsys,
        "diagnose",
        "--samples",
        "5",
        "--clients",
        "2",
        *([] if "--model" in args else ["--model", "logistic"]),
        *args,
    )
    assert outcome.code == 2
    assert words in outcome.err.replace("\n", " ")


def test_a_run_on_arrays_needs_them_again(tmp_path):
    unskew.run(blobs([5, 6]), model="logistic", rounds=1, local_steps=1, out=tmp_path / "run", engine="inline")
    with pytest.raises(CheckpointError, match="given in Python"):
        unskew.diagnose(run=tmp_path / "run")


def vectors(*deltas, weights=None):
    """Updates of one round."""
    weights = weights or [1.0] * len(deltas)
    pairs = zip(deltas, weights, strict=True)
    return [SimpleNamespace(delta=torch.tensor(delta), weight=weight) for delta, weight in pairs]


def update_cosines():
    return UpdateCosines(server_with(torch.zeros(2)))


def test_updates_are_measured_by_their_angles_to_their_mean_and_to_the_mean_before():
    diagnosis = update_cosines()
    diagnosis.updates += vectors([3.0, 0.0], [0.0, 4.0], [0.0, 0.0], weights=[2.0, 1.5, 0.5])  # mean (6, 6) / 4
    metrics = diagnosis.metrics()
    assert metrics["updates/cosine"] == metrics["updates/cosine_min"] == near(0.5**0.5)
    assert math.isnan(metrics["updates/cosine_across_rounds"])
    diagnosis.begin()
    diagnosis.begin()  # a round without updates
    diagnosis.updates += vectors([0.0, 5.0], [0.0, -4.0])  # mean (0, 1/2)
    metrics = diagnosis.metrics()
    assert metrics == {
        "updates/cosine": near(0.0, size=1), "updates/cosine_min": near(-1.0), "updates/cosine_max": near(1.0),
        "updates/cosine_across_rounds": near(0.5**0.5),
    }  # fmt: skip


def test_the_cosine_of_an_update_that_is_zero_is_undefined():
    diagnosis = update_cosines()
    diagnosis.updates += vectors([0.0, 0.0])
    assert all(map(math.isnan, diagnosis.metrics().values()))


UPDATES = {"model": "logistic", "local_steps": 1, "lr": 0.5, "engine": "inline", "diagnose": "updates"}


def test_the_mean_update_of_all_clients_is_the_change_of_the_global_model():
    fed = blobs([12, 20, 9])
    runs = [unskew.run(fed, rounds=n, precision="fp64", **UPDATES) for n in (1, 2, 3)]
    first, second, third = (run.vector.double().numpy() for run in runs)
    before, change = second - first, third - second
    expected = before @ change / np.linalg.norm(before) / np.linalg.norm(change)
    assert runs[-1].history[-1]["updates/cosine_across_rounds"] == near(expected, size=1)


def test_measured_updates_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path):
    fed, options = blobs([12, 20, 9]), {**UPDATES, "eval_every": 2}
    whole = unskew.run(fed, rounds=5, **options)
    unskew.run(fed, rounds=3, out=tmp_path / "run", **options)
    resumed = unskew.resume(tmp_path / "run", federation=fed, rounds=5)
    for name in ("updates/cosine", "updates/cosine_across_rounds"):
        assert resumed.history[-1][name] == whole.history[-1][name]


def test_updates_that_come_late_are_measured_in_the_round_that_uses_them():
    result = unskew.run(blobs([12, 20]), rounds=2, network={"delay": "fixed:1"}, **UPDATES)
    first, second = result.history
    assert "updates/cosine" not in first
    assert second["updates/cosine_min"] <= second["updates/cosine"] <= second["updates/cosine_max"]
