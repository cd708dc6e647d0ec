"""The model of a run from its configuration, and whether the method fits it, the data and the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unskew.config.experiment import Experiment, experiment, set_field
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

ModelLike = str | nn.Module | Callable[..., nn.Module]
AT_SERVER = ("server", "surrogate")
"""Diagnoses that look at the server only, not at the clients of a round."""
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def initial_spec(config: Experiment, federation: Federation, model: ModelLike | None, chosen: Method) -> ModelSpec:
    """The model's layout and initial weights, which depend on the seed only."""
    x = federation.test[0]

    def spec_of(module: nn.Module, head: str | None) -> ModelSpec:
        return ModelSpec(
            module,
            federation.shape,
            federation.classes,
            head,
            DTYPES[config.precision],
            torch.int64 if x.dtype == torch.int64 else None,
            autocast=config.precision == "bf16",
            per_token=federation.task == "language",
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "initial model"))
        try:
            module = resolve_model(
                config.model if model is None else model,
                federation.shape,
                federation.classes,
                config.model_options,
                federation.task,
            )
        except RuntimeError as error:  # such as a layer larger than the memory
            raise ConfigError(f"The model {config.model!r} cannot be built: {str(error).splitlines()[0]}") from error
        spec = spec_of(module, config.head)
        for rule in chosen.client:
            adapted, head = rule.adapt(module, spec.head_name)
            if adapted is not module:
                module, spec = adapted, spec_of(adapted, head)
    return spec


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


def as_wanted(federation: Federation, spec: ModelSpec) -> Federation:
    """The federation with its images as intensities from 0 to 1, if the model normalises them itself; else as it is."""
    if not spec.intensities:
        return federation
    known, x = federation.normalisation, federation.test[0]
    scale = known.scale if known is not None else 1 / 255 if x.dtype == torch.uint8 else 1.0
    channels = x.shape[1]
    return replace(federation, normalisation=Normalisation((0.0,) * channels, (1.0,) * channels, scale))


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


def layers_of(
    model: str, shape: str | None, classes: int | None, split: int | None, sets: Sequence[str]
) -> list[dict[str, Any]]:
    """What ``unskew models MODEL`` shows: a row per layer, in order of depth. Embeddings, which are not counted, are layer 0.

    Args:
        model: A name or an import path.
        shape: Shape of one input, as ``3,32,32``, the default; for ``hf:NAME`` ``8``, eight tokens.
        classes: Number of classes; 10 by default, but without it ``hf:NAME`` is a language model.
        split: Layers in the body; by default all before the head.
        sets: ``model_options.NAME=VALUE`` and ``head=NAME``.

    Raises:
        ConfigError: There is no such model, or it does not take such inputs.
    """
    values: dict[str, Any] = {"model": model}
    for assignment in sets:
        set_field(values, assignment)
    if not {"model", "model_options", "head"} >= set(values):
        raise ConfigError("unskew models takes --set model_options.NAME=VALUE and --set head=NAME, no other field.")
    config = experiment(values)
    texts = config.model.startswith(HUB) and (shape is None or "," not in shape)
    shape = ("8" if texts else "3,32,32") if shape is None else shape
    try:
        sides = tuple(int(side) for side in shape.split(","))
    except ValueError:
        raise ConfigError(f"--shape {shape!r} is not a shape such as 3,32,32.") from None
    task = "language" if texts and classes is None else "classification"
    count = classes or (1 if task == "language" else 10)
    module = resolve_model(config.model, sides, count, config.model_options, task)
    ids = torch.int64 if texts else None
    groups = layer_groups(ModelSpec(module, sides, count, config.head, input_dtype=ids, per_token=task == "language"))
    body, _ = split_at(groups, -1 if split is None else split)
    first = 1 - sum(group.leading for group in groups)
    return [
        {
            "layer": number,
            "name": group.name,
            "with": list(group.layers if group.name not in group.layers else group.layers[1:]),
            "parameters": group.size,
            "buffers": sum(s.stop - s.start for s in group.buffers),
            "part": "body" if number - first < len(body) else "head",
        }
        for number, group in enumerate(groups, start=first)
    ]
