"""Exchange before the first round: the sites' data statistics, and the payloads of data rules in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation
from unskew.deployment.server import round_requests
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.fields import read_integer, read_number, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import (
    InvalidMessageError,
    check_norm,
    check_records,
    decode_record,
    encode_record,
    printable,
)
from unskew.errors import EngineError
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import ClientPayloads, PreparedData
from unskew.protocol.messages import Tensors
from unskew.protocol.rules import DataRule, Method

MOST = 1 << 27
"""Maximum number of samples of a site; the server stores one label for each."""


def remote_client(client: int, frame: Frame, federation: Federation, parameters: int | None = None) -> ClientData:
    """Build the server's view of a client: placeholder labels with the reported class counts, without inputs.

    Args:
        client: Number of the client.
        frame: Report of its site.
        federation: The experiment's data as loaded at the server.
        parameters: Number of parameters of the server's model, which the site's model must match; None skips this check.

    Raises:
        InvalidMessageError: If the report is invalid or does not match what the server expects.
    """
    if frame.kind != "client_info" or read_integer(frame.config, "client") != client:
        raise InvalidMessageError("it is not a report of this client's data")
    built = frame.config.get("parameters")
    if parameters is not None and built != parameters:
        raise InvalidMessageError(
            f"its model has {printable(built)[:40]} parameters, not {parameters}; install the same versions everywhere"
        )
    task = federation.objective
    counted = "counts" in task.provides and federation.counts_known
    counts = read_class_counts(frame, federation.classes if counted else 0)
    num_samples = read_integer(frame.config, "num_samples")
    x, y = federation.test
    return ClientData(
        client,
        x[:0],
        placeholder_labels(counts, num_samples, y),
        x[:0],
        y[:1].expand(read_integer(frame.config, "held_out", MOST), *y.shape[1:]),
    )


def read_class_counts(frame: Frame, classes: int) -> Tensor:
    """Return a site's number of samples per class, ``[C]``.

    Args:
        frame: Message that was received.
        classes: Number of classes.

    Raises:
        InvalidMessageError: If the counts are missing or invalid.
    """
    check_records(frame, ("client_info",) if classes else ())
    if not classes:
        return torch.zeros(0, dtype=torch.int64)
    counts = decode_record(frame, "client_info").get("class_counts")
    if counts is None or counts.dtype != torch.int64 or tuple(counts.shape) != (classes,) or (counts < 0).any():
        raise InvalidMessageError(f"it does not report sample counts of {classes} classes")
    return counts


def placeholder_labels(counts: Tensor, num_samples: int, like: Tensor) -> Tensor:
    """Create placeholder targets with the given counts: ``[n]`` for classes, or ``[n, L]`` for labels.

    Args:
        counts: Samples per class or label, ``[C]``.
        num_samples: Number of samples.
        like: Tensor with the dtype of the targets.

    Raises:
        InvalidMessageError: If the counts do not match the number of samples.

    >>> placeholder_labels(torch.tensor([2, 0, 1]), 3, torch.zeros(0, dtype=torch.int64)).tolist()
    [0, 0, 2]
    """
    most = MOST // max(1, len(counts) if like.dim() > 1 else 1)
    if not 0 < num_samples <= most:
        raise InvalidMessageError(f"it reports {num_samples} samples; a site must have 1 to {most}")
    if len(counts) and int(counts.max()) > num_samples:
        raise InvalidMessageError(
            f"it reports {int(counts.max())} samples of one class, but {num_samples} samples in all"
        )
    if not len(counts):
        return like[:1].expand(num_samples, *like.shape[1:])  # without labels only the number of samples is known
    if like.dim() == 1:
        if int(counts.sum()) != num_samples:
            raise InvalidMessageError(
                f"its class counts add up to {int(counts.sum())}, but it reports {num_samples} samples"
            )
        return torch.repeat_interleave(torch.arange(len(counts)), counts).to(like.dtype)
    return (torch.arange(num_samples)[:, None] < counts[None, :]).to(like.dtype)


def federation_of_sites(
    reference: Federation, frames: dict[int, Frame], names: Sequence[str], rehearsal: bool, spec: ModelSpec
) -> Federation:
    """Build the federation as the server sees it.

    Args:
        reference: The experiment's data as loaded at the server.
        frames: Report of each client's site; invalid ones are ignored.
        names: Name of each client's site; empty if it has not joined yet. Its client has no samples then.
        rehearsal: Whether the sites train on the experiment's partition instead of their own data.
        spec: Layout of the model, whose number of parameters every site's model must match.
    """
    x, y = reference.test
    clients = [ClientData(k, x[:0], y[:0], x[:0], y[:0]) for k in range(len(names))]
    for client, frame in frames.items():
        try:
            clients[client] = remote_client(client, frame, reference, spec.of_client(client).size)
        except InvalidMessageError:
            continue  # a client without samples; its updates state other numbers and are rejected
    if rehearsal:
        return replace(reference, clients=clients)
    return replace(
        reference,
        clients=clients,
        client_names=tuple(names) if len(set(names)) == len(frames) == len(names) else (),
        partition="as the sites hold it",
        fingerprint="",
        text_groups=None,
    )


def run_data_rules(
    method: Method, prepared: PreparedData, seed: int, sites: SiteManager, norm: float, spec: ModelSpec
) -> PreparedData:
    """Run the three steps of each data rule, exchanging messages with the sites between them.

    Args:
        method: Method of the run.
        prepared: Data as the server sees them.
        seed: Random seed of the run.
        sites: Connected sites.
        norm: Largest accepted norm of a tensor.
        spec: Layout of the model.
    """
    for index, rule in enumerate(method.data):
        take = partial(_contribution, rule=rule, norm=norm, spec=spec)
        prepared = _run_data_rule(index, rule, prepared, seed, sites, take)
    return prepared


def _run_data_rule(
    rule_index: int, rule: DataRule, prepared: PreparedData, seed: int, sites: SiteManager, take: Any
) -> PreparedData:
    """Run one data rule, as ``apply_data_rule`` does, with the client-side steps replaced by messages to the sites."""
    federation = prepared.federation
    fields = {"rule_index": rule_index, "mean_size": prepared.mean_size}
    asks = type(rule).client_payload is not DataRule.client_payload
    requests = {k: Frame("contribute", fields) for k in range(len(federation.clients)) if asks}
    replies = request_all(sites, requests, "contributions", take)
    sent = {k: tensors for k, (tensors, _, _) in replies.items() if tensors}
    digest = "-".join(digest_part for _, _, digest_part in replies.values() if digest_part)
    metrics = [part for tensors, part, _ in replies.values() if tensors]
    payloads = ClientPayloads(sent, rule.summarize_payloads(metrics) if metrics else {}, digest)
    server_payload = rule.server_payload(sent, prepared.federation_info, seed)
    common = encode_record("common", server_payload.common)
    messages = {
        k: Frame(
            "receive",
            {"rule_index": rule_index},
            {},
            {**encode_record("share", server_payload.shares.get(k, {})), **common},
        )
        for k in range(len(federation.clients))
    }
    after = request_all(sites, messages, "shares", lambda k, frame: remote_client(k, frame, federation))
    return prepared.received(rule.name, payloads, server_payload, lambda client, share: after.get(client.id, client))


def request_all(sites: SiteManager, requests: dict[int, Frame], what: str, take: Any) -> dict[int, Any]:
    """Send requests and return the replies in client order; a site without a valid reply is excluded from the run.

    Args:
        sites: Connected sites.
        requests: Request for each client.
        what: Name of the request, for the status.
        take: Validates and converts a reply.

    Raises:
        EngineError: If too few sites reply.
    """
    replies = dict(round_requests.ask_sites(sites, requests, what, take, strict=True))
    for client in sorted(requests.keys() - replies.keys() - {*sites.excluded}):
        sites.fault(client, f"its reply to {what} is invalid", last=True)
    if requests and len(replies) < max(1, sites.round_policy.min_updates):
        raise EngineError(
            f"Only {len(replies)} of {len(requests)} sites have sent a valid reply before the first round."
        )
    return dict(sorted(replies.items()))


def _contribution(
    client: int, frame: Frame, rule: DataRule, norm: float, spec: ModelSpec
) -> tuple[Tensors, dict[str, float], str]:
    if frame.kind != "contribution":
        raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'contribution'")
    check_records(frame, ("sent",))
    tensors = decode_record(frame, "sent")
    for name, tensor in tensors.items():
        check_norm(f"sent/{name}", tensor, norm)
    rule.check_sent(tensors, None, spec)
    ranges = rule.payload_metrics if tensors else {}
    if frame.metrics.keys() != ranges.keys():
        raise InvalidMessageError(
            f"it describes its data by {printable(sorted(frame.metrics))[:200]} instead of {sorted(ranges)}"
        )
    metrics = {name: read_number(frame.metrics, name, *bounds) for name, bounds in ranges.items()}
    return tensors, metrics, read_text(frame.config, "payload_digest")
