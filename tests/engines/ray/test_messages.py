"""The engine ``ray`` against a cluster that is played: who is trained when, what waits, and what fails again and again."""

import io
import random
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from support.federations import blobs

import unskew
from unskew.cli.tables import summary_table
from unskew.engines.ray import cluster as ray_cluster
from unskew.engines.ray import engine as ray_engine
from unskew.engines.ray import worker as ray_worker
from unskew.engines.ray.cluster import check_token_required
from unskew.errors import ConfigError, DataError, EngineError
from unskew.protocol.client_state_files import load_client_state


class Played:
    """What of Ray the engine uses. A task is done when somebody waits for it, in an order of the dice."""

    util = SimpleNamespace(register_serializer=lambda *args, **options: None)
    exceptions = SimpleNamespace(RayError=KeyError)

    def __init__(self, cores):
        self.cores, self.dice = cores, random.Random(0)
        self.values, self.tasks, self.most, self.flying, self.held, self.fetched = {}, {}, 0, 0, 0, []
        self.accelerators, self.asked = 0.0, {}
        self.lost = 0  # attempts of each task that died
        core = SimpleNamespace(get_current_task_attempt_number=lambda: self.lost)
        self._private = SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(core_worker=core)))

    def put(self, value):
        self.values[len(self.values)] = value
        return len(self.values) - 1

    def get(self, reference):
        value = self.values[reference]
        if isinstance(value, tuple) and isinstance(value[0], list):
            self.held -= len(value[0])
            self.fetched.append(reference)
        return value

    def remote(self, function):
        def begin(*args):
            self.flying += 1
            self.most = max(self.most, self.flying)
            ok, answer = self.put(None), self.put(None)
            self.tasks[ok] = (function, args, answer)
            return (ok, answer) if function is ray_worker.train_group else ok

        task = SimpleNamespace(remote=begin)
        task.options = lambda **options: self.asked.update(options) or task
        return task

    def wait(self, references, num_returns=1, timeout=None):
        one = self.dice.choice(references)
        if one in self.tasks:
            function, args, answer = self.tasks.pop(one)
            self.flying -= 1
            done = function(*args)
            if isinstance(done, tuple):
                self.values[one], self.values[answer] = done
                self.held += len(done[1][0]) if done[0] else 0
                self.peak = max(getattr(self, "peak", 0), self.held)
            else:
                self.values[one] = done
        return [one], []

    def nodes(self):
        held = {"CPU": float(self.cores), "GPU": self.accelerators}
        return [{"Alive": True, "Resources": held}] * (2 if self.accelerators else 1)

    def get_runtime_context(self):
        return SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0, "GPU": self.asked["num_gpus"]})


@pytest.fixture
def played(monkeypatch):
    cluster = Played(3)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setattr(ray_engine, "load_ray", lambda: cluster)
    monkeypatch.setattr(ray_engine, "connect", lambda *where: None)
    monkeypatch.setattr(ray_engine, "HELD", 0)
    return cluster


def train(engine, method="scaffold", clients=40, federation=None, **options):
    torch.manual_seed(0)
    federation = federation or blobs([8 + k % 5 for k in range(clients)])
    settings = {"rounds": 2, "local_steps": 2, "batch_size": 4, "lr": 0.05, "model": "logistic", **options}
    return unskew.run(federation, method=method, engine=engine, **settings)


def test_few_updates_wait_however_large_the_cohort_is(played):
    alone, there = train("inline"), train("ray")
    assert torch.equal(alone.vector, there.vector)
    assert played.most == 2 * 3, "two tasks for each worker"
    assert 3 < played.peak <= 2 * 2 * 2 * 3


def test_clients_that_are_trained_again_are_counted(played, tmp_path):
    calm = train("ray", clients=4)
    assert ([row["retries"] for row in calm.history], calm.summary["retries"]) == ([0, 0], 0)
    played.lost = 2
    struck = train("ray", clients=4, out=tmp_path / "run")
    assert ([row["retries"] for row in struck.history], struck.summary["retries"]) == ([8, 8], 16)
    assert torch.equal(struck.vector, calm.vector)
    screen = Console(width=200, record=True, file=io.StringIO())
    screen.print(summary_table(struck.summary))
    assert "16 clients whose worker or node died" in screen.export_text()
    assert "retries" not in train("inline", clients=4).summary, "where nothing is trained again, nothing is said"


def test_a_node_trains_on_its_own_accelerator(played, monkeypatch):
    given = []
    assert ray_worker.device_for(0).type == "cpu"
    monkeypatch.setattr(ray_worker.torch.cuda, "is_available", lambda: True)
    assert ray_worker.device_for(0.5).type == "cuda", "also where the server has none"
    monkeypatch.setattr(ray_worker.torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="its PyTorch"):
        ray_worker.device_for(1)
    played.accelerators = 1.0  # on each of two nodes: no worker can have both
    with pytest.raises(
        EngineError, match=r"No node of the cluster has room for a worker of 1 cores and 2 accel.*1 accel"
    ):
        train("ray", clients=4, ray={"gpus_per_worker": 2.0})
    played.accelerators = 2.0
    monkeypatch.setattr(ray_worker, "device_for", lambda share: given.append(share) or torch.device("cpu"))
    assert torch.equal(train("ray", clients=4, ray={"gpus_per_worker": 0.5}).vector, train("inline", clients=4).vector)
    assert given == [0.5]


def test_small_models_share_a_task_and_are_trained_one_after_another(played, monkeypatch):
    monkeypatch.setattr(ray_engine, "HELD", 1 << 30)
    alone = train("inline")
    before = len(played.values)
    there = train("ray")
    assert torch.equal(alone.vector, there.vector)
    assert len(played.values) - before < 2 * 2 * 40, "fewer tasks than clients"


@pytest.mark.slow
def test_several_clients_as_one_network(played):
    assert torch.equal(
        train("ray", clients_per_group=4, rounds=1, model="mlp").vector,
        train("ray", clients_per_group=4, rounds=1, workers=1, model="mlp").vector,
    )


def test_a_store_without_room_is_told(played, monkeypatch):
    def full(value):
        raise KeyError("The object store is full.")

    monkeypatch.setattr(played, "put", full)
    with pytest.raises(EngineError, match=r"cannot store the clients' data.*larger --object-store-memory"):
        train("ray", clients=4)


def test_a_cluster_without_a_token_is_for_loopback_only():
    for own in ("127.0.0.1", "127.0.0.2", "::1"):
        check_token_required(own)
    for other in ("10.0.0.1", "fd00::1", "8.8.8.8", "no such host"):
        with pytest.raises(EngineError, match=r"requires no token.*RAY_AUTH_MODE=token"):
            check_token_required(other)


@pytest.mark.parametrize(
    ("head", "anybody", "wrong"), [("10.0.0.1", True, True), ("10.0.0.1", False, False), ("127.0.0.2", True, False)]
)
def test_a_run_leaves_a_cluster_without_a_token(head, anybody, wrong, monkeypatch):
    """What cannot be seen here is a cluster at another address; everything else is what happens to a run."""
    left = []
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **options: None,
        shutdown=lambda: left.append(True),
        exceptions=SimpleNamespace(RayError=KeyError),
        get_runtime_context=lambda: SimpleNamespace(gcs_address=f"{head}:6379"),
        util=SimpleNamespace(register_serializer=lambda *which, **how: None),
    )
    monkeypatch.setattr(ray_cluster, "load_ray", lambda: fake)
    monkeypatch.setattr(ray_cluster, "accepts_without_token", lambda address: anybody)
    monkeypatch.setattr(ray_cluster, "check_reachable", lambda address: None)
    for address in ("auto", f"{head}:6379"):
        with pytest.raises(EngineError, match="requires no token") if wrong else nullcontext():
            ray_cluster.connect(address, None)
    assert len(left) == 2 * wrong


def test_a_local_cluster_whose_token_was_turned_off_is_rejected(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_cluster, "load_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(ray_cluster, "own_address", lambda: "10.0.0.1")
    with pytest.raises(EngineError, match=r"10\.0\.0\.1 requires no token"):
        ray_cluster.connect("local", None)


def test_the_user_is_warned_when_the_head_dies():
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}"
        ended, said = threading.Event(), []
        threading.Timer(0.1, ended.set).start()
        ray_cluster.watch_head(address, said.append, ended, 0.01)
        assert said == []
    ray_cluster.watch_head(address, said.append, threading.Event(), 0.01)
    assert len(said) == 1
    assert f"{address} no longer responds" in said[0]
    assert "unskew resume" in said[0]


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_client_may_fail_twice(played, fails):
    class Fails(unskew.ClientRule):
        name, summary, paper = "fails", "-", "-"
        left = fails

        def begin(self, ctx):
            if ctx.round == 1 and type(self).left:
                type(self).left -= 1
                raise ConfigError("client 3 has bad data")
            return {}

    if fails < 3:
        assert torch.equal(train("ray", Fails(), 1).vector, train("inline", "fedavg", 1).vector)
    else:
        with pytest.raises(ConfigError, match="client 3 has bad data"):
            train("ray", Fails(), 1)


def test_what_clients_keep_lies_in_files_and_runs_go_on_anywhere(played, tmp_path):
    def run(name, engine, rounds, resume=False, **options):
        return train(engine, clients=6, out=tmp_path / name, rounds=rounds, resume=resume, participation=0.5, **options)

    nodes = {"ray": {"state": "nodes", "data": "store"}}
    whole = run("whole", "inline", 4)
    files = []
    passed = ray_worker.store_client_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_worker, "store_client_state", lambda *one: files.append(passed(*one)) or files[-1])
        half = run("half", "ray", 2, **nodes)
    assert all(not update.state.tensors() and update.state_file[1] for update in files)
    (checkpoint,) = (tmp_path / "half" / "checkpoints").iterdir()
    assert len(list(checkpoint.glob("client-*.safetensors"))) == len({update.client for update in files})
    assert half.history[-1]["loss"] == whole.history[1]["loss"]
    shutil.copytree(tmp_path / "half", tmp_path / "alone")
    assert torch.equal(run("half", "ray", 4, resume=True, **nodes).vector, whole.vector)
    assert torch.equal(run("alone", "inline", 4, resume=True, **nodes).vector, whole.vector)
    for options, text in (({}, "Set out to"), ({"out": tmp_path / "c", "network": "fixed:1"}, "not support delays")):
        with pytest.raises(ConfigError, match=text):
            train("ray", "scaffold", 4, **options, **nodes)
    with pytest.raises(DataError, match="does not see /nowhere"):
        load_client_state(SimpleNamespace(state_files=("", "/nowhere/000000/1-1.safetensors")))


def test_nodes_open_what_is_named_once_and_map_it(played, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nodes = {"ray": {"data": "nodes"}}
    named = unskew.load_federation("digits", clients=4)
    (kept,) = {train("inline", "fedavg", federation=named).vector.sum()}
    assert train("ray", "fedavg", federation=named, **nodes).vector.sum() == kept
    (sent,) = (v[0] for v in played.values.values() if isinstance(v, tuple) and hasattr(v[0], "federation"))
    assert isinstance(sent.federation.clients, ray_worker.DescribedClients)
    assert len(sent.federation.test[1]) == 1
    (place,) = tmp_path.glob("*/*.data")
    assert oct(place.parent.stat().st_mode & 0o777) == "0o700"
    with pytest.raises(EngineError, match="given in Python"):
        train("ray", "fedavg", 4, **nodes)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 3)).astype("float32"))
    x, y = np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(40) % 2
    mapped = unskew.Federation.from_arrays([(x[k : k + 10], y[:10]) for k in (0, 10, 20)], test=(x[30:], y[30:]))
    played.values.clear()
    there = train("ray", "fedavg", federation=mapped, rounds=1, **nodes).vector
    assert torch.equal(there, train("inline", "fedavg", federation=mapped, rounds=1).vector)
    (sent,) = (v[0] for v in played.values.values() if isinstance(v, tuple) and hasattr(v[0], "federation"))
    assert isinstance(sent.federation.clients, ray_worker.MappedClients)
    monkeypatch.setattr(
        ray_worker, "federation_of", lambda spec, seed: unskew.load_federation("digits", clients=4, seed=5)
    )
    with pytest.raises(unskew.UnskewError, match="differ from the server's"):
        train("ray", "fedavg", federation=named, **nodes)
