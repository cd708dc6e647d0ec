"""Messages and contexts made by hand, for tests of single rules; what a test does not care about is filled in."""

from dataclasses import replace

import numpy as np
import torch

from unskew.methods.fedavg import server_rule
from unskew.protocol.context import Context
from unskew.protocol.data_preparation import NOWHERE, PreparedData
from unskew.protocol.data_rule import apply_data_rule
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.messages import Broadcast, ClientState, Update
from unskew.protocol.training_config import Training
from unskew.protocol.updates import Aggregate, Updates
from unskew.simulation.server import Server
from unskew.simulation.server_state import ServerSetup

NOTHING = torch.zeros(0, dtype=torch.float64)


def facts(clients, dtype=torch.float32):
    """What a server knows of so many clients with one sample each."""
    ones = np.ones(clients, int)
    return FederationInfo(clients, (1,), 2, "classification", dtype, None, lambda k: 1, lambda: None, lambda: ones)


def server_of(method, spec, federation, weights=None):
    """Return the server of a simulated run of a method; ``weights`` overrides those of the method."""
    info = replace(FederationInfo.of(federation), weights=weights or method.weights or "samples")
    return Server(ServerSetup(method, server_rule(method), spec, info))


def broadcast(round, client, **fields):
    filled = {"v": torch.ones(1), "b": torch.ones(0), "download": {}, "state": ClientState(), "weight": 1.0, **fields}
    return Broadcast(round, client, **filled)


def an_update(client=0, delta=NOTHING, round=0, weight=1.0, buffers=NOTHING, upload=None, **fields):
    filled = {"num_samples": 1, "state": ClientState(), "metrics": {}, "arrived": round, **fields}
    delta, buffers = (t if isinstance(t, torch.Tensor) else torch.tensor(t) for t in (delta, buffers))
    return Update(
        client=client, origin_round=round, weight=weight, delta=delta, buffers=buffers, upload=upload or {}, **filled
    )


def some_updates(single, round=0, v=NOTHING, b=NOTHING, spec=None, key=None, one_by_one=frozenset(), **fields):
    """Updates as a rule's half at the server gets them: single ones and their sums."""
    sums = Aggregate(frozenset(one_by_one))
    for one in single:
        sums.add(one)
    key = torch.tensor(round) if key is None else key
    filled = {"arrivals": len(single), **fields}
    return Updates(round, sums, list(single), v, b, spec, key, **filled)


def context(spec, **fields):
    """A context at a model's initial parameters: one step of plain SGD at the rate 0.1."""
    v = fields.get("v_global", spec.flatten())
    one = torch.ones((), dtype=v.dtype)
    filled = {
        "round": 0, "v_global": v, "b_global": spec.flatten_buffers(), "state": {}, "download": {}, "upload": {},
        "spec": spec, "model": None, "task": None, "key": torch.tensor(1), "training": Training(lr=0.1), "plain_sgd": True,
        "steps": one, "epoch_steps": one, "weight": one, **fields,
    }  # fmt: skip
    return Context(**filled)


def holdings(fed, client, dtype=torch.float64, seed=0):
    """What a rule may look at of one client, whose inputs are taken as they are."""
    return ClientDataView.of(fed, client, lambda x: x.to(dtype), torch.empty(0, dtype=dtype), seed)


def prepared(rule, fed, seed=0, epochs=4, workspace=NOWHERE):
    """What a data rule makes of a federation."""
    return apply_data_rule(rule, PreparedData(fed, Training(local_epochs=epochs)), seed, workspace)


def state_at(server, client):
    """What stays at a client."""
    return ClientState.of(server.clients.store.get(client))
