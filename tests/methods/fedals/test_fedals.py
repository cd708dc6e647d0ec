"""FedALS against a plain loop of modules and torch.optim, its identities, and its traffic."""

import copy
import itertools
import math

import pytest
import torch
from support.federations import blobs
from support.slow import slow_but
from support.tolerance import MAGNIFIED, TRAINING, assert_close, near
from torch import nn

import unskew
from unskew.errors import ConfigError
from unskew.methods.fedals.auto import best_periods
from unskew.methods.registry import method
from unskew.models.layer_groups import layer_groups
from unskew.models.registry import build_model
from unskew.models.spec import ModelSpec
from unskew.testing import assert_engines_agree

SIZES = [9, 14, 11]


class Net(nn.Module):
    """Two layers with a BatchNorm between them: the statistics belong to the body."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(72, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.first(x.flatten(1)))))


def run(chosen, engine="inline", rounds=7, **options):
    torch.manual_seed(2)
    given = {"lr": 0.1, "precision": "fp64", "local_steps": 3, "batch_size": 100, **options}
    return unskew.run(blobs(SIZES), model=Net(), method=chosen, engine=engine, rounds=rounds, **given)


def by_hand(alpha, rounds, tau=3, lr=0.1, optimizer="sgd", **kw):
    """Modules and torch.optim; full batches, weights by samples."""
    fed = blobs(SIZES)
    torch.manual_seed(2)
    start = Net().double()
    nets = [copy.deepcopy(start) for _ in SIZES]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizers = [kinds[optimizer](net.parameters(), lr=lr, **kw) for net in nets]
    weights = torch.tensor([float(c.num_samples) for c in fed.clients], dtype=torch.float64)
    weights /= weights.sum()

    def mean(name):
        return sum(w * net.state_dict()[name] for w, net in zip(weights, nets, strict=True))

    def average(names):
        for name in names:
            value = mean(name).clone()
            for net in nets:
                net.state_dict()[name].copy_(value)

    floats = [n for n, t in start.state_dict().items() if t.is_floating_point()]
    head = [n for n in floats if n.startswith("head")]
    body = [n for n in floats if not n.startswith("head")]
    for step in range(1, rounds * tau + 1):
        for net, optimizer_, client in zip(nets, optimizers, fed.clients, strict=True):
            net.train()
            optimizer_.zero_grad()
            nn.functional.cross_entropy(net(client.x.double()), client.y).backward()
            optimizer_.step()
        if step % tau == 0:
            average(head)
        if step % (alpha * tau) == 0:
            average(body)
    return {name: mean(name) for name in floats}


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "weight_decay": 1e-2}, {"momentum": 0.5, "nesterov": True}],
    ids=["plain", "momentum-decay", "nesterov"],
)
def test_it_is_the_plain_loop_with_momentum_kept_and_statistics_with_their_layer(options):
    for rounds in (5, 6):  # the body was last averaged two rounds ago, or just now
        mine = run("fedals:alpha=3", rounds=rounds, **options).model.state_dict()
        for name, value in by_hand(3, rounds, **options).items():
            assert_close(mine[name].double(), value, MAGNIFIED)


def test_adam_goes_on_with_its_moments_and_its_number_of_steps():
    mine = run("fedals:alpha=2", rounds=5, lr=0.01, optimizer="adam").model.state_dict()
    for name, value in by_hand(2, 5, lr=0.01, optimizer="adam").items():
        assert_close(mine[name].double(), value, MAGNIFIED)


SUMS = ["fedals:alpha=3", "fedals:alpha=2+scaffold", "fedals:periods=first:2;head:3+fedavgm"]
CASES = [(chosen, engine) for chosen in SUMS for engine in ("processes", "vectorized")]


@pytest.mark.parametrize(("chosen", "engine"), slow_but([(SUMS[1], "processes"), (SUMS[2], "vectorized")], CASES))
def test_engines_agree_with_momentum_and_partial_participation(chosen, engine):
    options = {"momentum": 0.9, "participation": 0.7, "batch_size": 7}
    assert_engines_agree(run(chosen, engine, **options).vector, run(chosen, **options).vector)


IDENTITIES = [(engine, momentum) for engine in ("inline", "vectorized") for momentum in (0.0, 0.9)]


@pytest.mark.parametrize(("engine", "momentum"), slow_but([("inline", 0.9)], IDENTITIES))
def test_alpha_1_or_no_body_is_fedavg_and_all_body_is_fedavg_with_a_longer_round(engine, momentum):
    """With momentum, FedAvg whose clients keep theirs: that is what alpha = 1 is, tested by hand above."""
    one, none = run("fedals:alpha=1", engine, momentum=momentum), run("fedals:split=0", engine, momentum=momentum)
    assert torch.equal(one.vector, none.vector)
    if not momentum:
        assert_close(one.vector, run("fedavg", engine).vector, TRAINING)
    whole = run("fedals:alpha=3,split=2", engine, rounds=6, momentum=momentum)
    longer = run("fedals:alpha=1", engine, rounds=2, local_steps=9, momentum=momentum)
    assert_close(whole.vector, longer.vector, TRAINING)


def test_zero_variates_change_nothing_and_variates_take_effect_with_their_part():
    """One client alone has c = c_k, so the correction is always zero."""
    for chosen in ("scaffold", "scaffold:variate=difference"):
        alone = [
            unskew.run(blobs([9]), model=Net, method=m, rounds=5, lr=0.1, precision="fp64", engine="inline", seed=3)
            for m in ("fedals:alpha=2", f"fedals:alpha=2+{chosen}")
        ]
        assert_close(alone[0].vector, alone[1].vector, TRAINING)


def scaffold_by_hand(alpha, rounds, tau=3, lr=0.1):
    """Algorithm 3 in the standard form, part by part, with plain SGD and full batches."""
    fed = blobs(SIZES)
    torch.manual_seed(2)
    spec = ModelSpec(Net(), (2, 6, 6), 3, dtype=torch.float64)
    v0, b0 = spec.flatten(), spec.flatten_buffers()
    head = torch.zeros(spec.size, dtype=torch.bool)
    for piece in spec.parts["head"]:
        head[piece] = True
    n = len(SIZES)
    theta, buffers = [v0.clone() for _ in range(n)], [spec.buffers(b0.clone()) for _ in range(n)]
    c, c_k, snap = torch.zeros_like(v0), [torch.zeros_like(v0) for _ in range(n)], [v0.clone() for _ in range(n)]
    for step in range(1, rounds * tau + 1):
        for k, client in enumerate(fed.clients):
            v = theta[k].clone().requires_grad_()
            logits = spec.forward(v, buffers[k], client.x.double(), train=True).logits
            (g,) = torch.autograd.grad(nn.functional.cross_entropy(logits, client.y), v)
            theta[k] = theta[k] - lr * (g - c_k[k] + c)
        for part, period in ((head, tau), (~head, alpha * tau)):
            if step % period == 0:
                new = [torch.where(part, c_k[k] - c + (snap[k] - theta[k]) / (lr * period), c_k[k]) for k in range(n)]
                mean = sum(theta) / n
                c = torch.where(part, sum(new) / n, c)
                c_k = new
                theta = [torch.where(part, mean, t) for t in theta]
                snap = [torch.where(part, mean, s) for s in snap]
        if step % (alpha * tau) == 0:
            average = {name: sum(b[name] for b in buffers) / n for name in buffers[0]}
            buffers = [{name: t.clone() for name, t in average.items()} for _ in range(n)]
    return sum(theta) / n


@pytest.mark.parametrize("variate", ["auto", "difference", "mean"])
def test_scaffold_has_variates_per_part_and_period(variate):
    mine = run(f"fedals:alpha=2+scaffold:variate={variate}", rounds=5).vector
    assert_close(mine, scaffold_by_hand(2, 5), MAGNIFIED)


def test_a_server_rule_moves_only_what_was_sent():
    """FedAvgM's momentum of the body must not push on in rounds without the body."""
    four, five = (run("fedals:alpha=4+fedavgm:beta=0.9", rounds=r) for r in (4, 5))
    body = slice(0, 72 * 6 + 6)
    spec = ModelSpec(Net(), (2, 6, 6), 3)
    assert spec.names[:2] == ["first.weight", "first.bias"]
    # A client's next steps move its body by about lr times a gradient; beta = 0.9 would push by the whole last update.
    moved = (five.vector - four.vector)[body].norm()
    plain = (run("fedals:alpha=4", rounds=5).vector - run("fedals:alpha=4", rounds=4).vector)[body].norm()
    torch.testing.assert_close(moved, plain, rtol=0.2, atol=0)


@pytest.mark.parametrize("alpha", slow_but([10], [1, 5, 10, 25, 50, 100]))
def test_traffic_is_the_formula_to_the_last_parameter(alpha):
    """``2 (T/tau) |h| + 2 (T/(alpha tau)) |phi|`` a client; the first round begins with a model that all know."""
    rounds = 100
    result = unskew.run(
        blobs([5, 5]), model=Net, method=f"fedals:alpha={alpha}", rounds=rounds, local_steps=1, engine="inline",
        eval_every=rounds, eval_clients=0,
    )  # fmt: skip
    spec = ModelSpec(Net(), (2, 6, 6), 3)
    groups = layer_groups(spec)
    body, head = sum(g.size for g in groups[:-1]), groups[-1].size
    statistics = 12
    scalars = rounds * head + rounds // alpha * body
    s = result.summary
    assert s["bytes_up"] - s["buffer_bytes_up"] == 2 * 4 * scalars
    assert s["buffer_bytes_up"] == 2 * 4 * statistics * (rounds // alpha)
    assert s["bytes_down"] - s["buffer_bytes_down"] == 2 * 4 * scalars


def test_resnet20_has_the_papers_table_of_traffic():
    spec = ModelSpec(build_model("resnet20", (3, 32, 32), 10), (3, 32, 32), 10)
    rule = method("fedals:alpha=10").sync
    _, up = rule.exchanged_slices({}, 0, 0, None, spec)
    assert sum(p.stop - p.start for p in up) == 650
    _, up = rule.exchanged_slices({}, 9, 0, 8, spec)
    assert sum(p.stop - p.start for p in up) == 292_954


def test_periods_by_pattern():
    spec = ModelSpec(build_model("resnet20", (3, 32, 32), 10), (3, 32, 32), 10)
    rule = method("fedals:periods=body:10;*stem*:20;body.block9*:5").sync
    periods = rule.periods_of(spec)
    assert periods == [20, *[10] * 16, 5, 5, 1]
    assert unskew.methods.fedals.fedals.FedALS(periods={"body": 4}).periods_of(spec) == [*[4] * 19, 1]
    with pytest.raises(ConfigError, match="matches no layer"):
        method("fedals:periods=stam:3").sync.periods_of(spec)
    with pytest.raises(ConfigError, match="20 layers"):
        method("fedals:split=21").sync.periods_of(spec)
    for wrong in ("fedals:alpha=0", "fedals:periods=body", "fedals:periods=body:0"):
        with pytest.raises(ConfigError):
            method(wrong)


def test_a_newcomer_downloads_what_it_missed():
    """Down: the body only if it was averaged since the client last took part."""
    spec = ModelSpec(Net(), (2, 6, 6), 3)
    rule = method("fedals:alpha=4").sync
    whole = (slice(0, spec.size),)
    head = tuple(spec.parts["head"])
    assert rule.exchanged_slices({}, 5, 0, None, spec)[0] == whole
    assert rule.exchanged_slices({}, 5, 0, 4, spec)[0] == head
    assert (
        rule.exchanged_slices({}, 5, 0, 3, spec)[0] == whole
    )  # it took part in the round after which the body was averaged
    assert rule.exchanged_slices({}, 3, 0, 0, spec)[0] == head
    assert rule.exchanged_slices({}, 9, 0, 2, spec)[0] == whole


def test_an_interrupted_run_goes_on_with_bodies_momentum_and_mean(tmp_path):
    options = {"momentum": 0.9, "batch_size": 7, "checkpoint_every": 1}
    whole = run("fedals:alpha=4+scaffold", rounds=6, **options)
    run("fedals:alpha=4+scaffold", rounds=3, out=tmp_path / "a", **options)
    torch.manual_seed(2)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=Net(), rounds=6)
    assert torch.equal(rest.vector, whole.vector)
    assert [r["accuracy"] for r in rest.history] == [r["accuracy"] for r in whole.history]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], value)


def test_the_consensus_distance_of_each_layer_is_that_before_averaging():
    """After one round of alpha = 2 the bodies are still apart; by hand from the store's models."""
    result = run("fedals:alpha=2", rounds=1, diagnose="consensus", momentum=0.9)
    names = [n for n in result.history[0] if n.startswith("consensus/")]
    assert names == ["consensus/first", "consensus/head"]
    assert [result.history[0][name] for name in ("fedals_averaged", "fedals_periods")] == [[2], [2, 1]]
    fed = blobs(SIZES)
    torch.manual_seed(2)
    start = Net().double()
    found = []
    for client in fed.clients:
        net = copy.deepcopy(start).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(client.x.double()), client.y).backward()
            optimizer.step()
        found.append(net)
    for name, layers in (("consensus/first", ("first", "norm")), ("consensus/head", ("head",))):
        values = torch.stack(
            [
                torch.cat([p.detach().flatten() for n, p in net.named_parameters() if n.split(".")[0] in layers])
                for net in found
            ]
        )
        expected = (values - values.mean(0)).square().sum(1).mean()
        assert result.history[0][name] == near(float(expected), TRAINING)
    assert result.summary["consensus/head"] == result.history[0]["consensus/head"]


def brute_force(sizes, rates, budget, longest):
    """The least distance over all whole periods, and the distance of each within the budget."""
    fitting = {
        periods: sum(r * p for r, p in zip(rates, periods, strict=True))
        for periods in itertools.product(range(1, longest + 1), repeat=len(sizes))
        if sum(s * math.ceil(longest / p) for s, p in zip(sizes, periods, strict=True)) <= budget * sum(sizes) * longest
    }
    return min(fitting.values()), fitting


PROBLEMS = [
    ([47, 443, 383, 468], [1.2831, 0.0245, 19.738, 2.8426], 0.4554, 6),
    *(([100, 30, 5], [0.2, 1.0, 4.0], budget, 12) for budget in (0.15, 0.3, 0.6)),
    ([300, 200, 200], [1e-3, 50.0, 0.7], 0.35, 7),
]


@pytest.mark.parametrize(("sizes", "rates", "budget", "longest"), PROBLEMS)
def test_auto_periods_are_the_best_within_the_budget(monkeypatch, sizes, rates, budget, longest):
    """Against all whole periods; and if there are too many to compare, no change of one or two of them is better."""
    best, fitting = brute_force(sizes, rates, budget, longest)
    given = torch.tensor(sizes).double(), torch.tensor(rates).double(), budget, longest
    assert fitting[tuple(best_periods(*given).int().tolist())] == pytest.approx(best)
    monkeypatch.setattr("unskew.methods.fedals.auto.EXHAUSTIVE", 0)
    found = tuple(best_periods(*given).int().tolist())
    near_by = [p for p in fitting if sum(mine != its for mine, its in zip(found, p, strict=True)) <= 2]
    assert fitting[found] == pytest.approx(min(fitting[p] for p in near_by))


@pytest.mark.parametrize("engine", slow_but(["vectorized"], ["inline", "vectorized"]))
def test_auto_measures_the_drift_keeps_the_budget_and_resumes(tmp_path, engine):
    chosen = "fedals:auto,alpha=3,longest=6,budget=0.4"
    options = {"momentum": 0.9, "participation": 0.7, "batch_size": 7, "checkpoint_every": 1}
    whole = run(chosen, engine, rounds=15, **options)
    run(chosen, engine, rounds=8, out=tmp_path / "a", **options)
    torch.manual_seed(2)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=Net(), rounds=15)
    assert torch.equal(rest.vector, whole.vector)
    # All parameters cost 471 a client; two numbers (one per layer) come beside.
    up = [row["bytes_up"] for row in whole.history]
    clients = whole.history[0]["updates"]
    epoch = (up[11] - up[5]) / (8 * clients) - 6 * 2
    statistics = 12 * 6  # at most: those of the body in every round
    assert epoch <= 0.4 * 6 * 471 + statistics
    first = up[5] / (8 * clients) - 6 * 2
    assert first == 6 * 21 + 2 * (450 + 12)  # alpha = 3: the head six times, the body with its statistics twice


def test_the_drift_that_auto_sees_is_the_consensus_distance():
    """The head is averaged in every round, the body in the third; a layer grows by its distance over its rounds."""
    auto = method("fedals:auto,alpha=3,longest=6,budget=0.4").sync
    grown = [(0.0, 0.0)]

    class Watched(type(auto)):
        name = "watched"

        def server_update(self, state, updates):
            after = super().server_update(state, updates)
            grown.append(after["growth"].tolist())
            return after

    watched = Watched(auto.first, auto.budget, auto.longest)
    result = run(watched, rounds=3, diagnose="consensus", client_weighting="uniform", base_run=True)
    for t, row in enumerate(result.history):
        body, head = (after - before for after, before in zip(grown[t + 1], grown[t], strict=True))
        assert head == near(row["consensus/head"], TRAINING)
        assert body == (near(row["consensus/first"] / 3, TRAINING) if t == 2 else 0.0)


def test_a_budget_below_one_average_an_epoch_is_refused():
    with pytest.raises(ConfigError, match="Increase one of them"):
        method("fedals:auto,budget=0.01,longest=50")
    assert method("fedals:auto").sync.longest == 50


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("fedals:alpha=10", "never averages first: their period is 10 rounds"),
        ("fedals:alpha=10", "Set rounds to at least 10, or fedals:alpha to at most 3"),
        ("fedals:alpha=10,split=2", "never averages first, head: their period is 10 rounds"),
    ],
)
def test_a_run_too_short_to_average_everything_says_so(chosen, words):
    with pytest.warns(UserWarning, match=words) as told:
        run(chosen, rounds=3)
    assert len(told) == 1


@pytest.mark.parametrize("option", ["budget=0.3", "longest=20"])
def test_options_of_auto_are_refused_without_it(option):
    with pytest.raises(ConfigError, match=f"{option} needs auto. Use fedals:auto,{option}"):
        method(f"fedals:{option}")


def test_a_part_of_a_layers_name_is_told_how_to_be_a_pattern():
    spec = ModelSpec(build_model("resnet20", (3, 32, 32), 10), (3, 32, 32), 10)
    with pytest.raises(ConfigError, match=r"use '\*stem\*'"):
        method("fedals:periods=stem:2").sync.periods_of(spec)
