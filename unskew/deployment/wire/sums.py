"""Federated sums in messages: requests of the server, and the summands of a site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from unskew.deployment.wire.digests import arrays_digest
from unskew.deployment.wire.fields import parse_json_field
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, check_records, decode_record, encode_record
from unskew.errors import DataError
from unskew.sums.base import SumRequest, Sums
from unskew.sums.registry import SUMS

MOST = 1000
"""Maximum number of requests in one message."""


def requests_key(experiment: str, requests: Sequence[SumRequest]) -> str:
    """Return the digest of an experiment and of requests for sums.

    Args:
        experiment: Digest of the experiment.
        requests: Requests of one message.
    """
    return hashlib.sha256(json.dumps([experiment, [request.digest for request in requests]]).encode()).hexdigest()


def encode_requests(requests: Sequence[SumRequest], **config: Any) -> Frame:
    """Return the message that asks a site for sums.

    Args:
        requests: Requests.
        **config: Further fields.
    """
    listed = json.dumps([[request.kind, dict(request.args)] for request in requests])
    arrays = {n: a for i, r in enumerate(requests) for n, a in encode_record(f"args.{i}", dict(r.tensors)).items()}
    return Frame("sums", {"requests": listed, **config}, {}, arrays)


def decode_requests(frame: Frame) -> list[SumRequest]:
    """Return the requests of a message.

    Args:
        frame: Message that was received.

    Raises:
        InvalidMessageError: If a request is invalid or its kind is unknown.
    """
    listed, requests = parse_json_field(frame.config, "requests"), []
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST:
        raise InvalidMessageError(f"it does not have 1 to {MOST} requests for sums")
    check_records(frame, [f"args.{i}" for i in range(len(listed))])
    for i, entry in enumerate(listed):
        try:
            kind, args = entry
        except (TypeError, ValueError) as error:
            raise InvalidMessageError("its requests for sums cannot be read") from error
        if kind not in SUMS or not isinstance(args, dict):
            raise InvalidMessageError(f"its sum {str(kind)[:40]!r} is unknown; install the same versions everywhere")
        requests.append(SumRequest(kind, args, decode_record(frame, f"args.{i}")))
    return requests


def encode_sums(sums: Sequence[Sums], **config: Any) -> Frame:
    """Return the reply of a site.

    Args:
        sums: Summands for each request.
        **config: Further fields.
    """
    arrays = {name: a for i, own in enumerate(sums) for name, a in encode_record(f"sum.{i}", own).items()}
    return Frame("sums", config, {}, arrays)


def decode_sums(frame: Frame, requests: Sequence[SumRequest], num_samples: int) -> list[Sums]:
    """Return the summands of a site's reply.

    Args:
        frame: Message that was received.
        requests: Requests that it answers.
        num_samples: Number of training samples of the site, which no count may exceed.

    Raises:
        InvalidMessageError: If the reply does not match the requests.
    """
    if frame.kind != "sums":
        raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'sums'")
    check_records(frame, [f"sum.{i}" for i in range(len(requests))])
    sums = [decode_record(frame, f"sum.{i}") for i in range(len(requests))]
    for request, own in zip(requests, sums, strict=True):
        kind = SUMS[request.kind]
        try:
            kind.check(request, own)
        except DataError as error:
            raise InvalidMessageError(str(error)) from error
        # A statistic that the site's administrator allows may have noise.
        if not kind.permission and any(bool((own[name] > num_samples).any()) for name in kind.cells(request)):
            raise InvalidMessageError(f"it counts more rows than its {num_samples} samples in {kind.name}")
    return sums


def decode_hidden(frame: Frame, requests: Sequence[SumRequest]) -> list[dict[str, list[int]]]:
    """Return the positions of counts that a site has not sent because they are small, by tensor, for each request.

    Args:
        frame: Reply of the site.
        requests: Requests that it answers.

    Raises:
        InvalidMessageError: If they cannot be read.
    """
    listed = parse_json_field(frame.config, "hidden")
    try:
        hidden = [{str(name): [int(at) for at in some] for name, some in one.items()} for one in listed]
        if len(hidden) != len(requests):
            raise ValueError
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidMessageError("its list of hidden counts cannot be read") from error
    return hidden


def signed_reply(run: str, key: str, frame: Frame) -> list[str]:
    """Return what a site signs of its reply: run, requests and content.

    Args:
        run: Identifier of the run.
        key: Digest from ``requests_key``.
        frame: The reply.
    """
    return ["sums", run, key, arrays_digest(frame.arrays)]
