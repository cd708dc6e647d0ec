"""Models that serve single clients: the global model, a personal model, or one fine-tuned at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unskew.engines.base import Engine
from unskew.models.layer_groups import buffer_mask
from unskew.models.spec import ModelSpec, slices_mask
from unskew.protocol.messages import PERSONAL, PERSONAL_BUFFERS, ClientState
from unskew.protocol.rules import Method
from unskew.protocol.training_config import Buffers
from unskew.simulation.parameter_slices import complement_slices
from unskew.simulation.server import Server

Served = Iterator[tuple[Tensor, Tensor]]


def has_fine_tuning(method: Method) -> bool:
    """Return whether clients are fine-tuned from the final model."""
    return method.needs("final_training")


def has_personal_models(method: Method, spec: ModelSpec) -> bool:
    """Return whether clients have personal models.

    Args:
        method: Method of the run.
        spec: Layout of the model.
    """
    return has_fine_tuning(method) or keeps_client_state(method, spec)


def keeps_client_state(method: Method, spec: ModelSpec) -> bool:
    """Return whether clients keep models, or parts of them, from round to round.

    Args:
        method: Method of the run.
        spec: Layout of the model.
    """
    keeps = any(rule.has_personal_model for rule in method.client)
    return keeps or bool(method.sync and method.sync.local_slices(spec))


def serving_model(
    method: Method, spec: ModelSpec, buffers: Buffers, state: ClientState, v: Tensor, b: Tensor, personal: bool
) -> tuple[Tensor, Tensor]:
    """Return the model and the buffers that serve a client: the global ones, except for what the client keeps.

    Args:
        method: Method of the run.
        spec: Layout of the model.
        buffers: Handling of buffers; local buffers of the client are always used.
        state: State of the client; empty if it never took part.
        v: Global model, ``[d]``.
        b: Global buffers, ``[m]``.
        personal: Whether the client's personal model, or its local slices, replace the global model.
    """
    if buffers == "local" and state.buffers is not None:
        b = state.buffers
    if not personal:
        return v, b
    slices = method.sync.local_slices(spec) if method.sync is not None else ()
    if state.model is not None:
        v = torch.where(slices_mask(slices, len(v)).to(v.device), state.model.to(v.device), v)
    if slices and state.buffers is not None:
        sent = buffer_mask(spec, complement_slices(slices, len(v))).to(b.device)
        b = torch.where(sent, b, state.buffers.to(b.device))
    for rule in method.client:
        own = state.rules.get(rule.name, {})
        v, b = own.get(PERSONAL, v), own.get(PERSONAL_BUFFERS, b)
    return v, b


def stored_models(server: Server, clients: Sequence[int], personal: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Build the models that serve clients, see ``serving_model``; new clients get the global model, or their initial one.

    Args:
        server: Server after the last round.
        clients: Clients to serve.
        personal: Whether personal models, or local slices, replace the global model.

    Yields:
        The model of each client.
    """
    setup, final = server.setup, server.selection.evaluated
    for client in clients:
        state = ClientState.of(server.clients.store.get(client))
        model = server.broadcaster.model_for(client, final)
        yield serving_model(setup.method, setup.spec.of_client(client), setup.buffers, state, *model, personal)


def fine_tuned_models(
    server: Server, engine: Engine, round: int, at_once: int, clients: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fine-tune each client from the final model in one more local training, which sends nothing to the server.

    If the result is not finite, the client is served by its model before fine-tuning.

    Args:
        server: Server at the end of the run.
        engine: Engine of the run.
        round: Round number of this training; an unused number, so that batches and random numbers are new.
        at_once: Maximum number of clients that are trained together.
        clients: Clients to fine-tune.

    Yields:
        Model ``[d]`` and buffers ``[m]`` of each client, in order.
    """
    for first in range(0, len(clients), at_once):
        part = clients[first : first + at_once]
        create, final = server.broadcaster.final_broadcast, server.selection.evaluated
        updates = engine.train([create(round, client, final) for client in part])
        for update, before in zip(updates, stored_models(server, part, personal=True), strict=True):
            yield (update.report["v"], update.buffers) if update.is_finite() else before
