"""Traffic estimate of a method, counted in a few one-step rounds on two small clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unskew.data.federation import ClientData
from unskew.diagnosis.features import AdviceContext
from unskew.protocol.rules import Method
from unskew.runs.run import run_experiment

ROUNDS = 11
"""So many that slices which travel every tenth round do so once."""
CLIENTS, SAMPLES = 2, 4


def estimate_traffic(setting: AdviceContext, method: Method) -> tuple[float, float]:
    """Bytes before training and in each round, up and down, over all clients that take part.

    What clients make before training is not made here: it is counted from its number and the size of an input.

    Args:
        setting: Data, model and configuration.
        method: Method to estimate.
    """
    fed, config = setting.federation, setting.config
    few = [shrink_client(fed.clients[k], number) for number, k in enumerate(range(min(CLIENTS, len(fed.clients))))]
    x, y = fed.test
    server = fed.server
    if server is not None:
        server = replace(server, x=server.x[:SAMPLES], y=server.y[:SAMPLES])
    tiny = replace(fed, clients=few, test=(x[:SAMPLES], y[:SAMPLES]), server=server, client_names=(), text_groups=None)
    changes: dict[str, Any] = {
        "rounds": ROUNDS,
        "clients": len(few),
        "participation": 1.0,
        "local_steps": 1,
        "local_epochs": None,
        "batch_size": 2,
        "eval_every": ROUNDS,
        "eval_clients": 0,
        "engine": "inline",
        "base_run": True,
        "early_stopping": None,
        "lr_schedule": "constant",
        "network": type(config.network)(),
        "trackers": (),
        "save_samples": False,
        "diagnose": (),
        "start_from": None,
        "target": None,
    }
    result = run_experiment(
        config.model_copy(update=changes), federation=tiny, model=setting.model, method=replace(method, data=())
    )
    # The first round may lack what there is not yet, as a method's first variates.
    first, last = (row["bytes_up"] + row["bytes_down"] for row in (result.history[0], result.history[-1]))
    each = (last - first) / (ROUNDS - 1) / len(few) * max(1, round(config.participation * len(fed.clients)))
    inputs = x[:1].numel() * x.element_size() + 1
    num_images = sum(
        (getattr(rule, "n_syn", None) or float(fed.sizes.mean())) for rule in method.data if rule.generates_data
    )
    return 2 * num_images * inputs * len(fed.clients), each


def shrink_client(client: ClientData, number: int) -> ClientData:
    """A client with its first few samples.

    Args:
        client: Data of the client.
        number: Number of samples to keep.
    """
    n = min(SAMPLES, len(client.y))
    return replace(client, id=number, x=client.x[:n], y=client.y[:n])
