"""The engine ``ray``: the numbers of one process, on two real nodes, also when one of them dies. Run by ``test_ray``."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from support.federations import SmallBatchNorm, blobs
from support.ray_nodes import TOKEN, cluster

import unskew
from unskew.errors import ConfigError, EngineError

os.environ |= TOKEN

import ray

pytestmark = pytest.mark.usefixtures("undrawn")

METHODS = (
    *(
        "fedavg",
        "fedprox+scaffold",
        "fedcog:start_round=1,n=8,g_steps=2",
        "fedals:alpha=2",
        "feddyn",
        "ditto",
        "fedrep",
    ),
    *("moon", "fedbn", "fednova", "fedgen", "feddle:epochs=1", "fedprox+scaffold+fedals"),
)


@pytest.fixture(scope="module")
def nodes():
    """Two nodes, and this process connected to them. Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(folder) as (address, started):
        yield address, started
        ray.shutdown()


def train(method, engine, address=None, **options):
    torch.manual_seed(0)
    settings = {"rounds": 4, "participation": 0.5, "local_steps": 2, "batch_size": 8, "lr": 0.05, **options}
    server = {"federation": blobs([9, 14, 11, 8, 12, 10, 9, 9])}
    return unskew.run(
        **server,
        model=SmallBatchNorm(),
        method=method,
        engine=engine,
        ray={"address": address, "deadline": 240},
        **settings,
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_message_gives_the_same_bits_on_two_nodes(nodes, method):
    alone, there = train(method, "inline"), train(method, "ray", nodes[0])
    assert torch.equal(alone.vector, there.vector)
    assert [row["accuracy"] for row in alone.history] == [row["accuracy"] for row in there.history]
    assert there.summary["engine"] == "ray"


def test_auto_takes_a_cluster_that_is_named(nodes):
    assert train("fedavg", "auto", nodes[0]).summary["engine"] == "ray"


def test_mistakes_in_a_rule_are_told_as_anywhere(nodes):
    class Wrong(unskew.ClientRule):
        name, summary, paper = "wrong", "-", "-"

        def begin(self, ctx):
            raise ConfigError("client 3 has bad data")

    with pytest.raises(ConfigError, match="client 3 has bad data"):
        train(Wrong(), "ray", nodes[0])


def test_a_worker_that_asks_for_more_than_there_is_is_refused(nodes):
    with pytest.raises(EngineError, match="too few for one worker"):
        unskew.run(model="logistic", rounds=1, engine="ray", ray={"address": nodes[0], "cpus_per_worker": 64})


def test_the_example_of_a_cluster_fits_rays_schema():
    from ray.autoscaler._private.util import prepare_config, validate_config

    examples = Path(__file__).parents[2] / "examples" / "cluster"
    validate_config(prepare_config(yaml.safe_load((examples / "launcher.yaml").read_text())))
    kubernetes = yaml.safe_load((examples / "kuberay.yaml").read_text())
    assert (kubernetes["apiVersion"], kubernetes["kind"]) == ("ray.io/v1", "RayCluster")
    assert kubernetes["spec"]["authOptions"]["mode"] == "token"


def test_a_node_that_dies_costs_time_and_no_bits():
    """In a process of its own: a process can be connected to one cluster in its life only."""
    text = Path(__file__).with_name("ray_node_dies.py")
    done = subprocess.run(
        [sys.executable, text], capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.splitlines()[-1:] == ["equal after a node died"], done.stdout + done.stderr
