"""Before the first round: what the server is told of the sites' data, and what data rules send both ways."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import FIGURES, read_class_counts, read_integer, read_number, read_text
from unskew.deployment.wire.tensor_codec import (
    InvalidMessageError,
    check_norm,
    check_records,
    decode_record,
    encode_record,
    printable,
)
from unskew.errors import EngineError
from unskew.protocol.data_preparation import ClientPayloads, PreparedData, ServerPayload, Workspace
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors
from unskew.protocol.rules import DataRule, Method
from unskew.simulation.update_buffer import TAKEN

LONGEST = 2000
"""Characters of what a site says of what it has sent."""
MOST = 1 << 27
"""Samples of a site: for each of them the server keeps its class."""


def remote_client(client: int, frame: Frame, federation: Federation, parameters: int | None = None) -> ClientData:
    """A client as the server knows it: how many samples of which class, and none of them.

    Args:
        client: Its number.
        frame: What its site reports.
        federation: The data that the experiment names at the server.
        parameters: Parameters of the server's model, which the site must have built, too; None checks no model.

    Raises:
        InvalidMessageError: The site reports other data than the server expects.
    """
    if frame.kind != "facts" or read_integer(frame.config, "client") != client:
        raise InvalidMessageError("it does not say what it holds")
    built = frame.config.get("parameters")
    if parameters is not None and built != parameters:
        raise InvalidMessageError(
            f"its model has {printable(built)[:40]} parameters, not {parameters}; install the same versions everywhere"
        )
    task = federation.objective
    counts = read_class_counts(frame, federation.classes if task.labeled else 0)
    examples = read_integer(frame.config, "examples")
    x, y = federation.test
    return ClientData(
        client,
        x[:0],
        placeholder_labels(counts, examples, y),
        x[:0],
        y[:1].expand(read_integer(frame.config, "held_out"), *y.shape[1:]),
    )


def placeholder_labels(counts: Tensor, examples: int, like: Tensor) -> Tensor:
    """Targets ``[n]`` with so many of each class, or ``[n, L]`` with so many of each label.

    Args:
        counts: Samples per class or label, ``[C]``.
        examples: Number of samples.
        like: Tensor with the data type of the targets.

    Raises:
        InvalidMessageError: The counts do not add up to the number of samples.

    >>> placeholder_labels(torch.tensor([2, 0, 1]), 3, torch.zeros(0, dtype=torch.int64)).tolist()
    [0, 0, 2]
    """
    if not 0 < examples <= MOST:
        raise InvalidMessageError(f"it says that it has {examples} samples; a site has from 1 to {MOST}")
    if len(counts) and int(counts.max()) > examples:
        raise InvalidMessageError(f"it counts {int(counts.max())} samples of a class, but has {examples}")
    if not len(counts):
        return like[:1].expand(examples, *like.shape[1:])  # nothing can be counted: only how many there are
    if like.dim() == 1:
        if int(counts.sum()) != examples:
            raise InvalidMessageError(f"it counts {int(counts.sum())} samples by class, but {examples} in all")
        return torch.repeat_interleave(torch.arange(len(counts)), counts).to(like.dtype)
    return (torch.arange(examples)[:, None] < counts[None, :]).to(like.dtype)


def federation_of_sites(
    reference: Federation, frames: dict[int, Frame], names: dict[int, str], rehearsal: bool, total: int, parameters: int
) -> Federation:
    """The federation as the server knows it.

    Args:
        reference: The data that the experiment names at the server.
        frames: What each client's site said.
        names: Of the sites.
        rehearsal: Whether the sites hold what the experiment's partition gives them.
        total: Clients of the experiment; those whose site has not come hold nothing yet.
        parameters: Parameters of the model, which all sites must have built.

    Raises:
        EngineError: A site sends an invalid report.
    """
    x, y = reference.test
    clients = [ClientData(k, x[:0], y[:0], x[:0], y[:0]) for k in range(total)]
    for client, frame in frames.items():
        try:
            clients[client] = remote_client(client, frame, reference, parameters)
        except InvalidMessageError as error:
            raise EngineError(
                f"{names[client]} (client {client}): its data statistics were rejected because {error}."
            ) from error
    if rehearsal:
        return replace(reference, clients=clients)
    return replace(
        reference,
        clients=clients,
        client_names=tuple(names[k] for k in frames) if len(set(names.values())) == total else (),
        partition="as the sites hold it",
        fingerprint="",
        text_groups=None,
    )


def run_data_rules(method: Method, prepared: PreparedData, seed: int, sites: SiteManager, norm: float) -> PreparedData:
    """The three steps of each data rule, with a message between them.

    Args:
        method: Method of the run.
        prepared: Data as the server knows them.
        seed: Seed of the run.
        sites: Connected sites.
        norm: Largest accepted norm of a tensor.
    """
    for index, rule in enumerate(method.data):
        prepared = _one(index, rule, prepared, seed, sites, norm)
    return prepared


def _one(
    place: int, rule: DataRule, prepared: PreparedData, seed: int, sites: SiteManager, norm: float
) -> PreparedData:
    """One data rule; its own ``run_data_rules`` runs, with messages instead of what happens at clients."""
    after: dict[int, ClientData] = {}

    def client_payload(prepared: PreparedData, seed: int, workspace: Workspace) -> ClientPayloads:
        clients = prepared.federation.clients
        mean = max(1, sum(len(c.y) + len(c.y_test) for c in clients) // len(clients))
        requests = {
            k: Frame("contribute", {"place": place, "mean_size": mean})
            for k in range(len(clients))
            if type(rule).client_payload is not DataRule.client_payload
            and rule.for_client(k, len(clients), mean) is not None
        }
        replies = request_all(sites, requests, "contributions", partial(_contribution, norm=norm))
        sent = {k: tensors for k, (tensors, _, _) in replies.items() if tensors}
        digest = "-".join(digest_part for _, _, digest_part in replies.values())
        return ClientPayloads(sent, _about([about for _, about, _ in replies.values()]), digest)

    def server_payload(sent: dict[int, Tensors], facts: FederationInfo, seed: int) -> ServerPayload:
        dealt = type(rule).server_payload(rule, sent, facts, seed)
        common = encode_record("common", dealt.common)
        messages = {
            k: Frame("receive", {"place": place}, {}, {**encode_record("share", dealt.shares.get(k, {})), **common})
            for k in range(facts.clients)
        }
        federation = prepared.federation
        after.update(request_all(sites, messages, "shares", lambda k, frame: remote_client(k, frame, federation)))
        return dealt

    def apply_payload(client: ClientData, share: Tensors) -> ClientData:
        return after[client.id]

    over_sites = copy.copy(rule)
    for step in (client_payload, server_payload, apply_payload):
        object.__setattr__(over_sites, step.__name__, step)  # rules are frozen: this one is a copy
    return over_sites.prepare(prepared, seed)


def request_all(sites: SiteManager, asked: dict[int, Frame], what: str, take: Any) -> dict[int, Any]:
    """The answers of all that are asked.

    Args:
        sites: Connected sites.
        asked: Request to each client.
        what: Name of the request, for the status.
        take: Validates and converts a reply.

    Raises:
        EngineError: A site does not reply.
    """
    replies = dict(sites.ask(asked, what, take, strict=True))
    missing = [sites.name(k) for k in asked if k not in replies]
    if missing:
        raise EngineError(f"Before the first round every site must answer; {', '.join(missing[:10])} did not.")
    return dict(sorted(replies.items()))


def _contribution(client: int, frame: Frame, norm: float) -> tuple[Tensors, dict[str, Any], str]:
    if frame.kind != "contribution":
        raise InvalidMessageError(f"it is called {frame.kind[:40]!r} and no contribution")
    check_records(frame, ("sent",))
    tensors = decode_record(frame, "sent")
    for name, tensor in tensors.items():
        check_norm(f"sent/{name}", tensor, norm)
    said = {
        n.removeprefix("about."): read_text(frame.config, n)[:LONGEST] for n in frame.config if n.startswith("about.")
    }
    figures = {name: read_number(frame.figures, name) for name in frame.figures}
    if taken := TAKEN & {*said, *figures} or len(said) + len(figures) > FIGURES:
        raise InvalidMessageError(f"what it says of it has too many names, or such as the run's own: {taken}")
    return tensors, {**figures, **said}, read_text(frame.config, "made")


def _about(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the sites' reports: numbers are added, except that the largest epsilon counts.

    Texts are those of the first site.
    """
    about: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, str):
                about.setdefault(name, value)
            elif name == "epsilon":
                about[name] = max(value, about.get(name, 0.0))
            else:
                about[name] = about.get(name, 0) + (int(value) if value == int(value) else value)
    return about
