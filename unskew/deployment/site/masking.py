"""Site side of secure aggregation: sends its update under masks that cancel in the sum over all sites.

``unskew.deployment.secagg.protocol`` describes the messages. All state except the record of the opened sum is in memory: a
site that is restarted in between has dropped out of the sum.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unskew.deployment.secagg import crypto
from unskew.deployment.secagg.fixed_point import SumPart, is_in_range, quantize
from unskew.deployment.secagg.protocol import (
    LEAST,
    PHASES,
    parts_as_text,
    ready_message,
    survivors_message,
    threshold,
    view_digest,
)
from unskew.deployment.secagg.roster import SigningIdentity, is_signed
from unskew.deployment.site.ledger import DataLedger
from unskew.deployment.site.state import SiteStateLostError
from unskew.deployment.wire.digests import BroadcastDigest
from unskew.deployment.wire.fields import parse_json_field, read_text
from unskew.deployment.wire.frames import Frame, encode_header
from unskew.deployment.wire.tensor_codec import InvalidMessageError, encode_tensor
from unskew.protocol.messages import Update, flatten_records
from unskew.simulation.update_buffer import AVERAGED_METRICS

KEPT = 4
"""Number of runs whose current sum a site keeps in memory."""


def summands(update: Update, delta: Tensor | None) -> list[tuple[str, Tensor, float]]:
    """Return the summands of an update: name, tensor, and weight in the sum.

    Args:
        update: Update of a client.
        delta: Slices of the model update that are sent, or None.
    """
    model = [] if delta is None else [("delta", delta, update.weight)]
    metrics: list[tuple[str, Tensor, float]] = []
    if update.metrics:
        values = torch.tensor([update.metrics.get(name, 0.0) for name in AVERAGED_METRICS], dtype=torch.float64)
        metrics = [("metrics", values, 1.0)]
    return [
        *model,
        ("buffers", update.buffers, update.weight),
        *((f"report/{name}", t, update.weight) for name, t in sorted(update.report.items())),
        *((name, t, 1.0) for name, t in sorted(flatten_records("upload", update.upload).items())),
        *metrics,
    ]


@dataclass
class OpenSum:
    """Masked sum in progress, as a participating site sees it.

    Attributes:
        identity: The site's signing key, and the public keys of all sites.
        ledger: Record of the sums that the site has opened.
        session: Identifier of the sum; ``round``: its round.
        model: Digests of the broadcast that the site trained from; all sites must have received the same.
        held: Summands: name, tensor and weight.
        parts: Layout of the summands.
        secret, seal_secret, seed: Secrets of the pairwise masks, of encrypted messages, and of the site's own mask.
        ready: Reply that started the sum.
        view: Digest of the data that must be equal for all sites.
        keys: Public keys of each site, for masks and for encrypted messages.
        common: Key of encrypted messages between each client and this site.
        shares: Shares of seed and secret key that each client sent.
        alive: Clients whose masked updates arrived, according to the list that this site signed.
        answers: Replies sent so far, so that a repeated message gets the same reply.
        min_sites: Minimum number of sites in the sum that the method requires.
    """

    identity: SigningIdentity
    ledger: DataLedger
    session: str
    round: int
    model: BroadcastDigest
    held: list[tuple[str, Tensor, float]]
    parts: list[SumPart]
    secret: int = field(default_factory=crypto.random_secret)
    seal_secret: int = field(default_factory=crypto.random_secret)
    seed: int = field(default_factory=crypto.random_secret)
    ready: Frame = field(default_factory=lambda: Frame("ready"))
    view: str = ""
    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    common: dict[int, bytes] = field(default_factory=dict)
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)
    alive: tuple[int, ...] = ()
    answers: dict[str, tuple[str, Frame]] = field(default_factory=dict)
    min_sites: int = LEAST

    @property
    def client(self) -> int:
        """Client number of the site."""
        return self.identity.client

    @property
    def needed(self) -> int:
        """Number of shares that determine a secret, and of signatures that a list of sites needs."""
        return max(LEAST, threshold(len(self.keys)))

    def reply(self, asked: Frame) -> Frame:
        """Reply to the next message, or repeat the reply to an earlier one.

        Args:
            asked: Message from the server.

        Raises:
            InvalidMessageError: If the message is invalid, out of order, or contradicts an earlier one.
        """
        names = ("ready", "parts", "sealed", "commitments", "alive", "signatures")
        own = {k: v for k, v in asked.config.items() if k in names}
        digest = hashlib.sha256(encode_header(Frame(asked.kind, own))).hexdigest()
        if asked.kind in self.answers:
            earlier_digest, reply = self.answers[asked.kind]
            if earlier_digest != digest:
                raise InvalidMessageError(f"this sum already has a reply to a different {asked.kind!r} message")
            return reply
        if len(self.answers) != PHASES.index(asked.kind):
            raise InvalidMessageError(f"{asked.kind!r} is out of order")
        steps = {"share": self.share, "mask": self.mask, "agree": self.agree, "unmask": self.unmask}
        reply = steps[asked.kind](asked.config)
        self.answers[asked.kind] = digest, reply
        return reply

    def share(self, config: dict[str, Any]) -> Frame:
        """Return encrypted shares of this site's seed and secret key for each site, and commitments to them.

        Args:
            config: Fields of the server's message.

        Raises:
            InvalidMessageError: If the keys are not signed by at least three different sites that received the same model.
        """
        ready = parse_json_field(config, "ready")
        parts = read_text(config, "parts")
        run = self.ledger.run
        shares = {}
        for name, (keys, signature) in ready.items():
            message = ready_message(run, self.round, self.session, int(name), keys, self.model.signed)
            if not is_signed(self.identity.roster, int(name), message, signature):
                raise InvalidMessageError(
                    f"client {name} of the roster has not signed these keys and the model, settings and data schema that "
                    "this site received"
                )
            shares[int(name)] = bytes.fromhex(keys[0]), bytes.fromhex(keys[1])
        every = [key for both in shares.values() for key in both]
        own = crypto.public_key(self.secret), crypto.public_key(self.seal_secret)
        if len(shares) < LEAST or len(set(every)) != len(every) or shares.get(self.client) != own:
            raise InvalidMessageError(f"a sum needs different keys of at least {LEAST} sites, including this one")
        if json.loads(parts) != json.loads(parts_as_text(self.parts)):
            raise InvalidMessageError("the layout of the sum differs from this site's update")
        self.keys = shares
        self.view = view_digest(run, self.round, self.session, ready, parts)
        count = len(self.keys)
        (seeds, seed_points), (secrets, key_points) = (
            crypto.share_secret(secret, self.needed, count) for secret in (self.seed, self.secret)
        )
        sealed = {}
        for index, (k, (_, seal_key)) in enumerate(sorted(self.keys.items())):
            if k == self.client:
                self.shares[k] = seeds[index], secrets[index]
                continue
            self.common[k] = crypto.shared_key(self.seal_secret, seal_key)
            plain = json.dumps([self.view, self.client, k, f"{seeds[index]:x}", f"{secrets[index]:x}"]).encode()
            sealed[str(k)] = crypto.seal(self.common[k], plain).hex()
        commitments = [[point.hex() for point in points] for points in (seed_points, key_points)]
        signature = self.identity.sign(["shares", self.view, self.client, commitments])
        written = json.dumps([*commitments, signature])
        return Frame("shares", {"client": self.client, "sealed": json.dumps(sealed), "commitments": written})

    def mask(self, config: dict[str, Any]) -> Frame:
        """Return the masked update, or, if shares are wrong, the clients that sent them.

        Args:
            config: Fields of the server's message.

        Raises:
            InvalidMessageError: If shares of too few sites arrived, or commitments are not signed by their site.
        """
        sealed, commitments = parse_json_field(config, "sealed"), parse_json_field(config, "commitments")
        wrong, shares = [], {self.client: self.shares[self.client]}
        for name in sealed:
            k, (seed_points, key_points, signature) = int(name), commitments[name]
            message = ["shares", self.view, k, [seed_points, key_points]]
            if k not in self.common or not is_signed(self.identity.roster, k, message, signature):
                raise InvalidMessageError(f"client {k} has not signed these commitments, or does not belong to the sum")
            points = [[bytes.fromhex(point) for point in some] for some in (seed_points, key_points)]
            opened = self._unsealed(k, str(sealed[name]), points)
            if opened is None:
                wrong.append(k)
            else:
                shares[k] = opened
        if wrong:
            return Frame("accused", {"client": self.client, "wrong": json.dumps(wrong)})
        if len(shares) < self.needed:
            raise InvalidMessageError(f"it has shares of {len(shares)} sites; at least {self.needed} are required")
        self.shares = shares
        masked = quantize([(tensor, weight) for _, tensor, weight in self.held], len(self.keys))
        self.held = []
        crypto.apply_mask(masked, crypto.mask_stream(self.seed, len(masked)), add=True)
        for k in self.shares:
            if k != self.client:
                key = crypto.shared_key(self.secret, self.keys[k][0])
                crypto.apply_mask(masked, crypto.mask_stream(key, len(masked)), add=self.client > k)
        array = encode_tensor(torch.from_numpy(masked.view("int64")))
        return Frame("masked", {"client": self.client}, {}, {"masked/x": array})

    def _unsealed(self, k: int, sealed: str, points: list[list[bytes]]) -> tuple[int, int] | None:
        """Decrypt the shares of another site; None if they do not match this sum or the site's commitments."""
        index = sorted(self.keys).index(self.client) + 1
        try:
            view, sender, to, *both = json.loads(crypto.unseal(self.common[k], bytes.fromhex(sealed)))
            shares = int(both[0], 16), int(both[1], 16)
            good = (view, sender, to, points[1][0]) == (self.view, k, self.client, self.keys[k][0])
            good = good and {len(some) for some in points} == {self.needed}
            good = good and all(crypto.verify_share(x, index, p) for x, p in zip(shares, points, strict=True))
        except (ValueError, TypeError, IndexError):
            return None
        return shares if good else None

    def agree(self, config: dict[str, Any]) -> Frame:
        """Return this site's signature of the list of sites whose masked updates arrived.

        Args:
            config: Fields of the server's message.

        Raises:
            InvalidMessageError: If the list contains sites outside the sum, too few sites, or not this site.
            SumAlreadyOpenedError: If another sum of this round was opened.
        """
        alive = {int(k) for k in parse_json_field(config, "alive")}
        if not alive <= {*self.shares} or self.client not in alive or len(alive) < max(self.needed, self.min_sites):
            raise InvalidMessageError("the list of arrived updates contains sites outside the sum, or too few sites")
        self.ledger.check(self.round, tuple(sorted(alive)), self.model.model)
        self.alive = tuple(sorted(alive))
        return Frame("agreed", {"client": self.client, "signature": self.identity.sign(self._survivors())})

    def _survivors(self) -> list[Any]:
        return survivors_message(self.view, sorted(self.shares), self.alive)

    def unmask(self, config: dict[str, Any]) -> Frame:
        """Return shares of the seeds of sites on the signed list and of the secret keys of the others; never of both.

        Args:
            config: Fields of the server's message.

        Raises:
            InvalidMessageError: If too few sites of the list have signed it.
            SumAlreadyOpenedError: If another sum of this round was opened in the meantime.
        """
        signatures = parse_json_field(config, "signatures")
        signers = {
            k for k in self.alive if is_signed(self.identity.roster, k, self._survivors(), signatures.get(str(k)))
        }
        if len(signers) < self.needed:
            raise InvalidMessageError(
                f"{len(signers)} sites have signed the same list as this one; at least {self.needed} are required"
            )
        self.ledger.record(self.round, self.alive, self.model.model)
        opened = {k: f"{self.shares[k][0 if k in self.alive else 1]:x}" for k in sorted(self.shares)}
        self.secret = self.seal_secret = self.seed = 0
        return Frame("opened", {"client": self.client, "shares": json.dumps(opened)})


class SecAggClient:
    """Sums in progress at a site, at most one per run.

    Args:
        identity: The site's signing key and the roster; None if it has none and cannot take part in masked sums.
    """

    def __init__(self, identity: SigningIdentity | None):
        self.identity = identity
        self._open: dict[str, OpenSum] = {}

    def again(self, run: str, session: str) -> Frame | None:
        """Return the reply that started this sum, or None if it has not started.

        Args:
            run: Identifier of the run.
            session: Identifier of the sum.
        """
        open_sum = self._open.get(run)
        return open_sum.ready if open_sum is not None and open_sum.session == session else None

    def begin(
        self,
        session: str,
        update: Update,
        delta: Tensor | None,
        model: BroadcastDigest,
        ledger: DataLedger,
        min_sites: int = LEAST,
    ) -> Frame:
        """Start to take part in a sum with an update.

        Args:
            session: Identifier of the sum.
            update: Update of this site.
            delta: Slices of the model update that are sent, or None.
            model: Digests of the broadcast that the site trained from.
            ledger: Record of the sums that the site has opened.
            min_sites: Minimum number of sites in the sum.
        """
        summand_list = summands(update, delta)
        if not update.is_finite() or not all(is_in_range(t, weight) for _, t, weight in summand_list):
            return Frame("unusable", {"client": update.client})
        fields = {"num_samples": update.num_samples, "weight": float(update.weight)}
        return self.start(session, update.origin_round, summand_list, model, ledger, min_sites, fields)

    def start(
        self,
        session: str,
        round: int,
        summands: list[tuple[str, Tensor, float]],
        model: BroadcastDigest,
        ledger: DataLedger,
        min_sites: int = LEAST,
        fields: dict[str, Any] | None = None,
    ) -> Frame:
        """Start to take part in a sum.

        Args:
            session: Identifier of the sum.
            round: Number of the round; -1 before the first.
            summands: Name, tensor and weight of each summand.
            model: Digests of what all sites of the sum must have received.
            ledger: Record of the sums that the site has opened.
            min_sites: Minimum number of sites in the sum.
            fields: Further fields of the reply.
        """
        assert self.identity is not None, "a site without a roster trains no masked experiment"
        parts = [SumPart(name, t.dtype, tuple(t.shape)) for name, t, _ in summands]
        open_sum = OpenSum(self.identity, ledger, session, round, model, summands, parts, min_sites=min_sites)
        keys = [crypto.public_key(secret).hex() for secret in (open_sum.secret, open_sum.seal_secret)]
        message = ready_message(ledger.run, round, session, self.identity.client, keys, model.signed)
        config = {
            "client": self.identity.client,
            "session": session,
            "round": round,
            **(fields or {}),
            "parts": parts_as_text(parts),
            "keys": json.dumps(keys),
            "model": model.signed,
            "signature": self.identity.sign(message),
            "opened": json.dumps(ledger.opened(round)),
        }
        self._open.pop(ledger.run, None)
        self._open[ledger.run] = open_sum
        while len(self._open) > KEPT:
            self._open.pop(next(iter(self._open)))
        open_sum.ready = Frame("ready", config)
        return open_sum.ready

    def reply(self, run: str, asked: Frame) -> Frame:
        """Reply to a message after the first one.

        Args:
            run: Identifier of the run.
            asked: Message of the server.

        Raises:
            SiteStateLostError: If this site does not take part in that sum, or no longer does.
            InvalidMessageError: If the message is invalid, out of order, or contradicts an earlier one.
        """
        open_sum = self._open.get(run)
        if open_sum is None or open_sum.session != read_text(asked.config, "session"):
            raise SiteStateLostError("this site was restarted since the sum started, or never took part in it")
        try:
            return open_sum.reply(asked)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise InvalidMessageError(f"its keys or shares cannot be read ({type(error).__name__})") from error
