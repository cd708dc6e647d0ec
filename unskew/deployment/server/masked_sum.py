"""Server side of secure aggregation: relays the sites' keys, shares and signatures, and opens only the sum."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from unskew.deployment.secagg import crypto
from unskew.deployment.secagg.fixed_point import SumPart, dequantize, step_size
from unskew.deployment.secagg.protocol import (
    LEAST,
    parts_as_text,
    ready_message,
    survivors_message,
    threshold,
    view_digest,
)
from unskew.deployment.secagg.roster import is_signed
from unskew.deployment.server import round_requests
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.fields import parse_json_field, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import DTYPES, InvalidMessageError, check_records, decode_record
from unskew.errors import UnskewError


@dataclass(frozen=True)
class ReadySite:
    """Reply of a site that has trained.

    Attributes:
        parts: Layout of its summands.
        keys: Its public keys, for masks and for encrypted messages, in hexadecimal digits.
        signature: Its signature of the keys.
        opened: Clients whose sum of this round it has opened before, for example before the server was killed; or empty.
        usable: Whether its update is finite and not too large.
        model: Digest of what it has received.
    """

    parts: tuple[SumPart, ...] = ()
    keys: tuple[str, str] = ("", "")
    signature: str = ""
    opened: tuple[int, ...] = ()
    usable: bool = True
    model: str = ""


@dataclass(frozen=True)
class DealtShares:
    """Shares that a site distributed.

    Attributes:
        sealed: Encrypted shares, by receiver.
        commitments: Commitments to the shares of its seed and of its secret key, and its signature of them.
    """

    sealed: dict[str, str]
    commitments: tuple[list[str], list[str], str]

    def points(self, which: int) -> list[bytes]:
        """Return the commitments to the seed's shares (0) or to the secret key's (1)."""
        return [bytes.fromhex(point) for point in self.commitments[which]]


@dataclass(frozen=True)
class OpenedSum:
    """An unmasked sum.

    Attributes:
        clients: Clients whose updates are in the sum.
        unusable: Clients whose updates were not finite or too large.
        tensors: The sums, by name.
        error: Bound of the rounding error of an entry of the summed updates; 0 if sites send integers.
    """

    clients: tuple[int, ...] = ()
    unusable: tuple[int, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: float = 0.0


class UnmaskingError(UnskewError):
    """Too few sites remain to open the sum."""


class SumReopenedError(UnskewError):
    """The sum of this round was opened before, over sites of which some are missing now."""


class WrongSharesError(UnskewError):
    """Sites have received wrong shares, so the sum must be restarted without their senders.

    Args:
        guilty: Sites to leave out, with the reason, and whether it is certainly their fault.
    """

    def __init__(self, guilty: dict[int, tuple[str, bool]]):
        super().__init__("wrong shares")
        self.guilty = guilty


def find_wrong_dealers(
    accusations: Mapping[int, Collection[int]], sites: int, name: Callable[[int], str]
) -> WrongSharesError:
    """Decide who sent wrong shares, assuming that fewer than a third of the sites lie.

    A site accused by more others than can lie has sent wrong shares. A site that accuses more others than can lie is itself
    lying. Otherwise the fault is undecidable: the accused site is left out of this sum, and the message names both.

    Args:
        accusations: Senders of wrong shares that each site reports, by site.
        sites: Number of sites of the sum.
        name: Returns the name of a site for messages.
    """
    spare = max(1, sites - threshold(sites))
    by = Counter(k for wrong in accusations.values() for k in wrong)
    guilty = {k: (f"its shares are wrong, as {count} sites report", True) for k, count in by.items() if count > spare}
    left = {k: {*wrong} - {*guilty} for k, wrong in accusations.items() if k not in guilty}
    for k, wrong in left.items():
        if len(wrong) > spare:
            guilty[k] = f"it reports wrong shares of {len(wrong)} other sites, more than can be at fault", True
    for k, wrong in left.items():
        for accused in () if k in guilty else wrong - {*guilty}:
            guilty[accused] = f"{name(k)} reports that its shares are wrong; one of the two sites is at fault", False
    return WrongSharesError(guilty)


def parse_parts(config: dict[str, Any]) -> tuple[SumPart, ...]:
    """Parse the layout of a site's summands.

    Args:
        config: Fields of the site's message.

    Raises:
        InvalidMessageError: If the layout is missing or invalid.
    """
    parts, listed = [], parse_json_field(config, "parts")
    for entry in listed if isinstance(listed, list) else [listed]:
        try:
            name, dtype, shape = entry
            if not isinstance(shape, list):
                raise TypeError
            parts.append(SumPart(str(name), DTYPES[dtype], tuple(int(n) for n in shape)))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InvalidMessageError("the layout of its update cannot be read") from error
        if min(parts[-1].shape, default=0) < 0:
            raise InvalidMessageError(f"{str(name)[:60]!r} has an invalid shape")
    return tuple(parts)


def ready_site(
    client: int,
    frame: Frame,
    parts: tuple[SumPart, ...],
    topic: tuple[str, int, str],
    roster: Mapping[int, Any],
    owners: dict[str, int],
) -> ReadySite:
    """Read the keys of a site that has its summands, and check that it has signed them.

    Args:
        client: Client number of the site.
        frame: Reply of the site.
        parts: Layout of its summands.
        topic: Run, round and session of the sum.
        roster: Public signing keys, by client.
        owners: Client of each key that was received for this sum; the site's keys are added.

    Raises:
        InvalidMessageError: If the keys are invalid or not signed, or another site sent the same.
    """
    keys, opened = parse_json_field(frame.config, "keys"), parse_json_field(frame.config, "opened")
    try:
        public, seal_public = (str(key) for key in keys)
        for key in (public, seal_public):
            crypto.decode_point(bytes.fromhex(key))
        before = tuple(sorted(int(k) for k in opened))
        if before and before[0] < 0:
            raise ValueError("a client number is negative")
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidMessageError("its keys or opened sums cannot be read") from error
    if public == seal_public or any(owners.setdefault(k, client) != client for k in (public, seal_public)):
        raise InvalidMessageError("its keys are not different from each other and from those of other sites")
    signature, model = read_text(frame.config, "signature"), read_text(frame.config, "model")
    if not is_signed(roster, client, ready_message(*topic, client, keys, model), signature):
        raise InvalidMessageError("its keys and model are not signed by the key in the roster")
    return ReadySite(parts, (public, seal_public), signature, before, model=model)


class MaskedSum:
    """One masked sum.

    Args:
        sites: Connected sites.
        round: Number of the round, from 0.
        least: Required number of sites in the sum.
        roster: Public signing keys, by client.
    """

    def __init__(self, sites: SiteManager, round: int, least: int, roster: Mapping[int, Any]):
        self.sites = sites
        self.round = round
        self.min_sites = least
        self.roster = roster
        self.session = secrets.token_hex(16)
        self.ready: dict[int, ReadySite] = {}
        self.shares: dict[int, DealtShares] = {}
        self.view = ""

    def _ask(
        self, kind: str, reply_kind: str, configs: Mapping[int, dict[str, Any]], take: Callable[[int, Frame], Any]
    ) -> dict[int, Any]:
        """Exchange one message with each site; sites that do not reply have dropped out.

        Raises:
            UnmaskingError: If too few sites reply.
        """

        def expected(client: int, frame: Frame) -> Any:
            if frame.kind == "forgotten":
                self.sites.warn(f"{self.sites.name(client)} has dropped out of the sum.")
                return None
            if reply_kind and frame.kind != reply_kind:
                raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of {reply_kind!r}")
            try:
                return take(client, frame)
            except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
                raise InvalidMessageError(f"its fields cannot be read ({type(error).__name__})") from error

        frames = {k: Frame(kind, {**config, "session": self.session}) for k, config in configs.items()}
        what = {"unmask": "its update is in the sum, which the other sites open"}.get(
            kind, "the sum continues without it"
        )
        replies = round_requests.ask_sites(
            self.sites, frames, f"{self.round + 1} {kind}", expected, least=self.min_sites, without=what
        )
        return self._enough(dict(replies))

    def _enough(self, found: dict[int, Any]) -> dict[int, Any]:
        if len(found) < self.min_sites:
            raise UnmaskingError
        return dict(sorted(found.items()))

    def of(self, requests: Mapping[int, Frame], take: Callable[[int, Frame], ReadySite | None]) -> OpenedSum:
        """Request a masked sum of the sites' updates and open it.

        Args:
            requests: Broadcasts, by client.
            take: Validates the reply of a site that has trained.

        Raises:
            UnmaskingError: If too few sites remain.
            SumReopenedError: If the sum of other sites was opened in this round before.
            WrongSharesError: If a site sent wrong shares.
        """
        sent = {k: replace(f, config={**f.config, "session": self.session}) for k, f in requests.items()}
        trained = dict(
            sorted(round_requests.ask_sites(self.sites, sent, str(self.round + 1), take, least=self.min_sites))
        )
        unusable = tuple(k for k, reply in trained.items() if not reply.usable)
        usable = {k: reply for k, reply in trained.items() if reply.usable}
        self.ready = self._enough(self._as_before(self._of_one_model(usable)))
        self.min_sites = max(self.min_sites, LEAST, threshold(len(self.ready)))
        parts = next(iter(self.ready.values())).parts
        self._share(parts)
        alive, total = self._masked(sum(part.size for part in parts))
        signatures = self._signed(alive)
        for k, secret in self._opened(alive, signatures).items():
            self._take_off(total, k, secret, alive)
        rounded = any(part.name == "delta" for part in parts)
        error = len(alive) * step_size(len(self.ready)) / 2 if rounded else 0.0
        return OpenedSum(tuple(alive), unusable, dequantize(total, parts, len(self.ready)), error)

    def _of_one_model(self, ready: dict[int, ReadySite]) -> dict[int, ReadySite]:
        """Return the sites that received the same as most others; the others would not take part in their sum."""
        models = Counter(reply.model for reply in ready.values()).most_common(1)
        others = [k for k, reply in ready.items() if reply.model != models[0][0]]
        if others:
            names = ", ".join(map(self.sites.name, others))
            self.sites.warn(
                f"Round {self.round + 1}: {names} received another model or other settings than most sites, for example "
                "because it missed a round, and is left out of this sum."
            )
        return {k: reply for k, reply in ready.items() if k not in others}

    def _as_before(self, ready: dict[int, ReadySite]) -> dict[int, ReadySite]:
        """Return the sites whose sum of this round was opened before, if more sites report this than can lie; else all.

        Raises:
            SumReopenedError: If one of them is missing.
        """
        claims = Counter(frame.opened for frame in ready.values() if frame.opened).most_common(1)
        if not claims or claims[0][1] <= len(ready) - threshold(len(ready)):
            return ready
        before = claims[0][0]
        if not {*before} <= {*ready}:
            raise SumReopenedError(", ".join(map(self.sites.name, before)))
        self.min_sites = len(before)
        return {k: ready[k] for k in before}

    def _share(self, parts: Sequence[SumPart]) -> None:
        """Let each site share its secrets with the others."""
        ready = {str(k): [[*reply.keys], reply.signature] for k, reply in self.ready.items()}
        text_of_parts = parts_as_text(parts)
        self.view = view_digest(self.sites.run, self.round, self.session, ready, text_of_parts)

        def take(client: int, frame: Frame) -> DealtShares:
            sealed, commitments = (
                parse_json_field(frame.config, "sealed"),
                parse_json_field(frame.config, "commitments"),
            )
            if not isinstance(sealed, dict) or {*sealed} != {str(j) for j in self.ready if j != client}:
                raise InvalidMessageError("its shares are not for the sites of the sum")
            try:
                seed, key, signature = commitments
                dealt = DealtShares(
                    {to: str(sealed_share) for to, sealed_share in sealed.items()}, (seed, key, str(signature))
                )
                points = [*dealt.points(0), *dealt.points(1)]
                for point in points:
                    crypto.decode_point(point)
            except (ValueError, TypeError) as error:
                raise InvalidMessageError("its commitments cannot be read") from error
            good = len(seed) == len(key) == max(LEAST, threshold(len(self.ready)))
            if not good or key[0] != self.ready[client].keys[0]:
                raise InvalidMessageError("its commitments do not match its keys")
            if not is_signed(self.roster, client, ["shares", self.view, client, [seed, key]], signature):
                raise InvalidMessageError("its commitments are not signed by the key in the roster")
            return dealt

        config = {"ready": json.dumps(ready), "parts": text_of_parts}
        self.shares = self._ask("share", "shares", dict.fromkeys(self.ready, config), take)

    def _masked(self, size: int) -> tuple[list[int], np.ndarray]:
        """Add up the masked updates; only one is in memory at a time.

        Returns:
            The clients whose updates arrived, and the masked sum.

        Raises:
            WrongSharesError: If a site reports wrong shares.
        """
        commitments = json.dumps({str(k): dealt.commitments for k, dealt in self.shares.items()})
        configs = {
            k: {
                "sealed": json.dumps({str(j): dealt.sealed[str(k)] for j, dealt in self.shares.items() if j != k}),
                "commitments": commitments,
            }
            for k in self.shares
        }
        total, accusations = np.zeros(size, np.uint64), {}

        def take(client: int, frame: Frame) -> bool:
            if frame.kind == "accused":
                wrong = parse_json_field(frame.config, "wrong")
                if not isinstance(wrong, list) or not wrong or not {*wrong} <= {*self.shares} - {client}:
                    raise InvalidMessageError("it accuses sites that do not belong to the sum")
                accusations[client] = {*wrong}
                return True
            if frame.kind != "masked":
                raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'masked'")
            check_records(frame, ("masked",))
            tensor = decode_record(frame, "masked").get("x")
            if tensor is None or tensor.dtype != DTYPES["int64"] or tuple(tensor.shape) != (size,):
                raise InvalidMessageError("its masked update has another length than the others'")
            np.add(total, tensor.numpy().view(np.uint64), out=total)
            return True

        replies = self._ask("mask", "", configs, take)
        if accusations:
            raise find_wrong_dealers(accusations, len(self.shares), self.sites.name)
        return list(replies), total

    def _signed(self, alive: Sequence[int]) -> dict[int, str]:
        """Collect the sites' signatures of the list of sites whose masked updates arrived."""
        message = survivors_message(self.view, [*self.shares], alive)

        def take(client: int, frame: Frame) -> str:
            signature = read_text(frame.config, "signature")
            if not is_signed(self.roster, client, message, signature):
                raise InvalidMessageError("it has signed another list of sites than it received")
            return signature

        least, self.min_sites = self.min_sites, min(self.min_sites, threshold(len(self.ready)))
        replies = self._ask("agree", "agreed", {k: {"alive": json.dumps([*alive])} for k in alive}, take)
        self.min_sites = least
        return replies

    def _opened(self, alive: Sequence[int], signatures: Mapping[int, str]) -> dict[int, int]:
        """Recover the seed of each site that sent a masked update, and the secret key of each other site.

        Raises:
            UnmaskingError: If there are too few shares.
        """
        index_of = {k: index for index, k in enumerate(self.ready, 1)}
        needed = max(LEAST, threshold(len(self.ready)))
        points = {k: entry.points(0 if k in alive else 1) for k, entry in self.shares.items()}
        shares: dict[int, dict[int, int]] = {k: {} for k in self.shares}

        def take(client: int, frame: Frame) -> bool:
            opened = parse_json_field(frame.config, "shares")
            if not isinstance(opened, dict) or {*opened} != {str(k) for k in self.shares}:
                raise InvalidMessageError("its shares are not the requested ones")
            for owner, text_of_share in opened.items():
                try:
                    k, share = int(owner), int(str(text_of_share), 16)
                except ValueError as error:
                    raise InvalidMessageError("its shares cannot be read") from error
                if not crypto.verify_share(share, index_of[client], points[k]):
                    raise InvalidMessageError(
                        f"its share of a secret of {self.sites.name(k)} does not match that site's commitments"
                    )
                shares[k][index_of[client]] = share
            return True

        self.min_sites = min(self.min_sites, needed)
        text_of_signatures = json.dumps({str(k): entry for k, entry in signatures.items()})
        self._ask("unmask", "opened", {k: {"signatures": text_of_signatures} for k in signatures}, take)
        if any(len(some) < needed for some in shares.values()):
            raise UnmaskingError
        return {k: crypto.combine_shares(dict([*some.items()][:needed])) for k, some in shares.items()}

    def _take_off(self, total: np.ndarray, client: int, secret: int, alive: Collection[int]) -> None:
        """Subtract a site's own mask from the sum; if it has dropped out, the pairwise masks of the other sites with it."""
        if client in alive:
            crypto.apply_mask(total, crypto.mask_stream(secret, len(total)), add=False)
            return
        for k in alive:
            key = crypto.shared_key(secret, bytes.fromhex(self.ready[k].keys[0]))
            crypto.apply_mask(total, crypto.mask_stream(key, len(total)), add=k < client)
