"""Whether a method fits the data, the model, the optimizer and the network of a run, before anything is trained."""

from __future__ import annotations
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
import torch
from torch import nn
from unskew.config.experiment import Experiment
from unskew.config.reading import experiment, set_field
from unskew.data.checks import check_tokens
from unskew.data.federation import Federation
from unskew.data.normalisation import Normalisation
from unskew.errors import ConfigError, MethodConflict
from unskew.methods.fedavg import FedAvg
from unskew.protocol.rules import Method
from unskew.models.groups import layer_groups, split_at
from unskew.models.catalogue import HUB, resolve_model
from unskew.models.vector import ModelSpec
from unskew.seeding import derive
from unskew.runs.model import ModelLike, initial_spec


AT_SERVER = ("server", "surrogate")
"""Diagnoses that look at the server only, not at the clients of a round."""


def check_method(config: Experiment, federation: Federation, model: ModelLike | None, chosen: Method) -> ModelSpec:
    """Refuse, before anything is trained, a method that does not fit the data, the model, the optimizer or the server.

    Raises:
        ConfigError: It does not fit.
        MethodConflict: It needs single updates, which secure aggregation forbids.
    """
    check_task(chosen, federation)
    of_clients = [name for name in config.diagnose if name not in AT_SERVER]
    if config.secure_aggregation == "required":
        check_sums_suffice(chosen, of_clients)
    if config.network.delay != "none":
        check_delays(chosen, of_clients)
    if "surrogate" in config.diagnose and (federation.server is None or federation.server.in_domain):
        raise ConfigError(
            "diagnose=surrogate compares what a method learns from another data set at the server with what the test set "
            "would say; give --server NAME, the name of a data set."
        )
    for data_rule in chosen.data:
        data_rule.check_data(federation)
    for rule in chosen.client:
        rule.check(federation, config.training.plain_sgd)
    spec = initial_spec(config, federation, model, chosen)
    tokens = getattr(spec.module, "tokens", None)
    if isinstance(tokens, int):
        for k, client in enumerate(federation.clients):
            check_tokens(client.x, tokens, f"client {k}")
        check_tokens(federation.test[0], tokens, "the test set")
    if chosen.sync is not None:
        chosen.sync.travels(0, 0, None, spec)
    if chosen.server is not None:
        chosen.server.check_server(federation, spec)
    return spec


def check_task(chosen: Method, federation: Federation) -> None:
    """Refuse a task, or a kind of input, that a part of the method cannot be trained for.

    Raises:
        ConfigError: There is such a part.
    """
    task = federation.task
    for part in (*chosen.data, *chosen.client, chosen.sync, chosen.server):
        if part is not None and task not in part.tasks:
            reason = f", because {part.tasks_reason}" if part.tasks_reason else ""
            raise ConfigError(
                f"{part.name} cannot be trained for the task {task!r}{reason}. It is for: {', '.join(part.tasks)}."
            )
        if part is not None and part.makes_inputs and federation.test[0].dtype == torch.int64:
            raise ConfigError(f"{part.name} makes inputs of its own, and a text's tokens are no numbers to be changed.")


def check_sums_suffice(chosen: Method, diagnose: Sequence[str]) -> None:
    """Refuse what cannot be had if the server sees only the weighted sum of updates.

    The simulator forms that sum itself; the cryptography that hides single updates on real machines is not simulated.

    Raises:
        MethodConflict: A rule reads single updates.
        ConfigError: A diagnosis does.
    """
    readers = [rule.name for rule in chosen.client if rule.needs == "individual"]
    server = chosen.server or FedAvg()
    if server.needs == "individual":
        readers.append(server.name)
    if readers:
        raise MethodConflict(
            f"{readers[0]} reads the update of each single client, but secure_aggregation=required lets the server see "
            "only their weighted sum. Take a method that needs sums only (unskew methods shows which), or turn it off."
        )
    if diagnose:
        raise ConfigError(f"diagnose={diagnose[0]} looks at single updates, which secure_aggregation=required forbids.")


def check_delays(chosen: Method, diagnose: Sequence[str]) -> None:
    """Refuse what has no meaning if updates arrive in later rounds than they were sent out in.

    Raises:
        ConfigError: There is such a part.
    """
    late = [part.name for part in (*chosen.client, chosen.sync, chosen.server) if part is not None and part.synchronous]
    if late:
        raise ConfigError(f"{late[0]} needs the updates of a round in that round; it cannot be run with network.delay.")
    if diagnose:
        raise ConfigError(
            f"diagnose={diagnose[0]} compares the clients of one round; it cannot be run with network.delay."
        )
