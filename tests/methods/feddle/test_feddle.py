"""Feddle: the identities that make it FedBuff, its gradient, its atlas, a whole search by hand, and what it is for."""

import json

import numpy as np
import pytest
import torch
from support.delays import Arrivals
from support.federations import SmallBatchNorm, blobs, with_server
from support.protocol import an_update, some_updates
from support.running import Stop, StopAfter
from support.slow import slow_but
from support.tolerance import MAGNIFIED, TRAINING, assert_close, near

import unskew
from unskew.data.federation import Federation
from unskew.data.load import load_federation
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.feddle.feddle import Anchor, Feddle
from unskew.methods.feddle.search import Directions, cosine, minimize, new_head, norms, scales, surrogate
from unskew.methods.registry import method
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.training_config import Training
from unskew.seeding import fold
from unskew.simulation.server_trainer import ServerTrainer

FULL = torch.float64
OWN, OTHER = with_server(), with_server(in_domain=False)


def train(chosen, fed=OWN, model="logistic", rounds=8, **options):
    torch.manual_seed(0)
    given = {
        "lr": 0.05, "batch_size": 8, "local_epochs": 1, "precision": "fp64", "engine": "inline", "participation": 0.5,
        "network": {"delay": "half-normal:2"}, **options,
    }  # fmt: skip
    return unskew.run(fed, model=model if isinstance(model, str) else model(), method=chosen, rounds=rounds, **given)


class Server:
    """Feddle by itself on a linear model: updates are given by hand."""

    def __init__(self, fed=OWN, cohort=2, module=None, **options):
        torch.manual_seed(0)
        module = module or torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 4), torch.nn.Linear(4, 3))
        self.spec = ModelSpec(module, (2, 6, 6), 3, dtype=FULL)
        self.bench = ServerTrainer(self.spec, fed, Training(precision="fp64"), torch.device("cpu"), cohort, True)
        self.rule = Feddle(**options)
        self.state = self.rule.init(self.spec.flatten(), FederationInfo.of(fed))
        self.b, self.round = self.spec.flatten_buffers(), 0

    @property
    def v(self):
        return self.state["v"]

    def arrive(self, *deltas, weights=None, origin_round=None):
        """One round; returns the coefficients found."""
        single = []
        for k, delta in enumerate(deltas):
            weight = 1.0 if weights is None else weights[k]
            when = self.round if origin_round is None else origin_round[k]
            single.append(an_update(k, delta, when, weight, self.b, b_start=self.b, arrived=self.round))
        key = torch.tensor(100 + self.round)
        arrived = some_updates(single, self.round, self.v, self.b, self.spec, key, server_training=self.bench)
        self.state = {n: t for n, t in self.rule.step(self.state, arrived).items() if n != "b"}
        self.round += 1
        return self.state["found"]

    def noise(self, count, size=1.0, seed=0):
        draws = torch.Generator().manual_seed(seed)
        return [size * torch.randn(len(self.v), generator=draws, dtype=FULL) for _ in range(count)]

    def anchors(self):
        """How the first number of each anchor and |c_hat| or fresh are, in order of arrival."""
        return [float(a[0]) for a in self.state["anchors"]]


# ---- the identities with FedBuff and FedAvg ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", slow_but(["mlp"], ["logistic", "mlp"]))
@pytest.mark.parametrize("options", ["epochs=0", "lam=inf,epochs=2", "epochs=0,normalize=false", "epochs=0,atlas=3"])
def test_without_search_it_is_fedavg_over_the_arrivals(model, options):
    feddle, fedavg = train(f"feddle:{options}", model=model), train("fedavg", model=model, client_weighting="uniform")
    assert_close(feddle.vector, fedavg.vector, TRAINING)
    weighted = train(f"feddle:{options}", model=model, client_weighting="samples")
    assert_close(weighted.vector, train("fedavg", model=model).vector, TRAINING)


@pytest.mark.parametrize(("size", "eta"), [(1, 0.5), (3, 1.0), (7, 0.3)])
def test_without_search_and_with_a_buffer_it_is_fedbuff(size, eta):
    """Also buffers that fill in the middle of a round, or over several rounds."""
    chosen = f"feddle:trigger=buffer,buffer_size={size},eta={eta},epochs=0"
    feddle, fedbuff = train(chosen, rounds=12), train(f"fedbuff:buffer_size={size},eta={eta}", rounds=12)
    assert_close(feddle.vector, fedbuff.vector, TRAINING)


def test_without_search_the_statistics_are_fedbuffs_too():
    """So the model that is evaluated is the same in every round, also in those in which a buffer waits."""
    options = {"model": SmallBatchNorm, "rounds": 12}
    feddle = train("feddle:trigger=buffer,buffer_size=3,epochs=0", **options)
    fedbuff = train("fedbuff:buffer_size=3", **options)
    for mine, theirs in zip(feddle.model.state_dict().values(), fedbuff.model.state_dict().values(), strict=True):
        assert_close(mine, theirs, TRAINING)
    assert [r["loss"] for r in feddle.history] == near([r["loss"] for r in fedbuff.history], TRAINING)


def test_zero_steps_for_any_norms_and_any_number_of_retained_anchors():
    """Lengths over twelve orders of magnitude, a zero among them."""
    server = Server(atlas=9, epochs=0)
    sizes = iter([1e-6, 1e6, 0.0, 1.0, 3.0, 1e-3, 5.0, 2e4, 1.0, 1.0, 7.0, 0.1, 4.0, 0.0, 0.0])
    for count in (1, 3, 5, 2, 4):
        deltas = [d * next(sizes) for d in server.noise(count, seed=count)]
        expected = server.v + sum(deltas) / count
        server.arrive(*deltas)
        assert_close(server.v, expected)
    assert len(server.state["anchors"]) == 9


def test_stale_updates_weigh_less_and_weights_count():
    server = Server(epochs=0, a=0.5, eta=0.7)
    server.round = 10
    first, second = server.noise(2)
    expected = server.v + 0.7 * (3 / 4 * first / np.sqrt(1 + 3) + 1 / 4 * second)
    server.arrive(first, second, weights=[3.0, 1.0], origin_round=[7, 10])
    assert_close(server.v, expected, TRAINING)


def test_a_large_lam_holds_the_search_at_the_fallback():
    """Adam's steps do not know the size of the penalty, so it is held within a few of them."""
    loose, tight = (Server(lr=0.01, epochs=10, batch=4, lam=lam) for lam in (0.0, 1e6))
    for server in (loose, tight):
        for t in range(3):
            found = server.arrive(*server.noise(2, 0.3, seed=t))
    away = (found[:, 1] - found[:, 0]).abs().max()
    assert away < 0.03
    assert (loose.state["found"][:, 1] - loose.state["found"][:, 0]).abs().max() > 0.1


# ---- gradient and search ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_the_gradient_is_autograds_through_the_sum(own, half):
    fed = OWN if own else OTHER
    server = Server(fed)
    A = torch.stack(server.noise(20, 0.2))
    A = A.to(torch.bfloat16) if half else A
    scale, _ = scales(norms(A, FULL))
    directions, c = Directions(A, scale), torch.linspace(-1, 1, 20, dtype=FULL)
    theta = torch.randn(7, 5, dtype=FULL)
    loss_fn = None if own else surrogate(server.bench, theta)
    batch = server.bench.batch(torch.arange(9), 0)
    g = server.bench.gradient(loss_fn, server.b, train=False)(directions.at(server.v, c), batch)
    leaf = c.clone().requires_grad_()
    output = server.spec.forward(server.v + (leaf * scale) @ A.to(FULL), server.b, batch.x)
    logits = output.logits if own else output.features @ theta[:, :-1].T + theta[:, -1]
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch.y), leaf)[0]
    assert_close(directions.slopes(g), expected)
    if not own:
        head = server.spec.parts["head"]
        assert all(not g[piece].any() for piece in head)


def test_a_whole_search_is_that_of_numpy():
    """Multinomial logistic regression, full batches: Adam on the coefficients, written out in float64."""
    server = Server(module=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3)), epochs=6, lr=0.02,
                    batch=100, lam=0.3)  # fmt: skip
    first, second = server.noise(3, 0.2), server.noise(2, 0.7, seed=9)
    server.arrive(*first)
    v = server.v.numpy().copy()
    server.arrive(*second)
    x, y = OWN.server.x.flatten(1).double().numpy(), OWN.server.y.numpy()
    A = torch.stack([*first, *second]).numpy()[-5:]
    # The atlas holds twice the cohort of two: the first anchor with the smallest coefficient has gone.
    assert len(server.state["anchors"]) == 4
    kept = server.state["anchors"].numpy()
    A = np.array([a for a in A if any(np.array_equal(a, k) for k in kept)])
    assert len(A) == 4
    lengths = np.linalg.norm(A, axis=1)
    r = np.median(lengths)
    bars = r * A / lengths[:, None]
    c0 = np.array([0, 0, *(lengths[2:] / r / 2)])
    c, m, s = c0.copy(), np.zeros(4), np.zeros(4)
    for t in range(1, 7):
        w = v + c @ bars
        logits = x @ w[: 3 * 72].reshape(3, 72).T + w[3 * 72 :]
        p = np.exp(logits - logits.max(1, keepdims=True))
        error = p / p.sum(1, keepdims=True) - np.eye(3)[y]
        g = np.concatenate([(error.T @ x).ravel(), error.sum(0)]) / len(x)
        slope = bars @ g + 0.3 * (c - c0)
        m, s = 0.9 * m + 0.1 * slope, 0.999 * s + 0.001 * slope**2
        c -= 0.02 * m / (1 - 0.9**t) / (np.sqrt(s / (1 - 0.999**t)) + 1e-8)
    assert_close(server.state["found"][:, 1].numpy(), c, MAGNIFIED)
    assert_close(server.v.numpy(), v + c @ bars, MAGNIFIED)


def test_a_whole_search_out_of_domain_is_that_of_torch():
    """The head at the fallback, then the coefficients with the head frozen: autograd through the sum and torch's Adam."""
    server = Server(OTHER, epochs=2, batch=7, lr=0.03, head_lr=0.05, lam=0.2, cohort=3)
    server.arrive(*server.noise(3, 0.2))
    v, old, new = server.v.clone(), server.state["anchors"].clone(), server.noise(2, 0.5, seed=5)
    found = server.arrive(*new)
    A = torch.stack([*old, *new])
    lengths = A.norm(dim=1)
    r = float(np.median(lengths.numpy()))
    bars = A * (r / lengths)[:, None]
    c0 = torch.cat([torch.zeros(3, dtype=FULL), lengths[3:] / r / 2])
    x, y, loss = OTHER.server.x.double(), OTHER.server.y, torch.nn.functional.cross_entropy
    key = fold(torch.tensor(101), 1)  # of the second round; its second arrival completes it
    plans = [server.bench.plan(fold(key, i), len(y), local_epochs=2, batch_size=7, drop_last=False) for i in range(2)]

    def logits(c, theta, index):
        features = server.spec.forward(v + c @ bars, server.b, x[index]).features
        return features @ theta[:, :-1].T + theta[:, -1]

    def adam(leaf, lr, plan, objective):
        optimizer = torch.optim.Adam([leaf.requires_grad_()], lr=lr)
        for index in plan:
            optimizer.zero_grad()
            objective(leaf, index).backward()
            optimizer.step()
        return leaf.detach()

    head = new_head(fold(key, 2), int(y.max()) + 1, 4, v).clone()
    theta = adam(head, 0.05, plans[1], lambda theta, i: loss(logits(c0, theta, i), y[i]))
    c = adam(
        c0.clone(), 0.03, plans[0], lambda c, i: loss(logits(c, theta, i), y[i]) + 0.1 * (c - c0).square().sum()
    )  # fmt: skip
    assert_close(found[:, 1], c)
    assert_close(server.v, v + c @ bars, TRAINING)


def test_the_length_of_an_update_changes_the_fallback_but_no_direction():
    """With an odd number of anchors whose median is another one's length."""
    one, other = Server(epochs=0), Server(epochs=0)
    deltas = [size * d for size, d in zip((0.5, 1.0, 3.0), one.noise(3), strict=True)]
    found, scaled = one.arrive(*deltas), other.arrive(deltas[0], deltas[1], 7 * deltas[2])

    def bars(server):
        A = server.state["anchors"]
        return A * scales(norms(A, FULL))[0][:, None]

    torch.testing.assert_close(bars(one), bars(other))
    torch.testing.assert_close(scaled[:, 0], found[:, 0] * torch.tensor([1.0, 1.0, 7.0], dtype=FULL))


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    lengths = torch.tensor([1.0, 8.0, 2.0, 4.0], dtype=FULL)
    scale, r = scales(lengths)
    assert float(r) == 3.0
    torch.testing.assert_close(scale * lengths, torch.full((4,), 3.0, dtype=FULL))


# ---- the atlas --------------------------------------------------------------------------------------------------------


def anchor(c, name):
    return Anchor(torch.tensor([float(name)]), 1.0, 1.0, name, 0, c)


@pytest.mark.parametrize(
    ("eviction", "gone"),
    [("score", [1, 4]), ("fifo", [0, 1])],
)
def test_eviction_removes_the_least_useful_anchor(eviction, gone):
    """The smallest |c| of those that a search has seen; ties: the oldest. Fresh ones stay."""
    atlas = [anchor(c, n) for n, c in enumerate([0.5, -0.1, None, 0.7, 0.1, -0.4])]
    Feddle(eviction=eviction).evict(atlas, 4)
    assert sorted({0, 1, 2, 3, 4, 5} - {int(a.a) for a in atlas}) == gone


def test_arrivals_between_searches_never_evict_each_other():
    """Five arrivals into an atlas of three: it grows, and is trimmed after the search by what that found."""
    server = Server(atlas=3, epochs=0)
    deltas = server.noise(5)
    server.arrive(*deltas[:2])
    before = server.v
    found = server.arrive(*deltas)
    assert len(found) == 5
    torch.testing.assert_close(server.v, before + sum(deltas) / 5)
    assert len(server.state["anchors"]) == 3
    longest = sorted(sorted(range(5), key=lambda k: float(deltas[k].norm()))[2:])
    assert server.anchors() == [float(deltas[k][0]) for k in longest]


def test_what_the_searches_of_a_round_find_is_told_together():
    """Two buffers fill in the same round; in the next one only its own search counts."""
    server = Server(trigger="buffer", buffer_size=3, cohort=1, epochs=1, atlas=9)
    deltas = server.noise(9, 0.1)
    assert len(server.arrive(*deltas[:3])) == 3
    server.round -= 1
    assert len(server.arrive(*deltas[3:6])) == 3 + 6
    assert len(server.arrive(*deltas[6:])) == 9
    waiting = [row["feddle_waiting"] for row in train("feddle:trigger=buffer,buffer_size=5,epochs=1", rounds=4).history]
    assert max(waiting) > 0
    assert all(0 <= n < 5 for n in waiting)


def test_the_server_holds_one_model_per_anchor_and_one_more():
    for half, expected in ((False, 1 + 4), (True, 1 + 4 / 4)):
        server = Server(half=half, epochs=1, cohort=2)
        for t in range(5):
            server.arrive(*server.noise(3, 0.1, seed=t))
        size = len(server.v)
        held = sum(t.numel() * t.element_size() for t in server.state.values() if t.numel() >= size)
        assert held == expected * size * 8
        assert sum(t.numel() for t in server.state.values() if t.numel() < size) < 60


def test_an_atlas_in_half_precision_finds_nearly_the_same():
    whole, half = (Server(epochs=5, lr=0.01, half=h) for h in (False, True))
    for server in (whole, half):
        for t in range(12):
            server.arrive(*server.noise(2, 0.1, seed=t))
    assert half.state["anchors"].dtype == torch.bfloat16
    torch.testing.assert_close(half.v, whole.v, rtol=0, atol=0.02)
    assert not torch.equal(half.v, whole.v)


def test_no_client_has_two_updates_on_their_way(monkeypatch):
    spy = Arrivals(monkeypatch)
    train("feddle:epochs=1", rounds=15)
    flying = set()
    for t in range(15):
        assert not flying & set(spy.out[t])
        flying |= set(spy.out[t])
        flying -= {client for _, client in spy.back[t]}


# ---- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_a_harmful_client_gets_a_negative_coefficient(sign):
    """A step down the loss of the server's samples, and one with its sign flipped."""
    server = Server(lr=0.1, epochs=40, batch=16)
    grad = server.bench.gradient(None, server.b, train=False)
    down = -grad(server.v, server.bench.batch(torch.arange(16), 0))
    found = server.arrive(sign * down)
    assert sign * float(found[0, 1]) > 0.1
    assert float(found[0, 0]) > 0


def harmful(fed=OWN, **options):
    """A federation whose client 0 has wrong labels."""
    pairs = [(c.x.numpy(), c.y.numpy().copy()) for c in fed.clients]
    pairs[0] = (pairs[0][0], (pairs[0][1] + 1) % 3)
    test = (fed.test[0].numpy(), fed.test[1].numpy())
    draws = np.random.default_rng(1)
    y = draws.integers(0, 3, 200)
    x = (draws.normal(size=(200, 2, 6, 6)) + y[:, None, None, None] * 0.5).astype(np.float32)
    return Federation.from_arrays(pairs, test, (x, y), classes=3, holdout=0, **options)


def test_it_beats_fedbuff_where_a_client_is_wrong():
    options = {"fed": harmful(), "rounds": 15, "participation": 1.0, "network": {"delay": "none"}, "lr": 0.1}
    feddle = train("feddle:lr=0.02,epochs=4", **options)
    fedavg = train("fedavg", **options, client_weighting="uniform")
    assert feddle.summary["loss"] < fedavg.summary["loss"] - 0.05
    assert sum(row["coefficients/negative"] for row in feddle.history) > 10


# ---- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fed", [pytest.param(OWN, id="own"), pytest.param(OTHER, id="other", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", ["epochs=2,batch=5", "trigger=buffer,buffer_size=3,epochs=1,warm_start=true,half=true"]
)
def test_a_run_goes_on_bit_for_bit_with_updates_on_their_way(tmp_path, fed, options):
    whole = train(f"feddle:{options}", fed, SmallBatchNorm, rounds=9)
    with pytest.raises(Stop):
        train(
            f"feddle:{options}", fed, SmallBatchNorm, rounds=9, out=tmp_path / "a", checkpoint_every=1,
            callbacks=[StopAfter(5)],
        )  # fmt: skip
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=fed, model=SmallBatchNorm())
    assert torch.equal(rest.vector, whole.vector)
    kept = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    for row, mine in zip(kept, whole.history, strict=True):
        assert row.get("coefficients") == mine.get("coefficients")
        assert row["accuracy"] == mine["accuracy"]


@pytest.mark.parametrize("engine", slow_but(["vectorized"], ["vectorized", "processes"]))
@pytest.mark.parametrize("beside", ["fedprox:mu=0.1", "scaffold", "fedcog:start_round=1,n=6,g_steps=2"])
def test_client_rules_and_engines_go_with_it(engine, beside):
    chosen = f"feddle:epochs=1,batch=8,lr=0.01+{beside}"
    reference, other = (train(chosen, model=SmallBatchNorm, rounds=4, engine=e) for e in ("inline", engine))
    assert_close(other.vector, reference.vector, MAGNIFIED)
    assert not torch.equal(
        reference.vector, train("feddle:epochs=1,batch=8,lr=0.01", model=SmallBatchNorm, rounds=4).vector
    )


def test_statistics_move_by_the_mean_change():
    """Of two clients with one batch each, without delay: as FedAvg's; the search does not move them."""
    options = {"model": SmallBatchNorm, "network": {"delay": "none"}, "rounds": 3, "client_weighting": "uniform"}
    feddle, fedavg = train("feddle:epochs=0", **options), train("fedavg", **options)
    searched = train("feddle:epochs=1", **{**options, "rounds": 1})
    once = train("fedavg", **{**options, "rounds": 1})

    def statistics(result):
        return torch.cat([b.flatten() for b in result.model.buffers() if b.is_floating_point()])

    assert_close(statistics(feddle), statistics(fedavg), TRAINING)
    assert_close(statistics(searched), statistics(once), TRAINING)
    late = train("feddle:epochs=0", model=SmallBatchNorm, network={"delay": "fixed:2"}, participation=1.0, rounds=3)
    assert not torch.equal(statistics(late), statistics(train("feddle:epochs=0", model=SmallBatchNorm, rounds=1)))


def test_statistics_that_stay_at_clients_are_averaged_as_always():
    result = train("feddle:epochs=1", model=SmallBatchNorm, buffers="local", rounds=3)
    assert result.summary["buffers"] == "local"


def test_feddle_rejects_invalid_settings():
    with pytest.raises(ConfigError, match="feddle needs data at the server: give --server-data 1000"):
        train("feddle", blobs([9, 8], server=False))
    with pytest.raises(ConfigError, match="consists only of its head"):
        train("feddle", OTHER)
    with pytest.raises(ConfigError, match="atlas=2 must be at least buffer_size=3"):
        train("feddle:atlas=2,trigger=buffer,buffer_size=3")
    with pytest.raises(MethodConflictError, match="only parts of the model are sent"):
        method("feddle+fedals")
    with pytest.raises(MethodConflictError, match="feddle reads the update of each individual client"):
        train("feddle", secure_aggregation="required")
    with pytest.raises(ConfigError, match="diagnose=surrogate compares"):
        train("feddle", diagnose=["surrogate"])


def test_the_servers_samples_are_never_evaluated_on():
    fed = load_federation("digits", clients=5, partition="iid", server_data=100)
    seen = {tuple(row.flatten().tolist()) for row in fed.server.x}
    assert len(seen) > 95
    whole = load_federation("digits", clients=5, partition="iid").test[0]
    mine = torch.cat([fed.server.x, fed.test[0]]).flatten(1)
    assert torch.equal(torch.unique(mine, dim=0), torch.unique(whole.flatten(1), dim=0))
    assert len(mine) == len(whole)


# ---- what is measured -------------------------------------------------------------------------------------------------


def test_the_cosine_is_that_of_two_gradients_and_only_measures():
    result = train("feddle:epochs=1", OTHER, "mlp", diagnose=["surrogate"])
    plain = train("feddle:epochs=1", OTHER, "mlp")
    assert torch.equal(result.vector, plain.vector)
    seen = [row["surrogate/cosine"] for row in result.history if "surrogate/cosine" in row]
    assert seen
    assert all(-1 <= value <= 1 for value in seen)
    assert "surrogate/cosine" in result.summary or result.history[-1]["updates"] == 0
    # Where both losses are the same, so are the gradients.
    server = Server(OWN)
    server.bench.data = type(OWN.server)(*OWN.test)
    A = torch.stack(server.noise(5, 0.2))
    directions, c = Directions(A, torch.ones(5, dtype=FULL)), torch.zeros(5, dtype=FULL)
    head = [server.v[piece] for piece in server.spec.parts["head"]]
    theta = torch.cat([head[0][:12].view(3, 4), head[0][12:].view(3, 1)], dim=1)
    body = directions.A.clone()
    for piece in server.spec.parts["head"]:
        body[:, piece] = 0
    found = cosine(server.bench, theta, server.v, server.b, Directions(body, directions.scale), c, torch.tensor(1))
    assert found == pytest.approx(1.0)


def test_training_of_class_means_and_sums_of_asked_clients_are_counted():
    options = {"network": {"delay": "none"}, "participation": 1.0, "rounds": 1, "diagnose": ["server"], "model": "mlp"}
    fewer, more = (train(f"fedgh:epochs={epochs}", **options).summary["server/gflops"] for epochs in (1, 11))
    assert more > fewer > 0
    asked, plain = (train(method, **options).summary["server/gflops"] for method in ("mime", "fedavg"))
    assert asked > plain


def test_what_the_server_computes_and_holds_is_counted():
    """A linear layer of 72 x 3 with a bias: forward 2 n d_w, backward the same (its input needs no gradient)."""
    options = {"network": {"delay": "none"}, "participation": 1.0, "rounds": 2, "diagnose": ["server"]}
    free, searched = train("feddle:epochs=0", **options), train("feddle:epochs=3,batch=100", **options)
    d, n, K = 219, 16, 4
    products = 2 * 3 * 2 * (2 * n * 216)  # three steps, forward and weights' gradient, for two...
    extra = 1e9 * (searched.history[0]["server/gflops"] - free.history[0]["server/gflops"])
    anchors = 3 * 2 * (2 * K * d)
    assert extra == pytest.approx(products / 2 + anchors, rel=0.2)
    assert searched.summary["server/bytes"] == pytest.approx(8 * d * (1 + 8), rel=0.1)
    assert train("fedavg", **options).summary["server/bytes"] == 8 * d


def test_the_best_of_the_last_five_evaluations():
    result = train("feddle:epochs=1", rounds=20, eval_every=2)
    scored = [row["accuracy"] for row in result.history if row["accuracy"] is not None]
    assert len(scored) == 10
    assert result.summary["best_last_5"] == max(scored[5:])


def test_minimize_stops_at_the_minimum_of_a_parabola():
    """f(w) = |w - 1|^2 / 2 along the axes: the coefficients go to 1, with lam=1 half way."""
    directions = Directions(torch.eye(3, dtype=FULL), torch.ones(3, dtype=FULL))
    zero = torch.zeros(3, dtype=FULL)
    steps = [None] * 800
    for lam, expected in ((0.0, 1.0), (1.0, 0.5)):
        c = minimize(lambda v, _: v - 1, steps, zero, directions, zero, 0.01, lam)
        torch.testing.assert_close(c, torch.full((3,), expected, dtype=FULL), rtol=0, atol=1e-3)
