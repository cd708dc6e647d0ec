"""Federated sums over sites: one message in plain, or a masked sum of which the server sees only the total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unskew.deployment.secagg import exact_sums
from unskew.deployment.secagg.protocol import LEAST
from unskew.deployment.secagg.roster import is_signed
from unskew.deployment.server.data_exchange import MOST, request_all
from unskew.deployment.server.masked_sum import (
    MaskedSum,
    ReadySite,
    SumReopenedError,
    UnmaskingError,
    WrongSharesError,
    parse_parts,
    ready_site,
)
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.fields import LARGEST_NUMBER, read_integer, read_number
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import decode_hidden, decode_sums, encode_requests, requests_key, signed_reply
from unskew.deployment.wire.tensor_codec import NAMES, InvalidMessageError, printable
from unskew.errors import EngineError
from unskew.sums.base import SumRequest, Sums
from unskew.sums.exchange import ClientLeftError, num_bytes, total
from unskew.sums.registry import SUMS
from unskew.tasks.coefficients import NoEstimateError

TRIES = 3
"""Number of attempts if too few sites remain to open a masked sum."""


class SiteExchange:
    """Exchange of sums over sites.

    Args:
        sites: Connected sites.
        num_samples: Number of training samples of each client that takes part, in order.
        masked: Whether the server may see only sums over all sites.
        roster: Public signing keys, by client, for masked sums.

    Attributes:
        traffic: Bytes that each client sent and received, ``[K, 2]``.
        replies: Summands of each client in the last exchange; empty under secure aggregation.
        hidden: Positions of the counts that each client has not sent because they are small, likewise.
    """

    def __init__(self, sites: SiteManager, num_samples: Mapping[int, int], masked: bool, roster: Mapping[int, Any]):
        self.sites, self.masked, self.roster = sites, masked, roster
        self.num_samples = dict(num_samples)
        self.traffic = np.zeros((len(num_samples), 2), np.int64)
        self.replies: dict[int, list[Sums]] = {}
        self.hidden: dict[int, list[dict[str, list[int]]]] = {}

    @property
    def clients(self) -> list[int]:
        """Clients that take part, in order."""
        return [*self.num_samples]

    def __call__(self, requests: Sequence[SumRequest]) -> list[Sums]:
        """Return the sums over all sites for each request.

        Args:
            requests: Requests that every site answers in one message.

        Raises:
            ClientLeftError: If a site was excluded because its reply is invalid; call again without it.
            EngineError: If a site does not allow a request, or too few sites reply.
        """
        names = [request.kind for request in requests]
        self.sites.log("statistics requested", kinds=names, requests=[request.digest for request in requests])
        sums = self._masked(requests) if self.masked else self._plain(requests)
        asked = sum(num_bytes(request.tensors) for request in requests)
        sent = [sums] * len(self.clients) if self.masked else [*self.replies.values()]
        self.traffic = self.traffic + np.array([[sum(map(num_bytes, own)), asked] for own in sent], np.int64)
        return sums

    def _plain(self, requests: Sequence[SumRequest]) -> list[Sums]:
        def take(client: int, frame: Frame) -> list[Sums]:
            self._check_not_refused(client, frame, requests)
            proof = signed_reply(self.sites.run, key, frame)
            if self.roster and not is_signed(self.roster, client, proof, frame.config.get("signature")):
                raise InvalidMessageError("its sums are not signed by the key in the roster")
            sums = decode_sums(frame, requests, self.num_samples[client])
            hidden[client] = decode_hidden(frame, requests)
            loss = read_number(frame.config, "epsilon", 0.0, LARGEST_NUMBER)
            count = sum(len(some) for one in hidden[client] for some in one.values())
            self.sites.log("statistics received", client, digest=proof[-1], hidden=count, epsilon=loss)
            return sums

        frame, hidden = encode_requests(requests), dict[int, list[dict[str, list[int]]]]()
        key = requests_key(str(self.sites.connection.header["digest"]), requests)
        self.replies = request_all(self.sites, dict.fromkeys(self.clients, frame), "sums", take)
        self.hidden = dict(sorted(hidden.items()))
        if len(self.replies) < len(self.num_samples):
            self.num_samples = {k: self.num_samples[k] for k in self.replies}
            self.traffic = np.zeros((len(self.num_samples), 2), np.int64)
            raise ClientLeftError("a site was excluded")
        return total(requests, self.replies.values())

    def _masked(self, requests: Sequence[SumRequest]) -> list[Sums]:
        if len(self.clients) < LEAST:
            raise EngineError(f"Masked sums need at least {LEAST} sites, but there are {len(self.clients)}.")
        wanted = [("sums", "int64", (exact_sums.encoded_size(requests),))]
        for _ in range(TRIES):
            summation = MaskedSum(self.sites, -1, len(self.clients), self.roster)
            owners: dict[str, int] = {}

            def take(
                client: int, frame: Frame, session: str = summation.session, owners: dict[str, int] = owners
            ) -> ReadySite:
                self._check_not_refused(client, frame, requests)
                if frame.kind != "ready" or read_integer(frame.config, "client") != client:
                    raise InvalidMessageError(f"its kind is {frame.kind[:40]!r}, but its sums must be masked")
                parts = parse_parts(frame.config)
                if [(part.name, NAMES[part.dtype], part.shape) for part in parts] != wanted:
                    raise InvalidMessageError("the layout of its sums does not match the request")
                return ready_site(client, frame, parts, (self.sites.run, -1, session), self.roster, owners)

            try:
                opened = summation.of(dict.fromkeys(self.clients, encode_requests(requests)), take)
            except (WrongSharesError, UnmaskingError) as error:
                reason = "; ".join(text for text, _ in getattr(error, "guilty", {}).values())
                self.sites.warn(f"The sums could not be opened{': ' if reason else ''}{reason}; they are asked again.")
                continue
            except SumReopenedError as error:
                raise EngineError(
                    f"These sums were opened before over {error}, of which some are missing. Start the command again when "
                    "they are back. Otherwise, the administrators of the sites can run unskew deploy forget site.yaml."
                ) from error
            names = [self.sites.name(k) for k in opened.clients]
            self.sites.log("sum opened", sites=names, requests=[request.digest for request in requests])
            sums = exact_sums.decode(requests, opened.tensors["sums"].numpy())
            for request, found in zip(requests, sums, strict=True):
                counts = SUMS[request.kind].cells(request)  # with noise, they may be negative
                found |= {name: found[name].clamp(min=0) for name in counts}
            return sums
        raise EngineError(
            f"The sums over all {len(self.clients)} sites could not be opened, because some do not reply or report wrong "
            "shares. Start the command again when they are back."
        )

    def _check_not_refused(self, client: int, frame: Frame, requests: Sequence[SumRequest]) -> None:
        """Stop with the reason if a site has refused sums that cannot be computed without it.

        Raises:
            NoEstimateError: If it has refused the sums for coefficients, which few rows would determine.
            EngineError: If it has refused a masked sum, or a statistic that its administrator must allow.
            InvalidMessageError: If it has refused another sum; the site is excluded.
        """
        if frame.kind != "refused":
            return
        reason = f"{self.sites.name(client)} refused: {printable(frame.config.get('reason'))}"
        if all(request.kind == "fisher" for request in requests):
            raise NoEstimateError(reason)
        if self.masked or any(SUMS[request.kind].permission for request in requests):
            raise EngineError(reason)
        raise InvalidMessageError(reason)


def reported_sizes(frames: Mapping[int, Frame]) -> dict[int, int]:
    """Return the number of training samples of each client, as its site reported it first.

    Args:
        frames: First report of each client.
    """
    return {k: read_integer(frame.config, "num_samples", MOST) for k, frame in frames.items()}
