"""Oort: scores by hand, exploration in its limits, its reports, and resumed runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.federations import blobs

import unskew
from unskew.comparison.references import reference_config
from unskew.errors import ConfigError
from unskew.protocol.client_sampler import ClientReport
from unskew.protocol.round_plan import RoundPlan, cohort_size
from unskew.simulation.sampler import Sampler
from unskew.simulation.samplers.oort import Oort

EXACT = 1e-12
WARNING = "ignore:With oort"
SIZES = [6, 30, 12, 24, 9, 18, 15, 21]


def sampler_of(clients, participation, **options):
    plan = RoundPlan(clients=clients, participation=participation, cohort=cohort_size(clients, participation))
    return Sampler(clients, participation, 0, Oort(**options), SimpleNamespace(clients=clients, plan=plan))


def reports(losses, n=10, seconds=None):
    times = seconds or dict.fromkeys(losses)
    return [ClientReport(k, n, loss, 3, times[k], True) for k, loss in losses.items()]


def run(sampling="oort", **options):
    settings = {
        "model": "logistic",
        "rounds": 6,
        "participation": 0.25,
        "local_steps": 2,
        "lr": 0.1,
        "engine": "inline",
    }
    return unskew.run(blobs(SIZES), sampling=sampling, **(settings | options))


def test_the_score_is_the_one_by_hand():
    rule = Oort(alpha=2, clip=0.5, percentile=50)
    state = rule.init(SimpleNamespace(clients=5))
    state = rule.record(state, 0, reports({0: 1.0, 1: 2.0}, seconds={0: 1.0, 1: 4.0}))
    state = rule.record(state, 1, reports({2: 5.0}, seconds={2: 2.0}))
    # Utilities 10, 20, 50: clipped at their median 20. Times 1, 4, 2: the median 2 is preferred.
    bonus = [math.sqrt(0.1 * math.log(3) / t) for t in (1, 1, 2)]
    expected = [bonus[0], (0.25 + bonus[1]) * (2 / 4) ** 2, 0.25 + bonus[2], 0, 0]
    assert np.abs(rule.scores(state, 2) - expected).max() < EXACT
    without = rule.scores({**state, "percentile": torch.tensor(100.0)}, 2)
    assert np.abs(without - [bonus[0], 0.25 + bonus[1], 0.25 + bonus[2], 0, 0]).max() < EXACT


def test_with_an_explored_share_of_1_every_client_is_drawn_once_before_any_is_drawn_twice():
    sampler = sampler_of(10, 0.3, explore=1, decay=1)
    seen = []
    for t in range(4):
        cohort = sampler.draw(t)
        assert len(cohort) == 3
        seen += cohort
        sampler.reports = {r.client: r for r in reports(dict.fromkeys(cohort, 1.0))}
        sampler.record(t)
    assert len({*seen[:9]}) == 9
    assert {*seen} == {*range(10)}


def test_with_an_explored_share_of_0_only_known_clients_with_the_best_scores_are_drawn():
    sampler = sampler_of(10, 0.2, explore=0, least=0, cutoff=1)
    sampler.reports = {r.client: r for r in reports({k: float(k) for k in range(6)})}
    sampler.record(0)
    assert [sampler.draw(t) for t in range(1, 5)] == [[4, 5]] * 4
    sampler.reports = {r.client: r for r in reports({2: 90.0, 3: 80.0})}
    sampler.record(1)
    assert sampler.draw(2, in_flight=[3])[0] == 2
    assert sampler.draw(2, in_flight=range(9)) == [9]  # fresh clients fill a cohort of too few known ones


def test_the_explored_share_decays_to_its_smallest_value():
    shares = []
    for t in (0, 3, 50):
        sampler = sampler_of(100, 0.1, explore=0.8, decay=0.9, least=0.2)
        sampler.reports = {r.client: r for r in reports({k: 1.0 + k for k in range(50)})}
        sampler.record(0)
        cohorts = [sampler.sampler.draw(sampler.state, t, np.arange(100), sampler.plan, draws(n)) for n in range(400)]
        shares.append(np.mean([(cohort >= 50).mean() for cohort in cohorts]))
    # The rounded number has a standard deviation of at most 0.5 of 10 clients.
    assert np.abs(np.array(shares) - [0.8, 0.8 * 0.9**3, 0.2]).max() < 5 * 0.05 / math.sqrt(400)


def draws(number):
    generator = np.random.default_rng(number)
    return SimpleNamespace(generator=generator, uniform=generator.random)


@pytest.mark.parametrize(
    ("later", "first", "last"),
    [
        (1.0, 30, 37),
        (1.09, 30, 37),
        (0.91, 30, 37),
        (1.2, 30, 30),
        (0.8, 30, 30),
        (5.9, 30, 30),
        (6.1, 30, 23),
        (9.0, 8, 7),
    ],
)
def test_the_percentile_of_times_rises_if_the_utility_stays_and_falls_if_it_changes_much(later, first, last):
    rule = Oort(window=2, pace=7, percentile=first)
    state = rule.init(SimpleNamespace(clients=1))
    # The first round has no known client, so its utility counts as 0, and that of rounds 0 and 1 is half of 2 and 3.
    for t, loss in enumerate([1.0, 1.0, 1.0, 1.0, later]):
        state = rule.record(state, t, reports({0: loss}))
        assert float(state["percentile"]) == first
    state = rule.record(state, 5, reports({0: later}))
    assert float(state["percentile"]) == last


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_engines_draw_the_same_cohorts(engine):
    assert float((run(engine=engine).vector - run().vector).abs().max()) < 1e-5


@pytest.mark.filterwarnings(WARNING)
def test_a_resumed_run_draws_the_same_clients(tmp_path):
    network = {"compute": "lognormal:median=1s,sigma=1"}
    whole = run(network=network, precision="fp64")
    run(network=network, precision="fp64", rounds=3, out=tmp_path / "run")
    resumed = run(network=network, precision="fp64", out=tmp_path / "run", resume=True)
    assert torch.equal(whole.vector, resumed.vector)
    assert not torch.equal(whole.vector, run("fixed", network=network, precision="fp64").vector)


@pytest.mark.filterwarnings(WARNING)
def test_slow_clients_are_not_drawn_again_if_enough_are_fast(tmp_path):
    rows = [f"{k},inf,inf,0,{1 if k % 2 else 50}" for k in range(8)]
    (tmp_path / "speeds.csv").write_text("\n".join(["client,uplink,downlink,latency,compute", *rows]))
    options = {"rounds": 20, "network": {"trace": str(tmp_path / "speeds.csv")}}
    result = run("oort:explore=1,decay=1,cutoff=1", **options)
    ends = np.array([row["seconds_simulated"] for row in result.history])
    # Two local steps each; four rounds in which clients take part for the first time, then fast ones alone.
    assert list(np.diff(ends)[3:]) == [2.0] * 16


def test_lost_clients_get_the_mean_utility_and_their_time():
    rule = Oort()
    state = rule.init(SimpleNamespace(clients=5))
    lost = ClientReport(2, seconds=9.0, lost=True)
    in_flight = ClientReport(3, seconds=8.0)
    state = rule.record(state, 4, [*reports({0: 1.0, 1: 3.0}), lost, in_flight])
    assert state["utility"].tolist() == [10, 30, 20, 0, 0]
    assert state["last"].tolist() == [5, 5, 5, 0, 0]
    assert state["seconds"][2] == 9
    state = rule.record(state, 5, [lost])
    assert state["utility"][2] == 0  # no update arrived in this round


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.filterwarnings("ignore:.*deadline")
def test_clients_that_always_miss_the_deadline_are_drawn_less_than_uniformly(tmp_path, monkeypatch):
    cohorts = []
    draw = Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda *args: cohorts.append(draw(*args)) or cohorts[-1])
    rows = [f"{k},inf,inf,0,{1 if k % 4 else 50}" for k in range(20)]
    (tmp_path / "speeds.csv").write_text("\n".join(["client,uplink,downlink,latency,compute", *rows]))
    options = {"rounds": 40, "network": {"trace": str(tmp_path / "speeds.csv"), "deadline": 10}}
    fed = blobs([9] * 20)
    settings = {"model": "logistic", "participation": 0.25, "local_steps": 2, "lr": 0.1, "engine": "inline"}
    unskew.run(fed, method="fedavg:discard_late=true", sampling="oort", **settings, **options)
    slow = [k % 4 == 0 for cohort in cohorts[20:] for k in cohort]
    assert len(slow) == 100
    assert np.mean(slow) < 0.25 / 2  # uniform draws have 0.25


class Recording(Oort):
    """Keeps the reports."""

    def record(self, state, round, reports):
        SEEN.append(reports)
        return super().record(state, round, reports)


SEEN: list = []


@pytest.mark.filterwarnings(WARNING)
def test_reports_are_what_the_server_receives(monkeypatch):
    monkeypatch.setitem(unskew.simulation.samplers.registry.SAMPLERS, "oort", f"{__name__}:Recording")
    SEEN.clear()
    result = run(rounds=1, participation=1.0, network={"compute": "2s", "latency": "1s", "uplink": "1kB/s"})
    size = 4 * result.vector.numel()
    (first,) = SEEN
    assert [report.num_samples for report in first] == SIZES
    assert [(r.client, r.steps, r.arrived) for r in first] == [(k, 2, True) for k in range(8)]
    assert [r.seconds for r in first] == pytest.approx([1 + 2 * 2 + 1 + size / 1000] * 8)
    assert np.mean([r.loss for r in first]) == pytest.approx(result.history[0]["train_loss"])


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.filterwarnings("ignore:.*never arrived")
def test_late_updates_are_reported_when_they_arrive(monkeypatch):
    monkeypatch.setitem(unskew.simulation.samplers.registry.SAMPLERS, "oort", f"{__name__}:Recording")
    SEEN.clear()
    run(rounds=3, network={"delay": "fixed:1"})
    sent, late = SEEN[:2]
    assert [(r.loss, r.num_samples, r.seconds, r.arrived) for r in sent] == [(None, 0, None, False)] * 2
    assert not any(r.lost for r in [*sent, *late])
    arrived = {r.client for r in late if r.arrived}
    assert arrived == {r.client for r in sent}
    assert all(r.loss > 0 for r in late if r.arrived)


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.filterwarnings("ignore:.*deadline")
def test_updates_that_miss_the_deadline_are_reported_as_lost(monkeypatch):
    monkeypatch.setitem(unskew.simulation.samplers.registry.SAMPLERS, "oort", f"{__name__}:Recording")
    SEEN.clear()
    run(method="fedavg:discard_late=true", rounds=1, network={"compute": "2s", "deadline": "3s"})
    assert [(r.loss, r.seconds, r.arrived, r.lost) for r in SEEN[0]] == [(None, 4.0, False, True)] * 2
    SEEN.clear()
    run(rounds=1, network={"compute": "2s", "deadline": "3s"})
    assert [(r.arrived, r.lost) for r in SEEN[0]] == [(False, False)] * 2


@pytest.mark.parametrize("sampling", ["oort", "power-of-choice:8"])
def test_with_all_clients_the_sampling_has_no_effect(sampling):
    name = sampling.partition(":")[0]
    with pytest.warns(UserWarning, match=f"sampling={name} has no effect, because all clients take part") as caught:
        run(sampling, rounds=1, participation=1.0)
    assert not any("cohorts depend" in str(warning.message) for warning in caught)


def test_references_do_not_use_losses_and_times():
    fields = {"sampling": "oort:alpha=3", "network": {"compute": "1s"}}
    assert [reference_config(fields, name)["sampling"] for name in ("pooled", "local")] == ["fixed", "fixed"]
    assert reference_config({"sampling": "poisson"}, "local")["sampling"] == "poisson"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "oort:beta=1"}, "The sampling oort has no option 'beta'"),
        ({"sampling": "oort:alpha=1"}, "oort:alpha has no effect without simulated time"),
        ({"sampling": "oort:percentile=50"}, "oort:percentile has no effect without simulated time"),
        ({"sampling": "oort:pace=1"}, "oort:pace has no effect without simulated time"),
        ({"sampling": "oort:window=5"}, "oort:window has no effect without simulated time"),
        ({"sampling": "oort:explore=2"}, "sampling=oort:explore=2 is not valid"),
        ({"sampling": "oort:2,alpha=1"}, "twice, or an option without its name"),
        ({"sampling": "ort"}, "There is no sampling 'ort'. Did you mean 'oort'"),
        (
            {"sampling": "oort", "secure_aggregation": "required"},
            "losses and times of single clients, which secure_aggreg",
        ),
        (
            {"sampling": "oort", "method": "dp:epsilon=8,delta=0.1"},
            "losses and times of single clients, which dp does not",
        ),
    ],
)
def test_invalid_options_and_protected_runs_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        run(**options)


def test_updates_that_arrive_in_a_later_round_are_reported(tmp_path, monkeypatch):
    """Clients 3 to 5 always miss the deadline; nothing but their late updates tells that they take part."""
    rows = [f"{k},1GB/s,1GB/s,0,{0.01 if k < 3 else 0.25}" for k in range(6)]
    (tmp_path / "speeds.csv").write_text("\n".join(["client,uplink,downlink,latency,compute", *rows]))
    seen, record = [], Oort.record

    def noted(self, state, round, told):
        seen.extend((report.client, report.arrived) for report in told)
        return record(self, state, round, told)

    monkeypatch.setattr(Oort, "record", noted)
    result = unskew.run(
        blobs(SIZES[:6]),
        model="logistic",
        method="fedbuff:buffer_size=2",
        rounds=8,
        local_steps=2,
        participation=0.5,
        sampling="oort",
        network={"trace": str(tmp_path / "speeds.csv"), "deadline": "300ms"},
    )
    arrived = sum(row["arrivals"] for row in result.history)
    assert sum(arrival for _, arrival in seen) == arrived
    assert any(arrival for client, arrival in seen if client > 2)
