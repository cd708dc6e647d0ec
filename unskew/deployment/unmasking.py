"""The server's half of secure aggregation: it brings the sites' keys and shares together, and opens the sum alone."""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from unskew.deployment.arrays import DTYPES, Nonsense, check_records, record_of
from unskew.deployment.fixed_point import LOWEST, Part, restored
from unskew.deployment.masks import parsed, threshold, written
from unskew.deployment.messages import number, text
from unskew.deployment.primitives import Flower, Primitives, apply
from unskew.deployment.sites import Sites
from unskew.deployment.thin.frames import Frame
from unskew.errors import UnskewError

NEIGHBOURS = 21
"""Sites, itself included, that a site has masks in common with, where there are more: SecAgg+ needs no more than a few."""


@dataclass(frozen=True)
class Ready:
    """A site that has trained.

    Attributes:
        parts: What it adds up.
        keys: Its public keys, for masks and for sealed messages.
        usable: Whether its numbers are finite.
    """

    parts: tuple[Part, ...] = ()
    keys: tuple[bytes, bytes] = (b"", b"")
    usable: bool = True


@dataclass(frozen=True)
class Sum:
    """A sum that was opened.

    Attributes:
        clients: Whose updates are in it.
        unusable: Whose numbers were not finite.
        tensors: The sums, by name.
        error: By how much rounding may have moved an entry of the sum of updates, as the sites measured it.
    """

    clients: tuple[int, ...] = ()
    unusable: tuple[int, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: float = 0.0


class Unopened(UnskewError):
    """Too few sites are left to open the sum."""


def parts_of(config: dict[str, Any], largest: float) -> tuple[Part, ...]:
    """What a site says that it adds up.

    Raises:
        Nonsense: It is none.
    """
    parts = []
    for one in parsed(config, "parts"):
        try:
            name, dtype, shape, exponent = one
            parts.append(Part(str(name), DTYPES[dtype], tuple(int(n) for n in shape), int(exponent)))
        except (ValueError, TypeError, KeyError) as error:
            raise Nonsense("what it adds up cannot be read") from error
        if min(parts[-1].shape, default=0) < 0 or exponent < LOWEST or 2.0 ** min(exponent, 1000) > 2 * largest:
            raise Nonsense(f"what it adds up under {str(name)[:60]!r} is none, or larger than {largest:.3g}")
    return tuple(parts)


def neighbourhoods(clients: Collection[int]) -> dict[int, list[int]]:
    """Whom each has masks in common with, itself included: all, or where these are many its neighbours on a random ring."""
    ring = sorted(clients)
    random.SystemRandom().shuffle(ring)
    count, half = len(ring), NEIGHBOURS // 2
    if count <= NEIGHBOURS:
        return {k: sorted(ring) for k in ring}
    return {k: sorted(ring[(at + by) % count] for by in range(-half, half + 1)) for at, k in enumerate(ring)}


class Summation:
    """One masked sum.

    Args:
        sites: The sites.
        round: What logs call it.
        least: Sites whose updates must be in it.
        primitives: The cryptography.
    """

    def __init__(self, sites: Sites, round: str, least: int, primitives: Primitives | None = None):
        self.sites, self.round, self.least = sites, round, least
        self.primitives: Primitives = Flower() if primitives is None else primitives
        self.session = secrets.token_hex(16)
        self.ready: dict[int, Ready] = {}
        self.around: dict[int, list[int]] = {}
        self.needed: dict[int, int] = {}

    def _ask(
        self, kind: str, answer: str, configs: Mapping[int, dict[str, Any]], take: Callable[[int, Frame], Any]
    ) -> dict[int, Any]:
        """One exchange; who does not answer has dropped out.

        Raises:
            Unopened: Too many have.
        """

        def expected(client: int, frame: Frame) -> Any:
            if frame.kind == "forgotten":
                self.sites.tell(f"{self.sites.name(client)} has dropped out of the sum: {frame.config.get('reason')}.")
                return None
            if frame.kind != answer:
                raise Nonsense(f"it is called {frame.kind[:40]!r} and not {answer!r}")
            return take(client, frame)

        frames = {k: Frame(kind, {**config, "session": self.session}) for k, config in configs.items()}
        what = {"unmask": "its update is in the sum, which the other sites open"}.get(
            kind, "the sum continues without it"
        )
        found = self.sites.ask(frames, f"{self.round} {kind}", expected, least=self.least, without=what)
        return self._enough(dict(found))

    def _enough(self, found: dict[int, Any]) -> dict[int, Any]:
        if len(found) < self.least:
            raise Unopened
        return dict(sorted(found.items()))

    def of(self, requests: Mapping[int, Frame], take: Callable[[int, Frame], Ready | None]) -> Sum:
        """The sum of what the sites make of these requests.

        Args:
            requests: By client: the broadcasts.
            take: Checks that a site is ready.

        Raises:
            Unopened: Too few sites are left.
        """
        asked = {k: replace(f, config={**f.config, "session": self.session}) for k, f in requests.items()}
        trained = dict(sorted(self.sites.ask(asked, self.round, take, least=self.least)))
        unusable = tuple(k for k, one in trained.items() if not one.usable)
        self.ready = self._enough({k: one for k, one in trained.items() if one.usable})
        self.least = max(self.least, threshold(len(self.ready)))
        parts = agreed([one.parts for one in self.ready.values()])
        self.around = neighbourhoods(self.ready)
        self.needed = {k: threshold(len(others)) for k, others in self.around.items()}
        sealed, seeds = self._shared(parts)
        self.around = {k: [j for j in self.around[k] if j in sealed] for k in sealed}
        self._connected(sealed)
        alive, total, error = self._masked(sealed, sum(part.size for part in parts))
        self._connected(alive)
        for k, secret in self._opened(alive, [k for k in sealed if k not in alive]).items():
            self._take_off(total, k, secret, alive, seeds[k])
        return Sum(tuple(alive), unusable, restored(total, parts, len(self.ready)), error)

    def _connected(self, left: Collection[int]) -> None:
        """Look whether each site that is left has enough neighbours.

        Raises:
            Unopened: One has not.
        """
        if any(sum(j in left for j in self.around[k]) < self.needed[k] for k in left):
            raise Unopened

    def _shared(self, parts: Sequence[Part]) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
        """Sealed shares, by sender and receiver, and digests of the seeds."""
        configs = {
            k: {
                "keys": json.dumps({str(j): [key.hex() for key in self.ready[j].keys] for j in others}),
                "parts": written(parts),
                "sites": len(self.ready),
            }
            for k, others in self.around.items()
        }

        def take(client: int, frame: Frame) -> tuple[dict[str, str], str]:
            sealed = parsed(frame.config, "sealed")
            if not isinstance(sealed, dict) or {*sealed} != {str(j) for j in self.around[client] if j != client}:
                raise Nonsense("its shares are not for its neighbours")
            return {to: str(one) for to, one in sealed.items()}, text(frame.config, "seed")

        found = self._ask("share", "shares", configs, take)
        return {k: one for k, (one, _) in found.items()}, {k: seed for k, (_, seed) in found.items()}

    def _masked(self, sealed: dict[int, dict[str, str]], size: int) -> tuple[list[int], np.ndarray, float]:
        """Who has sent a masked update, the sum of these, and what rounding costs. One is held at a time."""
        configs = {
            k: {"sealed": json.dumps({str(j): sealed[j][str(k)] for j in others if j != k})}
            for k, others in self.around.items()
        }
        total = np.zeros(size, np.uint32)

        def take(client: int, frame: Frame) -> float:
            check_records(frame, ("masked",))
            found = record_of(frame, "masked").get("x")
            if found is None or found.dtype != DTYPES["int32"] or tuple(found.shape) != (size,):
                raise Nonsense("its masked update has not the length of the others")
            error = abs(number({"error": frame.figures.get("error", 0.0)}, "error"))
            np.add(total, found.numpy().view(np.uint32), out=total)
            return error

        found = self._ask("mask", "masked", configs, take)
        return list(found), total, sum(found.values())

    def _opened(self, alive: Collection[int], gone: Collection[int]) -> dict[int, bytes]:
        """The seed of each site that sent a masked update, and the secret key of each that did not.

        Raises:
            Unopened: There are too few shares.
        """
        sets = (("alive", alive), ("gone", gone))
        configs = {
            k: {name: json.dumps([j for j in self.around[k] if j in some]) for name, some in sets} for k in alive
        }
        shares: dict[int, list[bytes]] = {k: [] for k in (*alive, *gone)}

        def take(client: int, frame: Frame) -> bool:
            found = parsed(frame.config, "shares")
            if not isinstance(found, dict) or {*found} != {str(j) for j in self.around[client]}:
                raise Nonsense("its shares are not those that it was asked for")
            try:
                found = {int(owner): bytes.fromhex(share) for owner, share in found.items()}
            except (ValueError, TypeError) as error:
                raise Nonsense("its shares cannot be read") from error
            for owner, share in found.items():
                shares[owner].append(share)
            return True

        self._ask("unmask", "opened", configs, take)
        if any(len(some) < self.needed[k] for k, some in shares.items()):
            raise Unopened
        try:
            return {k: self.primitives.combine(some) for k, some in shares.items()}
        except ValueError as error:
            raise Unopened from error

    def _take_off(self, total: np.ndarray, client: int, secret: bytes, alive: Collection[int], seed: str) -> None:
        """Take a site's own mask off the sum, or where it has dropped out those that others have in common with it.

        Raises:
            Unopened: The secret is not the site's.
        """
        if client in alive:
            if hashlib.sha256(secret).hexdigest() != seed:
                raise Unopened
            apply(total, self.primitives.stream(secret, len(total)), add=False)
            return
        try:
            if self.primitives.public(secret) != self.ready[client].keys[0]:
                raise Unopened
            for k in alive:
                if client in self.around[k]:
                    key = self.primitives.agree(secret, self.ready[k].keys[0])
                    apply(total, self.primitives.stream(key, len(total)), add=k < client)
        except ValueError as error:
            raise Unopened from error


def agreed(several: Sequence[tuple[Part, ...]]) -> list[Part]:
    """The parts of a sum, with the largest exponents of all sites."""
    return [replace(same[0], exponent=max(part.exponent for part in same)) for same in zip(*several, strict=True)]
