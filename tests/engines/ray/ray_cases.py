"""The engine ``ray``: the numbers of one process, on two real nodes, also when one dies. Run by ``test_engine.py``."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support import ray_nodes
from support.engine_methods import ALL_METHODS, EARLY, SUMS
from support.federations import blobs, small_budget, small_model
from support.ray_nodes import STORE, TOKEN, Node

import unskew
from unskew.engines.ray import cluster as ray_cluster
from unskew.errors import ConfigError, EngineError
from unskew.records.recorder import Callback

os.environ |= TOKEN

import ray

SECONDS, KILLS = 600, int(os.environ.get("UNSKEW_TEST_KILLS", "20"))
"""For a script that begins and ends a cluster on a busy machine, and how many kills it makes."""

pytestmark = pytest.mark.usefixtures("undrawn")


def train(method, engine, address=None, ray=None, **options):
    torch.manual_seed(0)
    settings = {"rounds": 4, "participation": 0.5, "local_steps": 2, "batch_size": 8, "lr": 0.05}
    settings |= {**small_budget(method), **options}
    return unskew.run(
        blobs([9, 14, 11, 8, 12, 10, 9, 9]), model=small_model(method), method=EARLY.get(method, method), engine=engine,
        ray={"address": address, "deadline": 240, **(ray or {})}, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("method", [*ALL_METHODS, *SUMS])
def test_every_kind_of_message_gives_the_same_bits_on_two_nodes(nodes, method):
    alone, there = train(method, "inline"), train(method, "ray", nodes[0])
    assert torch.equal(alone.vector, there.vector)
    assert [row["accuracy"] for row in alone.history] == [row["accuracy"] for row in there.history]
    assert there.summary["engine"] == "ray"


def test_auto_takes_a_cluster_that_is_named(nodes):
    assert train("fedavg", "auto", nodes[0]).summary["engine"] == "ray"


def test_a_client_fails_three_times_and_its_reason_is_told(nodes, tmp_path):
    class Wrong(unskew.ClientRule):
        name, summary, paper = "wrong", "-", "-"

        def begin(self, ctx):
            (tmp_path / f"{time.monotonic_ns()}").touch()
            raise ConfigError("client 3 has bad data")

    with pytest.raises(ConfigError, match="client 3 has bad data"):
        train(Wrong(), "ray", nodes[0], participation=0.125)
    assert len(list(tmp_path.iterdir())) == 3


def test_more_data_than_the_store_holds_are_moved_to_the_disk(nodes):
    numbers = np.random.default_rng(0).normal(size=(4, 60, 50, 5000)).astype("float32")
    given = [(x.reshape(60, -1), np.arange(60) % 2) for x in numbers]
    assert sum(x.nbytes for x, _ in given) > STORE
    federation = unskew.Federation.from_arrays(
        given, test=(given[0][0][:2], np.arange(2)), holdout=0.0, normalize=False
    )
    options = {"model": "logistic", "rounds": 1, "local_steps": 1, "batch_size": 2, "eval_clients": 0}
    there = unskew.run(federation, engine="ray", ray={"address": nodes[0], "deadline": 240}, **options)
    assert torch.equal(there.vector, unskew.run(federation, engine="inline", **options).vector)


def test_a_worker_that_asks_for_more_than_there_is_is_refused(nodes):
    with pytest.raises(EngineError, match="No node of the cluster has room"):
        unskew.run(model="logistic", rounds=1, engine="ray", ray={"address": nodes[0], "cpus_per_worker": 64})


def test_a_cluster_that_admits_anybody_is_noticed(nodes, monkeypatch):
    """The nodes of this file show that others are not; whoever has a token is admitted to an open cluster, too."""
    assert not ray_cluster.accepts_without_token(nodes[0])
    monkeypatch.setattr(ray_nodes, "TOKEN", {"RAY_AUTH_MODE": "disabled"})
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        head = Node("127.0.0.8", None, 1, folder)
        try:
            assert ray_cluster.accepts_without_token(f"127.0.0.8:{head.port()}")
        finally:
            head.kill()


def test_the_example_of_a_cluster_fits_rays_schema():
    from ray.autoscaler._private.util import prepare_config, validate_config

    examples = Path(__file__).parents[3] / "examples" / "cluster"
    validate_config(prepare_config(yaml.safe_load((examples / "launcher.yaml").read_text())))
    launcher = yaml.safe_load((examples / "launcher.yaml").read_text())
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert all("RAY_AUTH_MODE=token" in line for line in launcher[commands] if "ray start" in line)
    kubernetes = yaml.safe_load((examples / "kuberay.yaml").read_text())
    assert (kubernetes["apiVersion"], kubernetes["kind"]) == ("ray.io/v1", "RayCluster")
    assert kubernetes["spec"]["authOptions"]["mode"] == "token"


def test_what_clients_keep_lies_in_files_of_the_run(nodes, tmp_path):
    whole = train("scaffold", "inline")
    train("scaffold", "ray", nodes[0], ray={"state": "nodes"}, out=tmp_path / "run", rounds=2)
    there = train("scaffold", "ray", nodes[0], ray={"state": "nodes"}, out=tmp_path / "run", resume=True)
    assert torch.equal(there.vector, whole.vector)


def test_nodes_open_the_data_that_are_named(nodes):
    options = {"model": "mlp", "clients": 6, "rounds": 2, "local_steps": 2}
    there = unskew.run(engine="ray", ray={"address": nodes[0], "data": "nodes"}, **options)
    assert torch.equal(there.vector, unskew.run(engine="inline", **options).vector)


def test_nodes_map_the_files_that_arrays_are_mapped_from(nodes, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(90, 5)).astype("float32"))
    np.save(tmp_path / "y.npy", np.arange(90) % 3)
    x, y = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    given = unskew.Federation.from_arrays(
        [(x[k : k + 20], y[k : k + 20]) for k in range(0, 80, 20)], test=(x[80:], y[80:])
    )
    options = {"model": "mlp", "rounds": 2, "local_steps": 2}
    for data in ({"federation": given}, {"data": f"npy:{tmp_path}", "clients": 4}):
        there = unskew.run(engine="ray", ray={"address": nodes[0], "data": "nodes"}, **data, **options)
        assert torch.equal(there.vector, unskew.run(engine="inline", **data, **options).vector)


def test_runs_side_by_side_share_the_cluster(nodes):
    options = {"methods": ["fedavg", "scaffold"], "seeds": 1, "model": "logistic", "rounds": 2, "local_steps": 2}
    there = unskew.compare(engine="ray", ray={"address": nodes[0]}, parallel=2, **options)
    alone = unskew.compare(engine="inline", **options)
    for name, (history,) in alone.histories.items():
        assert [row["loss"] for row in history] == [row["loss"] for row in there.histories[name][0]]
        assert there.summaries[name][0]["engine"] == "ray"


def test_a_server_that_was_killed_goes_on_on_one_machine(nodes, tmp_path):
    options = [
        "--model",
        "logistic",
        "--clients",
        "4",
        "--rounds",
        "30",
        "--local-steps",
        "2",
        "--set",
        "checkpoint_every=1",
    ]
    unskew_ = [sys.executable, "-m", "unskew"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums over several threads are rounded in another order
    begun = subprocess.Popen(
        [
            *unskew_,
            "run",
            *options,
            "--engine",
            "ray",
            "--set",
            f"ray.address={nodes[0]}",
            "--out",
            tmp_path / "killed",
        ],
        stdout=subprocess.DEVNULL,
        env=alone,
    )
    lines, end = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 240
    while not lines.is_file() or len(lines.read_text().splitlines()) < 3:
        assert begun.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    begun.kill()
    begun.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    subprocess.run([*unskew_, "resume", tmp_path / "killed", "--engine", "inline"], check=True, env=alone)
    subprocess.run(
        [*unskew_, "run", *options, "--engine", "inline", "--out", tmp_path / "whole"], check=True, env=alone
    )
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert one == two


def test_a_node_that_joins_is_used_from_the_next_round_on(nodes, tmp_path):
    class Signs(unskew.ClientRule):
        name, summary, paper = "signs", "-", "-"

        def begin(self, ctx):
            (tmp_path / ray.util.get_node_ip_address()).touch()
            time.sleep(0.3)  # so that one node alone does not do it all
            return {}

    class Joins(Callback):
        def round(self, row):
            if row["round"] == 2:
                assert not (tmp_path / "127.0.0.4").exists()
                joined.append(Node("127.0.0.4", nodes[0], 1, tmp_path))
                end = time.monotonic() + 120
                while ray.cluster_resources().get("CPU", 0) < 3:
                    assert time.monotonic() < end
                    time.sleep(0.1)

    joined = []
    try:
        train(Signs(), "ray", nodes[0], rounds=6, participation=1.0, callbacks=[Joins()])
    finally:
        for node in joined:
            node.kill()
    assert (tmp_path / "127.0.0.4").exists()


@pytest.mark.parametrize("script", ["ray_four.py", "ray_node_dies.py", "ray_kills.py"])
def test_what_dies_costs_time_and_no_bits(script):
    """In a process of its own: a process can be connected to one cluster in its life only."""
    # The package that is tested here, not one that is installed, and sums in the order of one thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    text = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, text], capture_output=True, text=True, timeout=SECONDS + 60 * KILLS, env=environment
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("equal after")]  # Ray's own lines may follow
    assert done.returncode == 0, done.stdout + done.stderr
    assert said, done.stdout + done.stderr
    print(said[0])
