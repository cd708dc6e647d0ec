"""Robust aggregation against closed forms, bounds under arbitrary points, and identities."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.federations import blobs
from support.slow import slow_but

import unskew
from unskew.errors import MethodConflictError, UnskewError
from unskew.methods.robust import estimators
from unskew.methods.robust.rules import Bulyan, CenteredClipping, FLTrust, GeoMedian, Krum, Median, MultiKrum, Trimmed
from unskew.protocol.messages import Update
from unskew.protocol.rules import ServerRule

RULES = ["median", "trimmed", "krum", "multikrum", "bulyan", "geomedian", "cclip"]


def points_of(n, d=3, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def centers(points, f):
    """Every estimator on the same points."""
    return {
        "median": estimators.coordinate_median(points),
        "trimmed": estimators.trimmed_mean(points, f),
        "krum": points[estimators.krum_order(points, f)[0]],
        "multikrum": points[estimators.krum_order(points, f)[: len(points) - f]].mean(0),
        "bulyan": estimators.bulyan(points, f),
        "geomedian": estimators.geometric_median(points),
        "cclip": estimators.centered_clipping(points, torch.zeros_like(points[0]), math.inf, 1),
    }


def test_five_points_on_a_line_by_hand():
    line = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]], dtype=torch.float64)
    assert estimators.coordinate_median(line) == 2
    assert estimators.coordinate_median(line[:4]) == 1.5
    assert estimators.trimmed_mean(line, 1) == 2
    # With f = 1, two neighbors count: 1 + 4, 1 + 1, 1 + 1, 1 + 4, 97^2 + 98^2; the tie goes to the smaller index.
    scores = estimators.krum_scores(estimators.squared_distances(line), 2)
    assert scores.tolist() == [5, 2, 2, 5, 97**2 + 98**2]
    assert estimators.krum_order(line, 1).tolist() == [1, 2, 0, 3, 4]
    # From 0 with tau = 1: (0 + 1 + 1 + 1 + 1) / 5, then from 0.8: (-0.8 + 0.2 + 1 + 1 + 1) / 5 further.
    zero = torch.zeros(1, dtype=torch.float64)
    assert estimators.centered_clipping(line, zero, 1.0, 1).item() == pytest.approx(0.8, rel=1e-12)
    assert estimators.centered_clipping(line, zero, 1.0, 2).item() == pytest.approx(0.8 + 2.4 / 5, rel=1e-12)
    assert estimators.bucket_means(line, torch.tensor([4, 0, 1, 2, 3]), 2).flatten().tolist() == [50, 1.5, 3]
    # The three nearest points of each: {0, 1, 2}, {0, 1, 2}, {1, 2, 3}, {1, 2, 3}, {2, 3, 100}.
    assert estimators.nearest_neighbor_means(line, 2).flatten().tolist() == pytest.approx([1, 1, 2, 2, 35])


def test_bulyan_equals_repeated_krum_written_with_loops():
    for seed in range(5):
        points, f = points_of(11, seed=seed), 2
        remaining, selected = list(range(11)), []
        while len(selected) < 11 - 2 * f:
            scores = {}
            for i in remaining:
                others = sorted(float(((points[i] - points[j]) ** 2).sum()) for j in remaining if j != i)
                scores[i] = sum(others[: max(1, len(remaining) - f - 2)])
            best = min(remaining, key=lambda i: (scores[i], points[i].tolist()))
            remaining.remove(best)
            selected.append(best)
        expected = []
        for column in points[selected].T.tolist():
            middle = np.median(column)
            nearest = sorted(column, key=lambda value: abs(value - middle))[: 11 - 4 * f]
            expected.append(np.mean(nearest))
        assert estimators.bulyan(points, f).tolist() == pytest.approx(expected, rel=1e-12)


def slope(points, center):
    """``||sum (v - u_i)/||v - u_i|| ||``, and the number of points at the center."""
    differences = np.asarray(points, np.float64) - np.asarray(center, np.float64)
    norms = np.sqrt((differences**2).sum(1))
    apart = norms > 1e-9 * np.median(norms[norms > 0])
    return np.linalg.norm((differences[apart] / norms[apart, None]).sum(0)), int((~apart).sum())


@pytest.mark.parametrize(
    ("n", "d", "spread"), [(9, 3, 1.0), (4, 2, 1e-6), (25, 50, 1e6), (101, 1, 1.0), (12, 2, 1e-30)]
)
def test_the_geometric_median_has_no_slope(n, d, spread):
    points = spread * points_of(n, d)
    pull, at_center = slope(points, estimators.geometric_median(points))
    assert pull < 1e-6 or pull <= at_center


def test_the_geometric_median_of_corners_and_of_an_obtuse_triangle_is_known():
    """A square's is its center, a triangle's with an angle above 120 degrees is that corner, a majority's is its point."""
    square = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]], dtype=torch.float64)
    assert estimators.geometric_median(square).tolist() == pytest.approx([1, 1], abs=1e-9)
    obtuse = torch.tensor([[-10.0, 1.0], [10.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert estimators.geometric_median(obtuse).tolist() == pytest.approx([0, 0], abs=1e-8)
    majority = torch.tensor([[3.0, 4.0]] * 3 + [[1e9, 0.0], [-1e9, 7.0]], dtype=torch.float64)
    assert estimators.geometric_median(majority).tolist() == [3, 4]
    balanced = torch.tensor(
        [[-2.0, -2], [0, 2], [-1, -1], [-1, 0]]
    ).double()  # unit vectors from the last one to others: (0, -1)
    assert estimators.geometric_median(balanced).tolist() == pytest.approx([-1, 0], abs=1e-12)
    # Three corners of an equilateral triangle: the center is at a third of its height.
    equal = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3**0.5]], dtype=torch.float64)
    assert estimators.geometric_median(equal).tolist() == pytest.approx([1, 3**0.5 / 3], abs=1e-9)


class Received:
    """Updates of a round, whose buffers are their first two entries, with a server that trains to the honest mean."""

    def __init__(self, points, own=None, cohort=1):
        self.points, self.key = points, torch.tensor(3)
        self.plan = SimpleNamespace(cohort=cohort)
        self.aggregate = SimpleNamespace(upload={})
        self.at_server = SimpleNamespace(train=lambda *_, **__: SimpleNamespace(v=own))
        self.v_global = self.b_global = torch.zeros_like(points[0])

    def __iter__(self):
        return iter([SimpleNamespace(delta=point, buffers=point[:2]) for point in self.points])


FAR = [1e6, -1e6, 1e25, 3e38, -3e38, math.inf, -math.inf, math.nan, "3e38 and -3e38", "one entry"]


@pytest.mark.parametrize("far", FAR, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"mix": "nnm"}, {"bucket": 2}], ids=str)
def test_any_f_points_leave_the_result_near_the_honest_ones(far, dtype, options):
    """In float64, entries of up to 1e300 instead of 3e38."""
    n, d, f = 23, 40, 3
    honest = points_of(n - f, d, seed=2).to(dtype)
    far = 1e300 if dtype == torch.float64 and far == 3e38 else far
    bad = torch.full((f, d), 3e38 if isinstance(far, str) else far, dtype=dtype)
    if far == "3e38 and -3e38":
        bad[1] *= -1
    if far == "one entry":
        bad[:, 1:] = 0
    points = torch.cat([bad, honest])[torch.from_numpy(np.random.default_rng(1).permutation(n))]
    radius = float(honest.norm(dim=1).max())
    low, high = honest.min(0).values, honest.max(0).values
    rules = {
        "median": Median(**options),
        "trimmed": Trimmed(share=f / n, **options),
        "krum": Krum(share=f / n, **options),
        "multikrum": MultiKrum(share=f / n, **options),
        "bulyan": Bulyan(share=f / n, **options),
        "geomedian": GeoMedian(**options),
        "cclip": CenteredClipping(tau=0.5, **options),
        "fltrust": FLTrust(**options),
    }
    for name, rule in rules.items():
        if name == "bulyan" and "bucket" in options:
            continue  # three of twelve buckets are more than it is defined for
        if "mix" in options and name in ("median", "geomedian", "cclip", "fltrust"):
            continue  # they suspect no number of points
        state = rule.server_init(torch.zeros(d, dtype=dtype), None)
        for _ in range(3):
            state, result = rule.combine(state, Received(points, own=honest.mean(0)))
        norm = float(result.delta.norm())
        assert math.isfinite(norm), name
        assert ((low[:2] <= result.buffers) & (result.buffers <= high[:2])).all(), name
        if name in ("median", "trimmed", "bulyan"):
            assert ((low <= result.delta) & (result.delta <= high)).all(), name
        if name == "krum" and not options:
            assert any(torch.equal(result.delta, point) for point in honest)
        if name in ("krum", "multikrum", "bulyan"):
            assert norm <= radius * (1 + 1e-6), name
        if name == "geomedian":
            share = f / (12 if "bucket" in options else n)
            assert norm <= 2 * radius * (1 - share) / (1 - 2 * share), name
        if name == "cclip":
            assert norm <= 3 * 3 * 0.5 * (1 + 1e-6)
        if name == "fltrust":
            assert norm <= float(honest.mean(0).norm()) * (1 + 1e-6)


FEW = [
    # With f = 1 of 5, krum needs five updates and bulyan (f = 1 of 7) seven; below, the median of the rest outvotes f.
    (Trimmed(), 5, 3, "median"),
    (Trimmed(), 10, 5, "median"),
    (Krum(), 5, 4, "median"),
    (MultiKrum(), 5, 4, "median"),
    (MultiKrum(), 5, 3, "median"),
    (Krum(mix="nnm"), 5, 4, "median"),
    (Trimmed(mix="nnm"), 5, 4, "rule"),
    (Trimmed(bucket=2), 5, 3, "median"),
    (Bulyan(), 7, 5, "median"),
    (MultiKrum(), 10, 5, "median"),
    # f of the updates may be a half or more.
    (Trimmed(), 5, 2, "nothing"),
    (MultiKrum(), 10, 4, "nothing"),
    (Bulyan(), 7, 1, "nothing"),
]


@pytest.mark.parametrize(("rule", "cohort", "n", "expected"), FEW, ids=str)
def test_attackers_gain_nothing_if_honest_clients_drop_out(rule, cohort, n, expected):
    """Honest updates are 0.9, 1.0, 1.1, ...; all suspected clients of the cohort reply, at 1e6."""
    f = math.ceil(rule.share * cohort)
    honest = [0.9 + 0.1 * i for i in range(max(0, n - f))]
    points = torch.tensor([[value, -value] for value in [1e6] * f + honest][:n], dtype=torch.float64)
    state, combined = rule.combine(rule.server_init(torch.zeros(2), None), Received(points, cohort=cohort))
    x = combined.delta[0].item()
    if expected == "nothing":
        assert combined.delta.tolist() == combined.buffers.tolist() == [0, 0]
        assert not combined.step
    else:
        assert honest[0] <= x <= honest[-1]
    if expected == "median":
        assert x == pytest.approx(np.median(points[:, 0]), rel=1e-12)
    too_few = expected == "nothing" or n < {"krum": 2 * f + 3, "multikrum": 2 * f + 3, "bulyan": 4 * f + 3}.get(
        rule.name, 0
    )
    assert bool(rule.metrics(state, 0, None)) == (too_few or rule.bucket > 1)


@pytest.mark.parametrize("server", ["", "+fedavgm:beta=0.9", "+fedadam", "+feddyn", "+fedacg"])
def test_a_round_with_too_few_updates_changes_nothing(server):
    settings = {
        "model": "mlp",
        "rounds": 8,
        "local_steps": 2,
        "batch_size": 4,
        "lr": 0.05,
        "engine": "inline",
        "seed": 1,
    }
    found = unskew.run(
        blobs([9, 14, 11, 8, 10]), method=f"trimmed:share=0.4{server}", network={"drop": 0.4}, **settings
    )
    counts = [row.get("trimmed_too_few_updates", 0) for row in found.history]
    weak = [t for t in range(1, 8) if counts[t] > counts[t - 1]]
    assert weak
    assert all(found.history[t]["loss"] == found.history[t - 1]["loss"] for t in weak)


@pytest.mark.parametrize(("attackers", "limit"), [(1, 1.0), (3, 2.0), (5, 20.0)])
def test_the_geometric_median_moves_little_however_far_attackers_go(attackers, limit):
    honest = points_of(11 - attackers, 50, seed=3).float()
    near, far = (
        GeoMedian().combine({}, Received(torch.cat([torch.full((attackers, 50), value), honest])))[1].delta
        for value in (1e6, 1e25)
    )
    center = estimators.geometric_median(honest)
    assert (far - center).norm() < limit * honest.norm(dim=1).mean()
    assert torch.allclose(near, far, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_of_the_geometric_median_are_those_of_the_authors(steps):
    points = points_of(7)
    center = points.numpy().mean(0)
    for _ in range(steps):
        weights = [1 / max(1e-5, np.linalg.norm(point - center)) for point in points.numpy()]
        center = sum(w * p for w, p in zip(weights, points.numpy(), strict=True)) / sum(weights)
    combined = GeoMedian(steps=steps).combine({}, Received(points))[1]
    assert combined.delta.tolist() == pytest.approx(center.tolist(), rel=1e-12)


def symmetric_points(n, d, seed):
    """Points with many ties: whole numbers, opposite pairs and duplicates."""
    half = torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, size=(n // 2, d))).double()
    return torch.cat([half, -half, half[:1].repeat(n - 2 * (n // 2), 1)])


CASES = [(n, f) for f in range(4) for n in (4 * f + 3, 4 * f + 4, 4 * f + 7)]


@pytest.mark.parametrize(("n", "f"), CASES)
@pytest.mark.parametrize("kind", ["random", "duplicates", "symmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_numbering_of_clients_changes_nothing(n, f, kind, dtype):
    for seed in range(5):
        points = symmetric_points(n, 3, seed) if kind == "symmetric" else points_of(n, 3, seed)
        if kind == "duplicates":
            points = torch.cat([points[: n - n // 2], points[: n // 2]])
        points, shuffled = points.to(dtype), torch.from_numpy(np.random.default_rng(seed).permutation(n))
        if kind != "symmetric":
            points = points + 3
        one, other = centers(points, f), centers(points[shuffled], f)
        for name in RULES:
            tolerance = 1e-6 if name in ("geomedian", "cclip", "multikrum") else 1e-12
            assert torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance), name
        for name in ("krum", "bulyan", "median"):
            assert torch.equal(one[name], other[name]), name
        if f:
            mixed = estimators.nearest_neighbor_means(points, f)
            assert torch.allclose(
                mixed[shuffled], estimators.nearest_neighbor_means(points[shuffled], f), rtol=1e-6, atol=1e-6
            )


def test_bulyan_prefers_the_point_that_comes_first_in_lexicographic_order():
    """With n = 3 and f = 0 every step ties or not by hand: 0 and 1 are as near to each other."""
    line = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.0, 4.0]])
    assert estimators.lexicographic_order(line).tolist() == [2, 1, 0]
    pair = torch.tensor([[7.0, 1.0], [7.0, 0.0], [90.0, 0.0]])
    assert estimators.krum_order(pair, 0).tolist() == [1, 0, 2]
    assert estimators.krum_order(pair.flip(0), 0).tolist() == [1, 2, 0]


def test_results_follow_permutations_shifts_and_scales():
    points, shift = points_of(11), torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)
    plain = centers(points, 2)
    permuted = centers(points[torch.from_numpy(np.random.default_rng(1).permutation(11))], 2)
    moved = centers(2 * points + shift, 2)
    for name in RULES:
        assert torch.allclose(permuted[name], plain[name], rtol=1e-9, atol=1e-12), name
        assert torch.allclose(moved[name], 2 * plain[name] + shift, rtol=1e-9, atol=1e-9), name


def test_without_suspects_the_result_is_the_mean_and_equal_points_stay():
    points = points_of(7)
    for name in ("trimmed", "multikrum", "cclip"):
        assert torch.allclose(centers(points, 0)[name], points.mean(0), rtol=1e-12), name
    same = torch.ones(11, 4, dtype=torch.float64).mul(3)
    for name, center in centers(same, 2).items():
        assert torch.allclose(center, same[0], rtol=1e-12), name
    order = torch.arange(7)
    assert torch.equal(estimators.bucket_means(points, order, 1), points)
    assert torch.allclose(estimators.bucket_means(points, order, 7)[0], points.mean(0), rtol=1e-12)


class Captured(ServerRule):
    """Applies the combined update and stores it with the single ones."""

    name, summary, paper = "captured", "", ""
    needs = ()

    def __init__(self):
        self.deltas = []

    def step(self, state, updates):
        self.deltas.append(updates.aggregate.delta.clone())
        return {"v": state["v"] + updates.aggregate.delta}


def run(method, **options):
    torch.manual_seed(0)
    given = {"rounds": 3, "lr": 0.05, "batch_size": 8, "local_steps": 2, "model": "mlp", "precision": "fp64"}
    given["engine"] = "inline"
    return unskew.run(blobs([9, 19, 8, 13, 7, 11, 10, 12]), method=method, **{**given, **options})


def near(one, other):
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "method", ["trimmed:share=0", "multikrum:share=0", "cclip:tau=.inf,steps=1", "median:bucket=8"]
)
def test_identities_with_uniform_fedavg(method):
    expected = run("fedavg", client_weighting="uniform")
    with pytest.warns(UserWarning, match="does not withstand any attacker"):
        robust = run(method.replace(".inf", "inf"))
    assert near(robust.vector, expected.vector)


@pytest.mark.parametrize(
    "method",
    slow_but(
        ["cclip", "fltrust", "krum:mix=nnm+fedadam"],
        [*RULES, "fltrust", "median:bucket=2", "krum:mix=nnm+fedadam", "fedprox+trimmed+fedavgm"],
    ),
)
def test_every_rule_on_every_engine_and_resumed(method, tmp_path):
    method = method.replace("bulyan", "bulyan:share=0.12")
    expected = run(method, engine="inline")
    for engine in ("processes", "vectorized"):
        assert near(run(method, engine=engine, workers=2).vector, expected.vector)
    folder = tmp_path / "run"
    run(method, engine="inline", rounds=2, out=folder, checkpoint_every=1)
    torch.manual_seed(0)
    resumed = unskew.resume(folder, rounds=3, federation=blobs([9, 19, 8, 13, 7, 11, 10, 12]))
    assert torch.equal(resumed.vector, expected.vector)


def test_the_combined_update_is_the_estimate_of_the_received_ones(monkeypatch):
    """The round's median against NumPy, on the updates as the server received them."""
    seen = []
    take = Update.is_finite

    def recorded(self):
        seen.append(self.delta.clone())
        return take(self)

    monkeypatch.setattr(Update, "is_finite", recorded)
    captured = Captured()
    run(["median", captured], engine="inline", rounds=2)
    rounds = [seen[:8], seen[8:]]
    assert len(seen) == 16
    for combined, received in zip(captured.deltas, rounds, strict=True):
        expected = np.median(torch.stack(received).numpy(), axis=0)
        assert np.allclose(combined.numpy(), expected, rtol=1e-12, atol=0)


def test_buffers_are_the_median_of_the_clients_buffers():
    class WithBuffers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(72, momentum=1.0)
            self.head = torch.nn.Linear(72, 3)

        def forward(self, x):
            return self.head(self.norm(x.flatten(1)))

    torch.manual_seed(0)
    fed = blobs([8, 8, 8])
    result = unskew.run(fed, model=WithBuffers(), method="median", rounds=1, local_steps=1, batch_size=8, lr=1e-9)
    assert fed.normalization is None
    means = torch.stack([client.x.flatten(1).mean(0) for client in fed.clients])
    running = result.model.state_dict()["norm.running_mean"]
    assert torch.allclose(running, means.median(0).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("scaffold+median", "does not protect what scaffold uploads"),
        ("fednova+krum", "does not protect what fednova uploads"),
        ("feddle+median", "reads single updates"),
        ("fedals+krum", "compares whole updates"),
        ("krum+median", "both fill the slot 'aggregate'"),
    ],
)
def test_conflicts_are_sentences(method, words):
    with pytest.raises(MethodConflictError, match=words):
        unskew.method(method)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("krum:share=0.4", {}, "not defined for 8 points"),
        ("bulyan:share=0.2", {}, "Use a larger participation"),
        ("median", {"secure_aggregation": "required"}, "reads the update of each individual client"),
        ("median", {"client_weighting": "samples"}, "weights clients uniformly"),
        ("fltrust", {"server_data": None}, "needs data at the server"),
        ("median:mix=nnm", {}, "replaces every update by the mean of all"),
        ("krum:share=0,mix=nnm", {}, "a share above 0"),
    ],
)
def test_what_does_not_fit_is_reported_before_training(method, options, words):
    fed = blobs([9] * 8, server=method != "fltrust")
    options.pop("server_data", None)
    with pytest.raises(UnskewError, match=words):
        unskew.run(fed, model="mlp", method=method, rounds=1, **options)


def test_attackers_do_not_move_a_robust_model():
    """One client of eight sends -50 times its update: the mean diverges from the honest model, robust rules stay near."""

    class Attack(unskew.ClientRule):
        name, summary, paper = "attack", "", ""

        def transform_update(self, ctx, carry, delta):
            return torch.where(ctx.client_info["attacker"] > 0, -50 * delta, delta)

        def client_info(self, data):
            return {"attacker": torch.tensor(float(data.client.num_samples == 19))}

    honest = run("fedavg", client_weighting="uniform").vector
    distance = {
        method: float((run([Attack(), method], client_weighting="auto").vector - honest).norm())
        for method in ("fedavg", "median", "trimmed", "krum", "geomedian")
    }
    for method in itertools.islice(distance, 1, None):
        assert distance[method] < 0.1 * distance["fedavg"], distance


@pytest.mark.parametrize("form", ["mean", "heavy"])
def test_smooth_sends_the_momentum_of_updates(form):
    """With a server that does not step, all rounds start from one model."""
    rows = []

    class Watch(ServerRule):
        name, summary, paper = "watch", "", ""
        needs = ("individual",)

        def step(self, state, updates):
            rows.append([update.delta.clone() for update in updates])
            return {"v": state["v"]}

    def sent(method):
        rows.clear()
        fed = blobs([9, 14, 11])
        unskew.run(
            fed,
            model="mlp",
            method=[*method, Watch()],
            rounds=4,
            local_steps=2,
            batch_size=4,
            precision="fp64",
            engine="inline",
        )
        return list(rows)

    plain, smooth = sent([]), sent([f"smooth:beta=0.8,form={form}"])
    share = 1.0 if form == "heavy" else 0.2
    for client in range(3):
        momentum = 0
        for t in range(4):
            momentum = 0.8 * momentum + share * plain[t][client]
            assert torch.allclose(smooth[t][client], momentum, rtol=1e-9, atol=1e-12)


def test_smooth_without_momentum_is_the_method_alone():
    assert torch.equal(run("smooth:beta=0+median").vector, run("median").vector)
