"""Cohorts on the meta device, which has shapes and no numbers: operators that mix devices fail, and reads are counted."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.federations import LORA, QUICK, SmallBatchNorm, blobs
from support.protocol import server_of
from unskew import ModelSpec, method
from unskew.engines.base import EngineConfig
from unskew.engines.vectorized import VectorizedEngine
from unskew.methods.registry import METHODS
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import survey_times
from unskew.protocol.training_config import Training
from unskew.tasks.registry import TASKS

META = torch.device("meta")


def methods_where(declares):
    """The methods with a client rule that declares something."""
    return [name for name in METHODS if any(declares(rule) for rule in method(QUICK.get(name, name)).client)]


def passes_over_data(rule):
    """Return whether clients pass over all their data before or after local training."""
    times = set(survey_times(rule))
    return bool(times & {"received", "trained"}) or ("full_gradient" in rule.needs and "asked" not in times)


ENCODING = methods_where(lambda rule: rule.encodes)
TRAINED_ALONE = methods_where(lambda rule: rule.trains_alone)
NOT_HERE = {
    **dict.fromkeys(LORA, "needs a model with LoRA factors"),
    "vhl": "has images that are generated before training",
    "feddm": "sends images of the classes that a client has",
    **dict.fromkeys(
        methods_where(passes_over_data), "takes a pass over each client's data, one client after the other"
    ),
    "dpsgd": "does not support the BatchNorm of this model",
    **dict.fromkeys(TRAINED_ALONE, "trains clients one at a time, which reads the device for each"),
    **dict.fromkeys(["heterofl", "fedrolex"], "trains the clients of each rate as a group, which reads once per group"),
    **dict.fromkeys(ENCODING, "reads the device for each client, because encoded updates are bytes"),
}
ACTING = {
    "floco": "floco:endpoints=2,tau=9",  # later rounds than those counted: the points are computed once, on the CPU
    "fedcog": "fedcog:start_round=0,g_steps=2,n=8",
    "fedcog-authors": "fedcog-authors:start_round=0,g_steps=2,n=8",
}
COUNTED = (
    "fedcog",
    "fedcog-authors",
    "fedgen",
    "fedlc",
    "fedrs",
    "fedrod",
    "fedetf",
    "gpfl",
)  # of their clients' labels, which no meta tensor has
MOVES = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
"""Operators that move tensors, and the position of the tensor to move."""


class Counts(TorchDispatchMode):
    """Counts transfers to the meta device, and replaces and counts reads of it."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads, self.transfers = 0, 0
        tolist, tensor = torch.Tensor.tolist, torch.tensor

        def read(values):
            if values.device != META:
                return tolist(values)
            self.reads += 1
            return tolist(torch.zeros(values.shape))

        def create(*args, **kwargs):
            self.transfers += torch.device(kwargs.get("device") or "cpu") == META
            return tensor(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "tolist", read)
        monkeypatch.setattr(torch, "tensor", create)  # not dispatched

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        source = args[MOVES[function]] if function in MOVES else None
        if isinstance(source, torch.Tensor):
            self.transfers += source.device != META and result.device == META
        return result


class Cohort:
    """Clients of three sizes, and their server, in the memory of the CPU or on the meta device."""

    def __init__(self, name, there, clients, server_device="cpu", augment=False, record=None):
        federation = blobs([16, 11, 13] * (clients // 3))
        what = method(ACTING.get(name, QUICK.get(name, name)))
        module, head = SmallBatchNorm(), "fc"
        for rule in what.client:
            module, head = rule.adapt(module, head)
        spec = ModelSpec(module, federation.shape, federation.classes, head).to(torch.device(server_device))
        training = Training(local_steps=3, local_epochs=None, batch_size=8, lr=0.1, momentum=0.5, augment=augment)
        data = federation.to(META) if there else federation
        task, plan = TASKS["classification"], RoundPlan(rounds=9)
        setup = EngineConfig(spec, data, what.client, task, training, 0, META, plan=plan)
        self.server = server_of(what, spec, federation)
        self.server.state.changed = True  # otherwise two models are compared, of which the meta device has no numbers
        self.engine, self.clients = VectorizedEngine(setup, record=record), clients

    def train(self, round):
        return list(
            self.engine.train([self.server.broadcaster.broadcast(round, client) for client in range(self.clients)])
        )
