"""Training on a device that holds shapes and no numbers: what mixes devices, or reads a number in the loop, fails there.

It is no GPU, but finds on any machine what a GPU would refuse, or wait for at every step.
"""

import pytest
import torch
from support.federations import QUICK, SmallBatchNorm, blobs

from unskew import ModelSpec, method
from unskew.engines.base import EngineConfig
from unskew.engines.vectorized import VectorizedEngine
from unskew.methods.fedavg import server_rule
from unskew.methods.registry import METHODS
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.training_config import Training
from unskew.simulation.server import Server
from unskew.tasks.registry import TASKS

NOT_HERE = {"vhl": "has images made before training", "feddm": "sends images of the classes that a client has"}
ACTING = {
    "fedcog": "fedcog:start_round=0,g_steps=2,n=8",
    "fedcog-authors": "fedcog-authors:start_round=0,g_steps=2,n=8",
}
COUNTED = ("fedcog", "fedcog-authors", "fedgen")  # of their clients' labels, which no meta tensor has
ALL_METHODS = sorted(set(METHODS) - set(NOT_HERE))
CASES = [(name, there) for name in ALL_METHODS for there in (False, True) if not (there and name in COUNTED)]
FEW = [("scaffold", True), ("fedcog", False)]


@pytest.mark.parametrize(
    ("name", "there"), [pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow) for case in CASES]
)
def test_a_cohort_trains_there_and_is_read_once(name, there, monkeypatch):
    federation, read = blobs([16, 16, 16]), []
    what = method(ACTING.get(name, QUICK.get(name, name)))
    spec = ModelSpec(SmallBatchNorm(), federation.shape, federation.classes)
    training = Training(local_steps=3, local_epochs=None, batch_size=8, lr=0.1)
    device = torch.device("meta")
    data = federation.to(device) if there else federation
    setup = EngineConfig(spec, data, what.client, TASKS["classification"], training, 0, device)
    facts = FederationInfo.of(federation)
    server = Server(what, server_rule(what), spec, facts, what.weights or "samples")
    engine, before = VectorizedEngine(setup), torch.Tensor.tolist

    def tolist(tensor):
        if tensor.device.type == "cpu":
            return before(tensor)
        read.append(tensor)
        return before(torch.zeros(tensor.shape))

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    updates = list(engine.train([server.broadcast(1, client) for client in range(3)]))
    assert len(read) == 1  # the losses, when all is done
    assert {update.delta.device.type for update in updates} == {"meta"}
    assert [update.metrics["steps"] for update in updates] == [3, 3, 3]
