"""The site's half of secure aggregation (SecAgg+): it sends its update under masks that cancel in the sum of all sites.

Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020. Four
messages make one sum:

train   the site trains, makes two pairs of keys, and sends the public ones and how large its largest entries are
share   it gets its neighbours' keys, and sends each, sealed, a share of a secret key and one of the seed of its own mask
mask    it gets its neighbours' shares, and sends the update under its own mask and one in common with each neighbour
unmask  it gets who has sent a masked update, and sends its shares: of the seeds of those, and of the keys of the others

All of it is in memory only: a site that is restarted in between has dropped out of this sum.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unskew.deployment.arrays import NAMES, Nonsense, blob
from unskew.deployment.fixed_point import Part, exponent_of, rounded, step
from unskew.deployment.ledger import Ledger
from unskew.deployment.messages import text, whole
from unskew.deployment.primitives import Flower, Primitives, apply
from unskew.deployment.state import Forgotten
from unskew.deployment.thin.frames import Frame, encode_header
from unskew.errors import ConfigError, UnskewError
from unskew.protocol.messages import Update, flat
from unskew.simulation.intake import FIGURES

LEAST = 3
"""Sites that a masked sum needs at the start: of two, each would know the other's update."""
PHASES = ("share", "mask", "unmask")
KEPT = 4
"""Runs of which a site keeps an open sum."""


def threshold(sites: int) -> int:
    """Return how many of ``sites`` must be left for a sum to be opened.

    Two groups of this size share more than a third of the sites: so while fewer than a third help the server, no mask and
    key of one site can both be opened (Bonawitz et al. 2017, section 4).
    """
    return 2 * sites // 3 + 1


def pieces(update: Update, delta: Tensor | None) -> list[tuple[str, Tensor, float]]:
    """What of an update is added up: name, tensor, and the weight that it has in the sum.

    Args:
        update: Of a client.
        delta: What travels of the change of its model, None if nothing does.
    """
    figures = torch.tensor([update.metrics.get(name, 0.0) for name in FIGURES], dtype=torch.float64)
    model = [] if delta is None else [("delta", delta, update.weight)]
    return [
        *model,
        ("buffers", update.buffers, update.weight),
        *((f"report/{name}", t, update.weight) for name, t in sorted(update.report.items())),
        *((name, t, 1.0) for name, t in sorted(flat("upload", update.upload).items())),
        ("figures", figures, 1.0),
    ]


def written(parts: Sequence[Part]) -> str:
    """Parts as text."""
    return json.dumps([[part.name, NAMES[part.dtype], list(part.shape), part.exponent] for part in parts])


@dataclass
class Open:
    """One sum that a site takes part in.

    Attributes:
        session: Its identity.
        client: The site's number.
        held: What is added up.
        parts: How it is laid out.
        primitives: The cryptography.
        ledger: Record of the sums that were opened.
        round: Round of the sum.
        ready: What was answered when it began.
        secret, seal_secret, seed: For the masks in common, for sealed messages, and for the mask of its own.
        sites: How many take part; ``threshold``: how many shares tell a secret.
        neighbours: Their public keys, this site's own too; ``common``: the keys that messages to them are sealed with.
        theirs: Shares that neighbours sent: of their seeds, and of their secret keys.
        answers: What was answered, so that a message that comes again gets the same answer.
    """

    session: str
    client: int
    held: list[tuple[str, Tensor, float]]
    parts: list[Part]
    primitives: Primitives
    ledger: Ledger
    round: int
    ready: Frame = field(default_factory=lambda: Frame("ready"))
    secret: bytes = b""
    seal_secret: bytes = b""
    seed: bytes = b""
    sites: int = 0
    threshold: int = 0
    neighbours: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    common: dict[int, bytes] = field(default_factory=dict)
    theirs: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    answers: dict[str, tuple[str, Frame]] = field(default_factory=dict)

    def carried_out(self, asked: Frame) -> Frame:
        """The answer to the next message, or to the last one once more.

        Raises:
            Nonsense: It is another message than the last one of its kind, or out of turn.
        """
        own = {k: v for k, v in asked.config.items() if k in ("keys", "parts", "sites", "sealed", "alive", "gone")}
        digest = hashlib.sha256(encode_header(Frame(asked.kind, own))).hexdigest()
        if asked.kind in self.answers:
            before, answer = self.answers[asked.kind]
            if before != digest:
                raise Nonsense(f"{asked.kind} was answered in this sum already, to another message")
            return answer
        if len(self.answers) != PHASES.index(asked.kind):
            raise Nonsense(f"{asked.kind} comes out of turn")
        answer = {"share": self.share, "mask": self.mask, "unmask": self.unmask}[asked.kind](asked.config)
        self.answers[asked.kind] = digest, answer
        return answer

    def share(self, config: dict[str, Any]) -> Frame:
        """Shares for the neighbours, of this site's seed and secret key.

        Raises:
            Nonsense: The keys are none, or not those of enough sites.
        """
        keys = {int(k): (bytes.fromhex(a), bytes.fromhex(b)) for k, (a, b) in parsed(config, "keys").items()}
        every = [key for both in keys.values() for key in both]
        own = self.primitives.public(self.secret), self.primitives.public(self.seal_secret)
        if len(keys) < LEAST or len(set(every)) != len(every) or keys.get(self.client) != own:
            raise Nonsense("the keys of its neighbours are none of a sum of several sites")
        self._lay_out(parsed(config, "parts"), whole(config, "sites"), len(keys))
        self.neighbours, self.threshold = keys, threshold(len(keys))
        self.seed = secrets.token_bytes(32)
        shares = [self.primitives.shares(one, self.threshold, len(keys)) for one in (self.seed, self.secret)]
        sealed = {}
        for place, (k, (_, seal_key)) in enumerate(sorted(keys.items())):
            seed_share, key_share = shares[0][place], shares[1][place]
            if k == self.client:
                self.theirs[k] = seed_share, key_share
                continue
            self.common[k] = self.primitives.agree(self.seal_secret, seal_key)
            plain = json.dumps([self.session, self.client, k, seed_share.hex(), key_share.hex()]).encode()
            sealed[str(k)] = self.primitives.seal(self.common[k], plain).hex()
        commitment = hashlib.sha256(self.seed).hexdigest()
        return Frame("shares", {"client": self.client, "sealed": json.dumps(sealed), "seed": commitment})

    def _lay_out(self, told: Any, sites: int, neighbours: int) -> None:
        if sites < neighbours or sites > 1 << 20:
            raise Nonsense(f"it speaks of a sum of {sites} sites")
        if not isinstance(told, list) or [one[:3] for one in told] != [
            one[:3] for one in json.loads(written(self.parts))
        ]:
            raise Nonsense("what is to be added up is not what this site has")
        larger = [whole({"e": one[3] + 1000}, "e") - 1000 for one in told]
        if any(e < part.exponent for e, part in zip(larger, self.parts, strict=True)):
            raise Nonsense("this site's numbers are larger than those of the sum")
        self.parts = [replace(part, exponent=e) for e, part in zip(larger, self.parts, strict=True)]
        self.sites = sites

    def mask(self, config: dict[str, Any]) -> Frame:
        """The update under its masks.

        Raises:
            Nonsense: The shares of neighbours are none, or not enough.
        """
        for name, sealed in parsed(config, "sealed").items():
            k = int(name)
            if k not in self.common:
                raise Nonsense(f"client {k} is no neighbour")
            session, sender, to, seed_share, key_share = json.loads(
                self.primitives.unseal(self.common[k], bytes.fromhex(sealed))
            )
            if (session, sender, to) != (self.session, k, self.client):
                raise Nonsense(f"what client {k} sealed is for another sum")
            self.theirs[k] = bytes.fromhex(seed_share), bytes.fromhex(key_share)
        if len(self.theirs) < self.threshold:
            raise Nonsense(f"there are {len(self.theirs)} of at least {self.threshold} neighbours")
        held = [
            (tensor, weight, step(part.exponent, self.sites))
            for (_, tensor, weight), part in zip(self.held, self.parts, strict=True)
        ]
        masked, errors = rounded(held)
        self.held = []
        apply(masked, self.primitives.stream(self.seed, len(masked)), add=True)
        for k in self.theirs:
            if k != self.client:
                key = self.primitives.agree(self.secret, self.neighbours[k][0])
                apply(masked, self.primitives.stream(key, len(masked)), add=self.client > k)
        array = blob(torch.from_numpy(masked.view("int32")))
        largest = max((e for part, e in zip(self.parts, errors, strict=True) if part.name == "delta"), default=0.0)
        return Frame("masked", {"client": self.client}, {"error": largest}, {"masked/x": array})

    def unmask(self, config: dict[str, Any]) -> Frame:
        """Shares of the seeds of those whose masked updates came, and of the secret keys of the others; never of both.

        Raises:
            Nonsense: These are not the sites that this one has masks in common with, or too few have sent theirs.
            Forgotten: If another sum of this round was opened.
        """
        alive, gone = ({int(k) for k in parsed(config, name)} for name in ("alive", "gone"))
        if alive & gone or alive | gone != set(self.theirs) or self.client not in alive or len(alive) < self.threshold:
            raise Nonsense("those who sent masked updates and those who did not are not the sites of this sum")
        clients = tuple(sorted(alive))
        try:
            self.ledger.check(self.round, clients)
        except UnskewError as error:
            raise Forgotten(str(error)) from error
        self.ledger.record(self.round, clients)
        opened = {k: self.theirs[k][0 if k in alive else 1].hex() for k in sorted(alive | gone)}
        self.secret = self.seal_secret = self.seed = b""
        return Frame("opened", {"client": self.client, "shares": json.dumps(opened)})


def parsed(config: dict[str, Any], name: str) -> Any:
    """A structure that a message carries as JSON.

    Raises:
        Nonsense: It is none.
    """
    try:
        return json.loads(text(config, name))
    except ValueError as error:
        raise Nonsense(f"{name} cannot be read") from error


class Masks:
    """The open sums of a site, one a run.

    Args:
        primitives: The cryptography.
    """

    def __init__(self, primitives: Primitives | None = None):
        self.primitives: Primitives = Flower() if primitives is None else primitives
        self._open: dict[str, Open] = {}

    def again(self, run: str, session: str) -> Frame | None:
        """What was answered when this sum began, if it has."""
        one = self._open.get(run)
        return one.ready if one is not None and one.session == session else None

    def begin(self, run: str, session: str, update: Update, delta: Tensor | None, ledger: Ledger) -> Frame:
        """Take part in a sum with an update.

        Raises:
            ConfigError: Flower is not installed here.
        """
        if not update.is_finite():
            return Frame("unusable", {"client": update.client})
        held = pieces(update, delta)
        parts = [Part(name, t.dtype, tuple(t.shape), exponent_of(t, weight)) for name, t, weight in held]
        one = Open(session, update.client, held, parts, self.primitives, ledger, update.born)
        try:
            one.secret, public = self.primitives.pair()
            one.seal_secret, seal_public = self.primitives.pair()
        except ImportError as error:
            raise ConfigError("Secure aggregation needs Flower here: pip install 'unskew[flower]'.") from error
        config = {
            "client": update.client,
            "round": update.born,
            "examples": update.examples,
            "weight": float(update.weight),
            "parts": written(parts),
            "keys": json.dumps([public.hex(), seal_public.hex()]),
        }
        self._open.pop(run, None)
        self._open[run] = one
        while len(self._open) > KEPT:
            self._open.pop(next(iter(self._open)))
        one.ready = Frame("ready", config)
        return one.ready

    def carried_out(self, run: str, asked: Frame) -> Frame:
        """The answer to a message after the first.

        Raises:
            Forgotten: This site has no part in that sum, or not any more.
            Nonsense: The message is not what it must be.
        """
        one = self._open.get(run)
        if one is None or one.session != text(asked.config, "session"):
            raise Forgotten("this site was restarted since the sum began, or never took part in it")
        try:
            return one.carried_out(asked)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise Nonsense(f"its keys or shares cannot be read ({type(error).__name__})") from error
