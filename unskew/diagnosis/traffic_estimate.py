"""Traffic estimate of a method, measured in a few one-step rounds on two small clients."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from unskew.data.federation import ClientData
from unskew.diagnosis.features import AdviceContext
from unskew.protocol.rules import Method
from unskew.runs.run import run_experiment

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
    light = config.model_copy(update=changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about the settings above, not about the user's
        result = run_experiment(light, federation=tiny, model=setting.model, method=replace(method, data=()))
    # The first round is atypical, because some tensors do not exist yet, such as a method's first variates.
    first, last = (row["bytes_up"] + row["bytes_down"] for row in (result.history[0], result.history[-1]))
    each = (last - first) / (ROUNDS - 1) / len(few) * max(1, round(config.participation * len(fed.clients)))
    inputs = x[:1].numel() * x.element_size() + 1
    num_images = sum(
        (getattr(rule, "n_syn", None) or float(fed.sizes.mean())) for rule in method.data if rule.generates_data
    )
    return 2 * num_images * inputs * len(fed.clients), each


def shrink_client(client: ClientData, number: int) -> ClientData:
    """Return a client with only its first samples.

    Args:
        client: Data of the client.
        number: Number of samples to keep.
    """
    n = min(SAMPLES, len(client.y))
    return replace(client, id=number, x=client.x[:n], y=client.y[:n])
