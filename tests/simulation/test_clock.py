"""Virtual clock: simulated seconds against an event simulation by hand, deadlines, resuming, engines and errors."""

import math

import numpy as np
import pytest
import torch
from support.federations import blobs

import unskew
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.simulation.checkpoint import read_manifest
from unskew.simulation.checkpoint_manifest import check_manifest
from unskew.simulation.clock import draw_speeds
from unskew.simulation.run_warnings import late_updates_warning
from unskew.testing import assert_engines_agree

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES = [9, 14, 11, 8, 12]
STEPS = 3
# uplink, downlink (bytes/s), latency, seconds per step
SPEEDS = [
    (1000.0, 5000.0, 0.05, 0.010),
    (4000.0, 9000.0, 0.01, 0.200),
    (500.0, 2000.0, 0.30, 0.030),
    (2500.0, math.inf, 0.00, 0.000),
    (800.0, 700.0, 0.02, 0.500),
]
DISCARD = "fedavg:discard_late=true"


@pytest.fixture
def trace(tmp_path):
    lines = [",".join(map(str, (client, *speeds))) for client, speeds in enumerate(SPEEDS)]
    path = tmp_path / "speeds.csv"
    path.write_text("\n".join(["client,uplink,downlink,latency,compute", *lines]) + "\n")
    return path


def train(network=None, method="fedavg", rounds=6, engine="inline", **options):
    values = {"lr": 0.05, "batch_size": 4, "local_steps": STEPS, "precision": "fp64", "model": "logistic", **options}
    network = {} if network is None else network
    return unskew.run(blobs(SIZES), method=method, rounds=rounds, engine=engine, network=network, **values)


def durations(size):
    """Seconds of one round of each client that sends and receives ``size`` bytes."""
    return [2 * wait + size / up + size / down + STEPS * step for up, down, wait, step in SPEEDS]


def by_hand(size, rounds, deadline, late_counts):
    """Event simulation with full participation: end of each round, numbers of arrivals, and of lost updates."""
    now, flying, rows = 0.0, {}, []
    for t in range(rounds):
        for client, seconds in enumerate(durations(size)):
            if client not in flying:
                flying[client] = (now + seconds, t)
        end = min(now + deadline, max(time for time, _ in flying.values()))
        arrived = {client: t - origin_round for client, (time, origin_round) in flying.items() if time <= end}
        late = len(flying) - len(arrived)
        flying = {client: event for client, event in flying.items() if client not in arrived and late_counts}
        now = end
        rows.append((now, len(arrived), sum(arrived.values()), late))
    return rows


@pytest.mark.parametrize("deadline", [None, 2.0, 1.5, 1000.0])
@pytest.mark.parametrize("method", [DISCARD, "scaffold", "fedbuff:buffer_size=2", "fedasync"])
def test_the_clock_equals_an_event_simulation_by_hand(trace, method, deadline):
    network = {"trace": str(trace), **({} if deadline is None else {"deadline": f"{deadline}s"})}
    result = train(network, method)
    size = result.summary["bytes_down"] // (sum(row["cohort"] for row in result.history))
    assert size == 8 * len(result.vector) * (2 if method == "scaffold" else 1)
    accepts = method != DISCARD
    expected = by_hand(size, 6, math.inf if deadline is None else deadline, accepts)
    found = [row["seconds_simulated"] for row in result.history]
    assert found == pytest.approx([now for now, *_ in expected], rel=1e-12)
    assert [row["updates"] for row in result.history] == [count for _, count, _, _ in expected]
    if deadline is not None and accepts:
        ages = [row["staleness"] and row["staleness"] * row["arrivals"] for row in result.history]
        assert [age or 0 for age in ages] == pytest.approx([age for _, _, age, _ in expected])
        assert [row["in_flight"] for row in result.history] == [late for *_, late in expected]
    elif deadline is not None:
        assert [row["late"] for row in result.history] == [late for *_, late in expected]
    if deadline in (2.0, 1.5):
        assert expected[0][3] > 0


@pytest.mark.parametrize("method", ["fedavg", DISCARD, "fedbuff:buffer_size=2", "fedals:split=1,alpha=2"])
def test_a_clock_that_delays_nothing_changes_no_number(trace, method):
    plain = train(method=method)
    for network in ({"uplink": "inf"}, {"trace": str(trace), "deadline": "1h"}):
        timed = train(network, method)
        assert torch.equal(timed.vector, plain.vector)
        extra = {"seconds_simulated", "late", "arrivals", "in_flight", "staleness", "staleness_counts"}
        measured = {"seconds", "setup_seconds", "train_seconds"}
        for before, after in zip(plain.history, timed.history, strict=True):
            assert {k: v for k, v in after.items() if k not in extra | measured} == {
                k: v for k, v in before.items() if k not in measured
            }
    assert train({"uplink": "inf"}, method).summary["seconds_simulated"] == 0
    assert not [name for name in (*plain.summary, *plain.history[0]) if "simulated" in name]


def test_a_client_that_drops_out_does_not_prolong_the_round(trace):
    network = {"trace": str(trace), "drop": 0.5}
    result = train(network, rounds=8, seed=3)
    seconds = durations(8 * len(result.vector))
    steps = np.diff([0.0, *(row["seconds_simulated"] for row in result.history)])
    assert {round(step, 9) for step in steps} <= {0.0, *(round(step, 9) for step in seconds)}
    assert min(steps) < max(seconds)


def test_transfers_before_and_after_training_take_time(trace):
    plain = train({"trace": str(trace)}, rounds=1)
    balanced = train({"trace": str(trace)}, rounds=1, class_weights="balanced")
    up = (balanced.summary["bytes_up"] - plain.summary["bytes_up"]) / 5
    down = (balanced.summary["bytes_down"] - plain.summary["bytes_down"]) / 5
    first = max(2 * wait + up / uplink + down / downlink for uplink, downlink, wait, _ in SPEEDS)
    assert balanced.history[0]["seconds_simulated"] == pytest.approx(first + max(durations(8 * len(plain.vector))))
    surveyed = train({"trace": str(trace)}, "fedavg+ccvr", rounds=1)
    up = surveyed.summary["bytes_up"] / 5 - 8 * len(plain.vector)
    last = max(2 * wait + up / uplink + 8 * len(plain.vector) / downlink for uplink, downlink, wait, _ in SPEEDS)
    assert surveyed.history[0]["seconds_simulated"] == plain.history[0]["seconds_simulated"]
    assert surveyed.summary["seconds_simulated"] - surveyed.history[0]["seconds_simulated"] == pytest.approx(last)


@pytest.mark.parametrize("method", [DISCARD, "fedbuff:buffer_size=2"])
def test_a_resumed_run_equals_an_uninterrupted_one(trace, tmp_path, method):
    network = {"trace": str(trace), "deadline": "1.5s"}
    complete = train(network, method, rounds=7)
    train(network, method, rounds=4, out=tmp_path / "a", checkpoint_every=1)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), rounds=7)
    assert torch.equal(rest.vector, complete.vector)
    names = ("seconds_simulated", "updates", "bytes_up", "accuracy")
    assert [[r[n] for n in names] for r in rest.history] == [[r[n] for n in names] for r in complete.history]
    trace.write_text(trace.read_text().replace("0.2\n", "0.3\n"))
    with pytest.raises(CheckpointError, match="speeds has changed"):
        unskew.resume(tmp_path / "a", federation=blobs(SIZES), rounds=9)


def test_a_clock_that_does_not_fit_the_updates_in_flight_is_refused(trace, tmp_path):
    train({"trace": str(trace), "deadline": "1.5s"}, "fedasync", rounds=3, out=tmp_path / "a", checkpoint_every=3)
    manifest = read_manifest(tmp_path / "a" / "checkpoints" / "0000003")
    assert manifest["clock"]["arrivals"]
    with pytest.raises(ValueError, match="arrivals are not those"):
        check_manifest({**manifest, "clock": {"now": 1.0, "arrivals": {}}})


def test_a_run_that_starts_from_another_one_loses_its_updates_in_flight_with_a_warning(trace, tmp_path):
    network = {"trace": str(trace), "deadline": "1.5s"}
    train(network, "fedasync", rounds=3, out=tmp_path / "a", checkpoint_every=3)
    flying = len(read_manifest(tmp_path / "a" / "checkpoints" / "0000003")["in_flight"])
    with pytest.warns(UserWarning, match=f"^{flying} updates that were in flight .* are lost"):
        train(network, "fedasync", rounds=4, start_from=str(tmp_path / "a"))


def test_a_run_that_starts_from_another_one_continues_its_clock(trace, tmp_path):
    network = {"trace": str(trace)}
    first = train(network, rounds=2, out=tmp_path / "a")
    second = train(network, rounds=4, start_from=str(tmp_path / "a"))
    assert second.history[1] == first.history[1]
    assert second.history[3]["seconds_simulated"] == pytest.approx(2 * first.history[1]["seconds_simulated"])


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
@pytest.mark.parametrize("method", [DISCARD, "fedasync"])
def test_engines_have_the_same_clock(method, engine):
    network = {"uplink": "lognormal:median=4kB/s,sigma=1", "latency": "uniform:low=10ms,high=1s", "deadline": "1.2s"}
    reference, other = train(network, method, rounds=4), train(network, method, rounds=4, engine=engine)
    assert_engines_agree(other.vector, reference.vector)
    for name in ("seconds_simulated", "updates", "bytes_up"):
        assert [row[name] for row in other.history] == [row[name] for row in reference.history]


def test_drawn_speeds_have_their_distribution_and_depend_on_the_client_alone():
    fields = {
        "uplink": "lognormal:median=5MB/s,sigma=0.5",
        "downlink": "uniform:low=1MB/s,high=10MB/s",
        "latency": "50ms",
        "compute": None,
    }
    speeds = draw_speeds(fields, 20_000, 7)
    assert np.array_equal(draw_speeds(fields, 100, 7), speeds[:100])
    assert not np.array_equal(draw_speeds(fields, 100, 8), speeds[:100])
    logs = np.log(speeds[:, 0] / 5e6)
    assert abs(logs.mean()) < 5 * 0.5 / np.sqrt(20_000)
    assert logs.std() == pytest.approx(0.5, rel=0.03)
    assert 1e6 <= speeds[:, 1].min() < 1.01e6 < 9.99e6 < speeds[:, 1].max() <= 1e7
    assert speeds[:, 1].mean() == pytest.approx(5.5e6, rel=0.02)
    assert (speeds[:, 2] == 0.05).all()
    assert (speeds[:, 3] == 0).all()
    assert abs(np.corrcoef(speeds[:, 0], speeds[:, 1])[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"uplink": "5mb"}, "unit: B/s"),
        ({"uplink": "-5MB/s"}, "positive number"),
        ({"uplink": 0}, "positive number"),
        ({"latency": "5MB/s"}, "unit: s, ms"),
        ({"compute": "-1ms"}, "nonnegative number"),
        ({"compute": "nan"}, "nonnegative number"),
        ({"latency": "inf"}, "nonnegative number"),
        ({"uplink": "normal:median=1MB/s,sigma=1"}, "no distribution 'normal'"),
        ({"uplink": "lognormal:median=1MB/s"}, "median and sigma"),
        ({"uplink": "lognormal:median=1MB/s,sigma=1s"}, "0 <= sigma"),
        ({"uplink": "uniform:low=2MB/s,high=1MB/s"}, "low <= high"),
        ({"uplink": "uniform:low=1MB/s,high=2MB/s,step=1"}, "low and high"),
        ({"uplinks": "5MB/s"}, "Did you mean 'network.uplink'"),
        ({"uplink": "5MB/s", "deadline": "0s"}, "positive number"),
        ({"deadline": "60s"}, "needs the speed"),
        ({"uplink": "5MB/s", "delay": "fixed:1"}, "two sources of delays"),
        ({"uplink": "5MB/s", "trace": "speeds.csv"}, "trace replaces"),
    ],
)
def test_invalid_networks_are_refused(network, words):
    with pytest.raises(ConfigError, match=words):
        train(network)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("4,800.0", "7,800.0", "no row for client 4"),
        ("4,800.0", "3,800.0", "has another row"),
        ("4,800.0", "x,800.0", "a client is a number"),
        ("4,800.0", "4,-800.0", "line 6: network.uplink='-800.0'"),
        ("latency", "delay", "no column 'latency'"),
        ("4,800.0,700.0,0.02,0.5", "4,800.0", "network.downlink=''"),
    ],
)
def test_invalid_traces_are_refused(trace, old, new, words):
    text = trace.read_text()
    assert old in text
    trace.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=words):
        train({"trace": str(trace)})
    with pytest.raises(DataError, match="cannot be read"):
        train({"trace": str(trace.with_name("none.csv"))})


@pytest.mark.filterwarnings("ignore:The model did not change")
def test_lost_updates_are_reported_and_diagnostics_of_one_round_accept_them(trace):
    with pytest.warns(UserWarning, match="missed network.deadline"):
        train({"trace": str(trace), "deadline": "0.5s"}, "fedals:alpha=1,split=1", rounds=3)
    assert late_updates_warning([{"late": 1, "updates": 1, "skipped": 0}]) is None
    assert late_updates_warning([{"updates": 0, "skipped": 0}]) is None
    assert "2 of 3 updates arrived in a later round" in late_updates_warning(
        [{"discarded": 2, "updates": 1, "skipped": 0}]
    )
    train({"trace": str(trace), "deadline": "1.5s"}, DISCARD, diagnose="consensus")
    with pytest.raises(ConfigError, match=r"network\.deadline"):
        train({"trace": str(trace), "deadline": "1.5s"}, diagnose="consensus")
