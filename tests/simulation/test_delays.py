"""Delays: when updates arrive, who may be drawn, what the server makes of it, and resuming with updates on their way."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.delays import Arrivals
from support.federations import SmallBatchNorm, blobs
from support.protocol import an_update, some_updates
from support.running import call
from support.slow import slow_but
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import CheckpointError, ConfigError, DataError
from unskew.protocol.updates import Updates
from unskew.runs import assembly
from unskew.simulation.broadcaster import Broadcaster
from unskew.simulation.checkpoint import read_manifest
from unskew.simulation.client_store import ClientStore
from unskew.simulation.delays import Delays
from unskew.simulation.network import Network
from unskew.simulation.update_buffer import UpdateBuffer, empty_updates
from unskew.testing import assert_engines_agree

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES = [9, 14, 11, 8, 12, 10]


def train(delay="none", method="fedavg", rounds=8, engine="inline", seed=0, **options):
    torch.manual_seed(0)
    network = {"delay": delay, **options.pop("network", {})}
    given = {"lr": 0.05, "batch_size": 8, "local_epochs": 1, "precision": "fp64", "participation": 0.5, **options}
    return unskew.run(
        blobs(SIZES), model=SmallBatchNorm(), method=method, rounds=rounds, engine=engine, network=network, seed=seed,
        **given,
    )  # fmt: skip


@pytest.mark.parametrize("method", slow_but(["scaffold", "fedadam"], ["fedavg", "scaffold", "fedadam", "moon"]))
def test_a_delay_of_zero_is_the_synchronous_run_bit_for_bit(method):
    whole, zero = train(method=method), train("fixed:0", method)
    assert torch.equal(whole.vector, zero.vector)
    assert [r["accuracy"] for r in whole.history] == [r["accuracy"] for r in zero.history]
    assert zero.history[0]["staleness_counts"] == {"0": 3}


@pytest.mark.parametrize("engine", slow_but(["vectorized"], ["processes", "vectorized"]))
def test_engines_agree(engine):
    options = {"method": "scaffold", "network": {"drop": 0.2}}
    reference, other = train("half-normal:2", **options), train("half-normal:2", engine=engine, **options)
    assert_engines_agree(other.vector, reference.vector)
    assert [r["in_flight"] for r in other.history] == [r["in_flight"] for r in reference.history]


def test_updates_are_added_to_the_model_of_their_arrival():
    """Logistic regression with full batches, by hand: each update is that of the model it was sent."""
    fed = blobs([6, 9])
    run = {"model": "logistic", "rounds": 5, "lr": 0.1, "batch_size": 100, "precision": "fp64", "engine": "inline"}
    result = unskew.run(fed, **run, local_epochs=2, network={"delay": "fixed:2"})
    torch.manual_seed(0)
    v = unskew.run(
        fed, **{**run, "rounds": 1}, local_epochs=2, network={"delay": "fixed:2"}
    ).vector  # nothing has arrived
    spec = unskew.ModelSpec(result.model, (2, 6, 6), 3, dtype=torch.float64)
    weights = torch.tensor([6.0, 9.0], dtype=torch.float64) / 15

    def delta(v, client):
        start, b = v.clone(), spec.flatten_buffers()
        for _ in range(2):
            p = v.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(spec.forward(p, b, client.x.double()).logits, client.y)
            v = v - 0.1 * torch.autograd.grad(loss, p)[0]
        return v - start

    # Both clients are sent out in rounds 0 and 3: a client on its way is not drawn.
    sent = sum(w * delta(v, c) for w, c in zip(weights, fed.clients, strict=True))
    assert_close(result.vector, v + sent, TRAINING)
    assert [r["arrivals"] for r in result.history] == [0, 0, 2, 0, 0]
    assert [r["cohort"] for r in result.history] == [2, 0, 0, 2, 0]
    assert result.history[2]["staleness"] == 2
    assert result.history[4]["in_flight"] == 2


def test_no_client_has_two_updates_on_their_way_and_arrivals_are_in_a_fixed_order(monkeypatch):
    spy = Arrivals(monkeypatch)
    train("half-normal:3", rounds=30)
    flying = {}
    for t in range(30):
        for client in spy.out[t]:
            assert client not in flying
            flying[client] = t
        assert spy.back[t] == sorted(spy.back[t])
        for origin_round, client in spy.back[t]:
            assert flying.pop(client) == origin_round
    assert any(len(back) > 1 and back[0][0] < back[-1][0] for back in spy.back.values())


def test_half_normal_delays_have_the_mean_and_shares_they_should():
    found = np.array([Delays("half-normal:20", 3)(t, k) for t in range(100) for k in range(50)])
    assert found.mean() == pytest.approx(20 * np.sqrt(2 / np.pi) - 0.5, rel=0.03)
    assert (found == 0).mean() == pytest.approx(0.0399, abs=0.01)  # |z| < 1/20
    own = [Delays("half-normal:20", 3, per_client=True)(t, 7) for t in range(5)]
    assert len(set(own)) == 1
    heavy = np.array([Delays("lognormal:4,0.5", 1)(t, 0) for t in range(4000)])
    assert (heavy < 4).mean() == pytest.approx(0.5, abs=0.03)


def test_traces_give_the_delays_of_a_file(tmp_path):
    (tmp_path / "own.csv").write_text("client,delay\n0,1\n0,3\n1,2\n")
    (tmp_path / "all.csv").write_text("delay\n4\n5\n")
    own, all_ = (Delays(f"trace:{tmp_path}/{name}.csv", 0) for name in ("own", "all"))
    assert {own(t, 0) for t in range(20)} == {1, 3}
    assert {own(t, 1) for t in range(5)} == {2}
    assert {all_(t, 9) for t in range(20)} == {4, 5}
    own.check(2)
    all_.check(1000)
    with pytest.raises(DataError, match="no delay for client 2 of 4"):
        own.check(4)
    with pytest.raises(DataError, match="no delay for client 2 of 6"):  # before a round is trained
        train(f"trace:{tmp_path}/own.csv", rounds=1, participation=0.01)
    (tmp_path / "mixed.csv").write_text("\ufeffclient, delay\n0, 1\n, 7\n", encoding="utf-8")
    mixed = Delays(f"trace:{tmp_path}/mixed.csv", 0)
    mixed.check(9)
    assert (mixed(0, 0), mixed(0, 5)) == (1, 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("delay\nsoon\n", "line 2: a delay is an integer"),
        ("delay\n\n1\n-1\n", "line 4: a delay is an integer number of rounds, 0 or more, not '-1'"),
        ("client,delay\n0\n", "line 2: a delay is an integer number of rounds, 0 or more, not ''"),
        ("client,delay\nbob,1\n", "line 2: a client is a number from 0 on, not 'bob'"),
        ("client,delay\n-1,1\n", "line 2: a client is a number from 0 on, not '-1'"),
        ("delay\n1,2\n", "line 2: there are more values than columns"),
        ("delay;client\n1;2\n", "no column 'delay'"),
        ("", "no column 'delay'"),
        ("delay\n", "contains no delays"),
        ("delay\n" + "1" * 200_000, "not a CSV file"),
        ("delay\n\xff", "not a CSV file"),
        (None, "cannot be read"),
    ],
)
def test_traces_that_are_none_are_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "t.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=words):
        Delays(f"trace:{tmp_path}/t.csv", 0)


def test_a_run_does_not_go_on_with_another_trace(tmp_path):
    (tmp_path / "t.csv").write_text("delay\n1\n3\n")
    train(f"trace:{tmp_path}/t.csv", rounds=3, out=tmp_path / "a")
    (tmp_path / "t.csv").write_text("delay\n1\n2\n")
    with pytest.raises(CheckpointError, match="delay trace has changed"):
        unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm(), rounds=6)


@pytest.mark.parametrize(
    ("delay", "options", "words"),
    [
        ("fixed:9", {}, "[36] updates were still in flight"),
        ("none", {"network": {"drop": 0.999999}}, "no update was used"),
        ("none", {"method": "fedbuff:buffer_size=99"}, "the server buffer never filled"),
    ],
)
def test_a_run_in_which_the_model_never_moves_says_so(delay, options, words):
    with pytest.warns(UserWarning, match=words):
        train(delay, rounds=4, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("fixed:1", rounds=2)


@pytest.mark.parametrize("method", ["feddle:eta=3e38", "fedft:lr=1e38", "center:lr=1e38"])
def test_a_server_that_computes_numbers_that_are_not_finite_is_what_is_told(method):
    """Neither the clients, whose updates are finite, nor the delays are to blame."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train("half-normal:1", method, rounds=4, precision="fp32")
    told = [str(w.message) for w in caught]
    assert len(told) == 1
    assert "the server step gave values that are not finite" in told[0]
    assert torch.equal(result.vector, train("fixed:99", rounds=1, precision="fp32").vector)


def test_a_single_client_and_a_round_in_which_all_are_on_their_way():
    torch.manual_seed(0)
    for engine in ("inline", "processes", "vectorized"):
        result = unskew.run(
            blobs([9]), model=SmallBatchNorm(), method="fedasync", rounds=5, engine=engine, network="fixed:2", lr=0.05
        )
        assert [r["cohort"] for r in result.history] == [1, 0, 0, 1, 0]
        assert [r["in_flight"] for r in result.history] == [1, 1, 0, 1, 1]
        assert [r["updates"] for r in result.history] == [0, 0, 1, 0, 0]


CASES = [
    (method, room) for method in ("scaffold+fedavgm", "fedcog:start_round=0,n=6,g_steps=2") for room in (0, 1 << 30)
]


@pytest.mark.parametrize(("method", "room"), slow_but([CASES[1]], CASES))
def test_a_run_goes_on_with_its_updates_on_their_way(tmp_path, monkeypatch, method, room):
    whole = train("half-normal:3", method, rounds=12)
    monkeypatch.setattr(assembly, "ClientStore", lambda folder: ClientStore(folder, room))
    train("half-normal:3", method, rounds=5, out=tmp_path / "a", checkpoint_every=1)
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm(), rounds=12)
    assert torch.equal(rest.vector, whole.vector)
    names = ("accuracy", "in_flight", "staleness", "staleness_counts", "bytes_up")
    assert [[r[n] for n in names] for r in rest.history] == [[r[n] for n in names] for r in whole.history]
    assert not (tmp_path / "a" / "in-flight").exists()


def test_a_model_that_many_were_sent_is_kept_once(tmp_path):
    """A rule that remembers what was sent: its checkpoint has one model for each round on its way."""
    run = {"delay": "half-normal:3", "method": "fedasync"}
    torch.manual_seed(0)
    whole = train(rounds=9, **run)
    train(rounds=5, out=tmp_path / "a", checkpoint_every=5, **run)
    held = load_file(tmp_path / "a" / "checkpoints" / "0000005" / "server.safetensors")
    kept = [name for name in held if name.startswith("sent/")]
    manifest = read_manifest(tmp_path / "a" / "checkpoints" / "0000005")
    assert len(kept) == len({origin_round for _, origin_round in manifest["sent"].values()}) < len(manifest["sent"])
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm(), rounds=9)
    assert torch.equal(rest.vector, whole.vector)


@pytest.mark.parametrize(
    ("delay", "words"),
    [
        ("slow", "no delay 'slow'"),
        ("fixed", "fixed:3"),
        ("fixed:1.5", "fixed:3"),
        ("fixed:1e99", "at most 1,000,000"),
        ("lognormal:4,1e9", "at most 1,000,000"),
        ("half-normal:-1", "half-normal:20"),
        ("lognormal:4", "lognormal:4,0.5"),
        ("trace", "needs a file"),
        ("none:3", "takes no value"),
        (2, "no delay '2'"),
        ("lognormal:1,1000,1", "lognormal:4,0.5"),
    ],
)
def test_delays_written_wrongly_are_refused(delay, words):
    with pytest.raises(ConfigError, match=words):
        train(delay)


@pytest.mark.parametrize("method", ["fedals", "fedrep", "fedgen"])
def test_methods_that_need_a_round_together_are_refused(method):
    with pytest.raises(ConfigError, match=f"{method} needs all updates of a round"):
        train("fixed:1", method)
    with pytest.raises(ConfigError, match="diagnose=consensus"):
        train("fixed:1", diagnose="consensus")


def test_the_flag_of_the_command_line(capsys, tmp_path):
    args = ("run", "--model", "logistic", "--rounds", "3", "--clients", "4", "--partition", "iid", "--engine", "inline")
    outcome = call(capsys, *args, "--delay", "fixed:1", "--out", str(tmp_path / "a"))
    assert outcome.code == 0
    assert "delay: fixed:1" in (tmp_path / "a" / "config.yaml").read_text()


def test_a_delay_in_short_stays_when_another_field_of_the_network_is_set(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("network: fixed:1\nmodel: logistic\nrounds: 3\nclients: 4\npartition: iid\n")
    args = ("run", str(tmp_path / "run.yaml"), "--engine", "inline", "--set", "network.drop=0.1")
    assert call(capsys, *args, "--out", str(tmp_path / "a")).code == 0
    written = (tmp_path / "a" / "config.yaml").read_text()
    assert "delay: fixed:1" in written
    assert "drop: 0.1" in written


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_traffic_is_counted_when_it_crosses_the_network(buffers):
    """A model down for every dispatch, also to clients that drop out; one up for every arrival, but not before."""
    result = train("half-normal:2", rounds=12, network={"drop": 0.3}, buffers=buffers)
    sent, arrived = (np.cumsum([row[name] for row in result.history]) for name in ("cohort", "arrivals"))
    assert sent[-1] > arrived[-1] + result.history[-1]["in_flight"]  # some dropped out
    statistics = 8 * 8 if buffers == "average" else 0
    each = 8 * len(result.vector) + statistics
    assert [row["bytes_down"] for row in result.history] == [each * n for n in sent]
    assert [row["bytes_up"] for row in result.history] == [each * n for n in arrived]
    assert result.summary["buffer_bytes_up"] == statistics * arrived[-1]
    assert result.summary["buffer_bytes_down"] == statistics * sent[-1]


def test_fedbuff_moves_when_its_buffer_is_full():
    """Deltas 1, 2, 3 ... one after the other, against a loop over them."""
    method = unskew.method("fedbuff:buffer_size=3,eta=0.5")
    rule, state = method.server, {"v": torch.zeros(2, dtype=torch.float64)}
    expected, buffer, number, waiting = np.zeros(2), [], 0, empty_updates(method, method.server)
    for arrivals in (2, 5, 1, 4, 0, 7):
        intake = UpdateBuffer(method, rule, nullcontext, waiting)
        for _ in range(arrivals):
            number += 1
            delta = np.array([number, number**2], float)
            intake.add(an_update(delta=delta))
            buffer.append(delta)
            if len(buffer) == 3:
                expected += 0.5 * np.mean(buffer, axis=0)
                buffer = []
        for full in intake.for_rule():
            nothing = torch.zeros(0)
            state = rule.step(state, Updates(0, full.aggregate, full.individual, state["v"], nothing, None, nothing))
        waiting = intake.waiting
        assert_close(state["v"].numpy(), expected, TRAINING)
        assert waiting.aggregate.count == len(buffer)


@pytest.mark.parametrize("method", ["fedbuff", "ca2fl"])
def test_statistics_wait_with_the_model_and_move_by_the_mean_change_of_the_buffer(monkeypatch, method):
    """A loop over what was sent to whom and what came back, with buffers that fill over several rounds."""
    sent, b, change, expected = {}, None, [], []
    cast, deliver = Broadcaster.broadcast, Network.deliver

    def broadcast(broadcaster, round, client, *args):
        sent[client] = broadcaster.state.b.numpy().copy()
        return cast(broadcaster, round, client, *args)

    def delivered(network, round, results):
        nonlocal b
        b = next(iter(sent.values())) if b is None else b
        arrived = list(deliver(network, round, results))
        for update in arrived:
            change.append(update.buffers.numpy() - sent[update.client])
            if len(change) == 4:
                b = b + np.mean(change, axis=0)
                change.clear()
        expected.append(b)
        return iter(arrived)

    monkeypatch.setattr(Broadcaster, "broadcast", broadcast)
    monkeypatch.setattr(Network, "deliver", delivered)
    result = train("half-normal:2", f"{method}:buffer_size=4", rounds=15)
    norm = result.model.norm
    assert_close(torch.cat([norm.running_mean, norm.running_var]).numpy(), expected[-1], TRAINING)
    waits = [t for t in range(1, 15) if expected[t] is expected[t - 1]]
    assert 4 < len(waits) < 13
    losses = [row["loss"] for row in result.history]
    assert all(losses[t] == losses[t - 1] for t in waits)


@pytest.mark.parametrize("buffers", ["local", "reset"])
def test_statistics_that_are_not_averaged_are_as_with_fedavg(buffers):
    """Where the server sent none, the mean of the arrivals' is what is evaluated."""
    for method in ("fedbuff:buffer_size=3", "ca2fl:buffer_size=3"):
        pair = [train("none", m, rounds=1, buffers=buffers, client_weighting="uniform") for m in (method, "fedavg")]
        torch.testing.assert_close(pair[0].model.norm.running_var, pair[1].model.norm.running_var)


def test_fedbuff_without_delay_and_with_a_buffer_of_the_cohort_is_fedavg():
    for delay in ("none", "fixed:0"):
        buffered = train(delay, "fedbuff:buffer_size=3")
        assert_close(buffered.vector, train(client_weighting="uniform").vector, TRAINING)


def test_fedbuff_waits_over_rounds_and_goes_on_after_an_interruption(tmp_path):
    whole = train("half-normal:2", "fedbuff:buffer_size=4", rounds=12, secure_aggregation="required")
    waiting = [r["fedbuff_waiting"] for r in whole.history]
    arrived = np.cumsum([r["arrivals"] for r in whole.history])
    assert waiting == [float(n % 4) for n in arrived]
    options = {"rounds": 5, "checkpoint_every": 1, "secure_aggregation": "required"}
    train("half-normal:2", "fedbuff:buffer_size=4", out=tmp_path / "a", **options)
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm(), rounds=12)
    assert torch.equal(rest.vector, whole.vector)
    assert [r["loss"] for r in rest.history] == [r["loss"] for r in whole.history]  # statistics included


def test_fedavg_may_discard_what_is_late():
    late = train("fixed:1", "fedavg:discard_late=true", rounds=4)
    assert [r.get("discarded", 0) for r in late.history] == [0, 3, 3, 3]
    assert all(r["updates"] == 0 for r in late.history)
    on_time = train("none", "fedavg:discard_late=true")
    assert torch.equal(on_time.vector, train().vector)


@pytest.mark.parametrize(
    "spec", ["alpha0=0.5", "alpha0=0.5,staleness=constant", "alpha0=0.9,staleness=hinge,a=10,b=1", "a=0.9"]
)
def test_fedasync_mixes_each_model_by_its_age(spec):
    """Random updates with ages, against a loop over whole models."""
    rule = unskew.method(f"fedasync:{spec}").server
    draws = np.random.default_rng(0)
    v = draws.normal(size=3)
    starts, deltas, versions = draws.normal(size=(4, 3)), draws.normal(size=(4, 3)), [7, 3, 9, 0]
    b, buffers = draws.normal(size=2), draws.normal(size=(4, 2))
    arrived = [
        an_update(k, d, buffers=own, start=torch.tensor(s), version=n)
        for k, (s, d, own, n) in enumerate(zip(starts, deltas, buffers, versions, strict=True))
    ]
    found = rule.step({"v": torch.tensor(v)}, some_updates(arrived, version=9, b=torch.tensor(b)))
    for number, (s, d, own, n) in enumerate(zip(starts, deltas, buffers, versions, strict=True)):
        age = 9 + number - n
        share = {"constant": 1.0, "polynomial": (1 + age) ** -rule.a}.get(rule.staleness)
        if share is None:
            share = 1.0 if age <= 1 else 1 / (10 * (age - 1) + 1)
        v = (1 - rule.alpha0 * share) * v + rule.alpha0 * share * (s + d)
        b = (1 - rule.alpha0 * share) * b + rule.alpha0 * share * own
    assert_close(found["v"].numpy(), v)
    assert_close(found["b"].numpy(), b)


def test_fedasync_mixes_statistics_as_the_model():
    """With next to no weight both stay."""
    losses = [row["loss"] for row in train("half-normal:2", "fedasync:alpha0=1e-12", rounds=5).history]
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-9)


def test_fedasync_gives_no_weight_to_what_is_far_too_old():
    rule = unskew.method("fedasync:a=2000").server
    assert [rule.weight(age) for age in (0, 1, 50)] == [0.4, 0.0, 0.0]


def test_fedasync_with_full_weight_is_the_model_of_the_last_arrival():
    """One client per round with a delay: the model is what that client made of the one it was sent."""
    options = {"method": "fedasync:alpha0=1,staleness=constant", "participation": 1 / 6, "rounds": 3}
    spy = train("none", rounds=1, participation=1 / 6, client_weighting="uniform")
    # Sent out in round 0, it replaces the initial model in round 1.
    first = train("fixed:1", **{**options, "rounds": 2})
    assert_close(first.vector, spy.vector, TRAINING)


def test_fedasync_remembers_what_was_sent_over_an_interruption_and_forgets_who_dropped_out(tmp_path):
    options = {"network": {"drop": 0.3}, "method": "fedasync+fedprox:mu=0.1"}
    whole = train("half-normal:3", rounds=12, **options)
    train("half-normal:3", rounds=5, out=tmp_path / "a", checkpoint_every=1, **options)
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm(), rounds=12)
    assert torch.equal(rest.vector, whole.vector)
    for engine in ("processes", "vectorized"):
        other = train("half-normal:3", rounds=12, engine=engine, **options)
        assert_engines_agree(other.vector, whole.vector)
