"""Traffic estimate of a method, measured in one-step rounds on small clients."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import ClientData, Federation, take_rows
from unskew.diagnosis.features import AdviceContext
from unskew.errors import UnskewError
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

PERIOD = 10
"""Number of rounds after which the messages of a method repeat, such as slices that are exchanged every tenth round."""
MOST_ROUNDS = 2 * PERIOD
"""Runs with more rounds are measured with fewer, of which the last period stands for the others. If clients miss rounds, a
period more is measured, because a client's first message may differ."""
MOST_CLIENTS = 100
"""Largest number of clients of the measured run."""
COHORT, WORK = 10, 10**7
"""Largest number of clients in a round of the measured run, and largest number of parameters of their models together."""
SAMPLES = 4
"""Number of samples of a small client, in addition to one of each of its classes."""


def estimate_traffic(setting: AdviceContext, method: Method) -> tuple[float, float]:
    """Return the bytes that do not depend on the rounds and those per round, up and down, over all clients that take part.

    The method is run with the configured cohorts and rounds, or with fewer of both for a shorter time; if it rejects these,
    with all of them. Generated data are not created: their traffic is computed from their number and the size of an input.

    Args:
        setting: Data, model and configuration.
        method: Method to estimate.

    Raises:
        UnskewError: If the method cannot be run.
    """
    fed, config = setting.federation, setting.config
    total, each = _measure(setting, replace(method, data=tuple(r for r in method.data if not r.generates_data)))
    x = fed.test[0]
    inputs = x[:1].numel() * x.element_size() + 1
    num_images = sum(
        (getattr(rule, "n_syn", None) or float(fed.sizes.mean())) for rule in method.data if rule.generates_data
    )
    return total - each * config.rounds + 2 * num_images * inputs * len(fed.clients), each


def _measure(setting: AdviceContext, method: Method) -> tuple[float, float]:
    """Return the bytes of a run, and those of a late round."""
    fed, config = setting.federation, setting.config
    number, share = len(fed.clients), config.participation
    cohort = max(2, min(COHORT, WORK // max(1, setting.spec.size)))
    clients = min(number, MOST_CLIENTS, math.ceil(cohort / share))
    rounds, most = config.rounds, MOST_ROUNDS if share == 1 else MOST_ROUNDS + PERIOD
    if rounds > most:  # fewer by whole periods
        rounds = most - (most - rounds) % PERIOD
    try:
        return _run_small(setting, method, clients, rounds)
    except UnskewError:  # for example a method with a minimum number of clients, or a round in which it begins
        if (clients, rounds) == (number, config.rounds):
            raise
        return _run_small(setting, method, number, config.rounds)


def _run_small(setting: AdviceContext, method: Method, clients: int, rounds: int) -> tuple[float, float]:
    """Run a method with one-step rounds on small clients.

    Args:
        setting: Data, model and configuration.
        method: Method without generated data.
        clients: Number of clients.
        rounds: Number of rounds.

    Returns:
        Bytes of the whole configured run, and those of a late round.
    """
    fed, config = setting.federation, setting.config
    small = shrink_federation(fed, clients)
    samples_randomly = config.sampling == "poisson"
    changes: dict[str, Any] = {
        "rounds": rounds,
        "eval_every": rounds,
        "clients": clients,
        # Cohorts of random sizes would have a random traffic.
        "participation": 1.0 if samples_randomly else config.participation,
        "sampling": config.sampling if samples_randomly else "fixed",
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
    light = config.model_copy(update=changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about the settings above, not about the user's
        result = run_experiment(light, federation=small, model=setting.model, method=method)
    cohort = cohort_size(len(fed.clients), config.participation)
    scale = cohort / cohort_size(clients, light.participation)
    # The first round is atypical: some tensors do not exist yet, such as a method's first variates. The total includes
    # what is sent after the last round.
    sent = [scale * (row["bytes_up"] + row["bytes_down"]) for row in result.history]
    total = scale * (result.summary["bytes_up"] + result.summary["bytes_down"])
    late = min(PERIOD, len(sent) - 1)
    each = (sent[-1] - sent[-1 - late]) / late if late else total
    total += each * (config.rounds - rounds)
    sampler = parse_sampling(config.sampling)
    if sampler.asks_loss:
        info = replace(FederationInfo.of(fed), plan=make_round_plan(config, len(fed.clients), method))
        asked = len(Sampler(len(fed.clients), config.participation, config.seed, sampler, info).draw(0))
        spec = initial_spec(light, small, setting.model, method)
        element = spec.flatten().element_size()
        further = (asked - cohort) * model_bytes(light, small, spec, method) + asked * element
        total, each = total + further * config.rounds, each + further
    return total, each


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
    for t in range(1, PERIOD + 1):
        down = exchange.slices(rules, t, 0, t - 1)[0]
        total += slice_bytes(down, v) + (buffer_bytes(spec, down, b) if config.buffers == "average" else 0)
    return total / PERIOD


def shrink_federation(federation: Federation, clients: int) -> Federation:
    """Return a federation with the first clients and only few of their samples.

    Args:
        federation: Data of all clients.
        clients: Number of clients to keep.
    """
    x, y = federation.test
    few = []
    for number in range(clients):
        client = federation.clients[number]
        # The server of real sites has no rows of theirs; with rows of its test set, the messages have the same sizes.
        few.append(shrink_client(client if len(client.x) else replace(client, x=x, y=y), number))
    server, traffic, missing = federation.server, federation.stats_traffic, federation.missing
    if server is not None:
        server = replace(server, x=server.x[:SAMPLES], y=server.y[:SAMPLES])
    return replace(
        federation,
        clients=few,
        test=(x[:SAMPLES], y[:SAMPLES]),
        server=server,
        client_names=(),
        text_groups=None,
        stats_traffic=None if traffic is None else traffic[:clients],
        missing=None if missing is None else missing[:clients],
    )


def shrink_client(client: ClientData, number: int) -> ClientData:
    """Return a client with only its first samples, and the first one of each class, because some messages are per class.

    Args:
        client: Data of the client.
        number: Number of the client.
    """
    rows = np.arange(min(SAMPLES, len(client.y)))
    if client.y.dim() == 1 and not client.y.is_floating_point():
        rows = np.union1d(rows, np.unique(client.y.cpu().numpy(), return_index=True)[1])
    chosen = torch.from_numpy(rows).to(client.y.device)
    return replace(client, id=number, x=take_rows(client.x, chosen), y=client.y[chosen])
