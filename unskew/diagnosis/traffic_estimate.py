"""Traffic estimate of a method, measured in a few one-step rounds on two small clients."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.federation import ClientData, Federation
from unskew.diagnosis.features import AdviceContext
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.round_plan import cohort_size
from unskew.protocol.rules import Method
from unskew.runs.build_model import initial_spec
from unskew.runs.round_plan import make_round_plan
from unskew.runs.run import run_experiment
from unskew.simulation.parameter_slices import SliceExchange, buffer_bytes
from unskew.simulation.sampler import Sampler
from unskew.simulation.samplers.registry import parse_sampling
from unskew.simulation.traffic import slice_bytes

ROUNDS = 11
"""Number of rounds, chosen so that slices which are exchanged every tenth round are exchanged once."""
CLIENTS, SAMPLES = 2, 4


def estimate_traffic(setting: AdviceContext, method: Method) -> tuple[float, float]:
    """Return the bytes before training and per round, up and down, over all clients that take part.

    Generated data are not created here: their traffic is computed from their number and the size of an input.

    Args:
        setting: Data, model and configuration.
        method: Method to estimate.
    """
    fed, config = setting.federation, setting.config
    x, y = fed.test
    few = [shrink_client(fed.clients[k], number) for number, k in enumerate(range(min(CLIENTS, len(fed.clients))))]
    # The server of real sites has no rows of theirs; with rows of its test set, the messages have the same sizes.
    few = [client if len(client.x) else replace(client, x=x[:SAMPLES], y=y[:SAMPLES]) for client in few]
    server = fed.server
    if server is not None:
        server = replace(server, x=server.x[:SAMPLES], y=server.y[:SAMPLES])
    tiny = replace(fed, clients=few, test=(x[:SAMPLES], y[:SAMPLES]), server=server, client_names=(), text_groups=None)
    changes: dict[str, Any] = {
        "rounds": ROUNDS,
        "eval_every": ROUNDS,
        "clients": len(few),
        "participation": 1.0,
        "local_steps": 1,
        "batch_size": 2,
        "eval_clients": 0,
        "engine": "inline",
        "base_run": True,
        "save_samples": False,
        "coefficients": False,
        **dict.fromkeys(("local_epochs", "early_stopping", "attack", "start_from", "target")),
        "lr_schedule": "constant",
        "network": type(config.network)(),
        "trackers": (),
        "diagnose": (),
    }
    if config.sampling != "poisson":  # others may not fit two clients
        changes["sampling"] = "fixed"
    light = config.model_copy(update=changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about the settings above, not about the user's
        alone = replace(method, data=())
        result = run_experiment(light, federation=tiny, model=setting.model, method=alone)
    # The first round is atypical, because some tensors do not exist yet, such as a method's first variates.
    first, last = (row["bytes_up"] + row["bytes_down"] for row in (result.history[0], result.history[-1]))
    cohort = cohort_size(len(fed.clients), config.participation)
    each = (last - first) / (ROUNDS - 1) / len(few) * cohort
    sampler = parse_sampling(config.sampling)
    if sampler.asks_loss:
        info = replace(FederationInfo.of(fed), plan=make_round_plan(config, len(fed.clients), alone))
        asked = len(Sampler(len(fed.clients), config.participation, config.seed, sampler, info).draw(0))
        spec = initial_spec(light, tiny, setting.model, alone)
        number = spec.flatten().element_size()
        each += (asked - cohort) * model_bytes(light, tiny, spec, alone) + asked * number
    inputs = x[:1].numel() * x.element_size() + 1
    num_images = sum(
        (getattr(rule, "n_syn", None) or float(fed.sizes.mean())) for rule in method.data if rule.generates_data
    )
    return 2 * num_images * inputs * len(fed.clients), each


def model_bytes(config: Experiment, federation: Federation, spec: ModelSpec, method: Method) -> float:
    """Return the bytes of the model that a client downloads in a round, on average over rounds.

    Args:
        config: Configuration of the run.
        federation: Data of the clients.
        spec: Layout of the model.
        method: Method of the run.
    """
    v, b = spec.flatten(), spec.flatten_buffers()
    rules = {} if method.sync is None else {method.sync.name: method.sync.server_init(v, FederationInfo.of(federation))}
    exchange = SliceExchange(method.sync, spec)
    total = 0
    for t in range(1, ROUNDS):
        down = exchange.slices(rules, t, 0, t - 1)[0]
        total += slice_bytes(down, v) + (buffer_bytes(spec, down, b) if config.buffers == "average" else 0)
    return total / (ROUNDS - 1)


def shrink_client(client: ClientData, number: int) -> ClientData:
    """Return a client with only its first samples.

    Args:
        client: Data of the client.
        number: Number of samples to keep.
    """
    n = min(SAMPLES, len(client.y))
    return replace(client, id=number, x=client.x[:n], y=client.y[:n])
