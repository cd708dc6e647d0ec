"""CA2FL: against a loop over the paper's sums, with delays; its cache in memory, on disk and over an interruption."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.federations import SmallBatchNorm, blobs
from support.protocol import an_update, facts, some_updates
from support.running import Stop, StopAfter, call
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.runs import assembly
from unskew.simulation.client_store import ClientStore
from unskew.simulation.network import Network
from unskew.simulation.server import Server

SIZES = [9, 14, 11, 8, 12, 10]
METHOD = "ca2fl:buffer_size=4,eta=0.7"


def train(method=METHOD, delay="half-normal:2", rounds=12, **options):
    torch.manual_seed(0)
    given = {"lr": 0.05, "batch_size": 8, "local_epochs": 1, "precision": "fp64", "participation": 0.5}
    given |= {"engine": "inline", "network": {"delay": delay}, **options}
    return unskew.run(blobs(SIZES), model=SmallBatchNorm(), method=method, rounds=rounds, **given)


class Oracle:
    """The paper's algorithm in NumPy: every mean is computed anew from the whole cache."""

    def __init__(self, v, clients, size, eta):
        self.v, self.cache, self.size, self.eta = v.copy(), np.zeros((clients, len(v))), size, eta
        self.h, self.buffer = np.zeros(len(v)), []

    def arrive(self, client, delta):
        self.buffer.append(delta - self.cache[client])
        self.cache[client] = delta
        if len(self.buffer) == self.size:
            self.v = self.v + self.eta * (self.h + np.mean(self.buffer, axis=0))
            self.h, self.buffer = self.cache.mean(0), []


def test_a_run_with_delays_is_the_papers_algorithm(monkeypatch):
    """Every update that arrives in a real run, through the oracle, in the order of its arrival."""
    seen, first = [], []
    real, start = Network.deliver, Server.__init__

    def deliver(network, round, results):
        arrived = list(real(network, round, results))
        seen.extend((u.client, u.delta.numpy().copy()) for u in arrived)
        return iter(arrived)

    def init(server, *args, **kwargs):
        start(server, *args, **kwargs)
        first.append(server.state.v.numpy().copy())

    monkeypatch.setattr(Network, "deliver", deliver)
    monkeypatch.setattr(Server, "__init__", init)
    result = train(rounds=20)
    oracle = Oracle(first[0], len(SIZES), 4, 0.7)
    for client, delta in seen:
        oracle.arrive(client, delta)
    assert len(seen) > 20
    assert len({client for client, _ in seen}) == len(SIZES)
    assert_close(result.vector.numpy(), oracle.v, TRAINING)
    last = result.history[-1]
    assert last["ca2fl_waiting"] == len(oracle.buffer)
    assert last["ca2fl_cache_bytes"] == oracle.cache.size * 8


def test_a_client_that_arrives_twice_in_one_buffer_is_calibrated_by_its_own_first_update():
    rule = unskew.method("ca2fl:buffer_size=3").server
    state, cache, buffer = rule.init(torch.zeros(2, dtype=torch.float64), facts(4)), {}, []
    oracle = Oracle(np.zeros(2), 4, 3, 1.0)
    draws = np.random.default_rng(0)
    for round, clients in enumerate([[0], [0, 1], [2, 3], [0, 1, 2, 3], [1], [1], [1]]):
        for client in clients:
            delta = draws.normal(size=2)
            oracle.arrive(client, delta)
            buffer.append(an_update(client, delta, last=cache.get(client)))
            if len(buffer) == rule.updates_per_step:
                state, buffer = rule.step(state, some_updates(buffer, round)), []
            cache[client] = torch.tensor(delta)
        assert_close(state["v"].numpy(), oracle.v, TRAINING)
        assert_close(state["h"].numpy(), oracle.h, TRAINING)


def test_with_empty_caches_the_first_step_is_fedbuffs_and_the_second_is_not():
    """Both see the same updates until FedBuff has moved once; with a buffer of a cohort that is after the first round."""
    pair = [train(f"{name}:buffer_size=3", "none", rounds=1) for name in ("ca2fl", "fedbuff")]
    assert_close(pair[0].vector, pair[1].vector, TRAINING)
    pair = [train(f"{name}:buffer_size=3", "none", rounds=2) for name in ("ca2fl", "fedbuff")]
    assert not torch.allclose(pair[0].vector, pair[1].vector)


def test_clients_that_repeat_their_update_move_the_model_by_the_mean_of_all():
    """Every cached update is right: whoever is in the buffer, the step is the mean over all clients."""
    rule = unskew.method("ca2fl:buffer_size=2").server
    deltas = np.random.default_rng(1).normal(size=(4, 3))
    state = rule.init(torch.zeros(3, dtype=torch.float64), facts(4))
    cache = {}

    def arrive(state, *clients):
        arrivals = [an_update(k, deltas[k], last=cache.get(k)) for k in clients]
        after = rule.step(state, some_updates(arrivals))
        cache.update({u.client: u.delta for u in arrivals})
        return after

    state = arrive(arrive(state, 0, 1), 2, 3)
    for pair in ((0, 1), (0, 2), (3, 1)):
        before = state["v"]
        state = arrive(state, *pair)
        assert_close((state["v"] - before).numpy(), deltas.mean(0), TRAINING)


@pytest.mark.parametrize("limit", [4 << 30, 1500], ids=["memory", "disk"])
def test_the_cache_goes_on_after_an_interruption_in_memory_and_on_disk(tmp_path, monkeypatch, limit):
    whole = train(rounds=12)
    monkeypatch.setattr(assembly, "ClientStore", lambda folder: ClientStore(folder, limit))
    with pytest.raises(Stop):
        train(rounds=12, out=tmp_path / "a", checkpoint_every=5, callbacks=[StopAfter(7)])
    files = list((tmp_path / "a" / "checkpoints" / "0000005").glob("cached-*.safetensors"))
    assert bool(files) == (limit == 1500)
    if files:
        size = whole.summary["parameters"]
        assert all(load_file(file)["delta"].shape == (size,) for file in files)
    torch.manual_seed(0)
    rest = unskew.resume(tmp_path / "a", federation=blobs(SIZES), model=SmallBatchNorm())
    assert torch.equal(rest.vector, whole.vector)
    names = ("accuracy", "ca2fl_waiting", "ca2fl_cache_bytes")
    assert [[r[n] for n in names] for r in rest.history] == [[r[n] for n in names] for r in whole.history]
    assert not (tmp_path / "a" / "cache").exists(), "files of a finished run are in its checkpoints only"


def test_the_cache_counts_as_memory_of_the_server():
    """The model, the mean of the cache, waiting updates with their clients' last ones, their sum; and one vector a client."""
    size = 8 * train(rounds=1).summary["parameters"]
    few = (
        2 + 6 + 3 * 4
    ) * 8 * 8 + 3 * 8  # statistics of four channels: the model's, sent, and of waiting ones; counters
    rows = train(rounds=6, diagnose=["server"]).history
    for row in rows:
        waiting = row["ca2fl_waiting"]
        held = row["server/bytes"] - row["ca2fl_cache_bytes"]
        assert (2 + waiting + bool(waiting)) * size <= held <= (2 + 2 * waiting + bool(waiting)) * size + few
    assert max(row["ca2fl_waiting"] for row in rows) > 0
    assert rows[-1]["ca2fl_cache_bytes"] >= 3 * size


def test_an_update_that_is_not_finite_is_not_cached(monkeypatch):
    real = Network.deliver

    def deliver(network, round, results):
        for update in real(network, round, results):
            if round == 1 and update.client % 2:
                update.delta.fill_(torch.nan)
            yield update

    monkeypatch.setattr(Network, "deliver", deliver)
    caught = []

    class Keep:
        def start(self, config, rounds_done): ...
        def warn(self, text):
            caught.append(text)

        def round(self, row): ...
        def end(self, summary): ...

    result = train(rounds=6, participation=1.0, callbacks=[Keep()], delay="none")
    assert result.summary["updates_skipped"] == 3
    assert "not finite" in caught[0]
    assert torch.isfinite(result.vector).all()


def test_options_out_of_range_and_what_it_cannot_be_combined_with(capsys, tmp_path):
    for wrong in ("buffer_size=0", "eta=0", "eta=-1", "buffer_size=2.5"):
        with pytest.raises(ConfigError, match="ca2fl:"):
            unskew.method(f"ca2fl:{wrong}")
    with pytest.raises(MethodConflictError, match="only parts of the model are sent"):
        unskew.method("ca2fl+fedals")
    with pytest.raises(MethodConflictError, match="ca2fl reads the update of each individual client"):
        train(secure_aggregation="required")
    args = ("run", "--method", "ca2fl:bufer_size=3", "--rounds", "2")
    outcome = call(capsys, *args)
    assert outcome.code == 2
    assert "buffer_size" in outcome.err
