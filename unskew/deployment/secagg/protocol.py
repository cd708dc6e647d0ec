"""Protocol of secure aggregation, as server and sites know it.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, in the variant
of section 4 for a malicious server. Each sum needs five messages:

train   The site trains, generates two key pairs, and sends the public keys, with a signature of them and of the digest of all
        that it has received: model, settings and schema of the data.
share   The site receives the keys of all sites and checks their signatures. It sends each site one encrypted share of its
        secret key and one of the seed of its own mask, with signed commitments to these shares.
mask    The site receives the others' shares and checks them. It sends the update under its own mask and one mask shared
        with each other site. If shares are wrong, it reports their senders instead.
agree   The site receives the list of sites whose masked updates arrived, and signs it.
unmask  The site receives the others' signatures of the same list. If more than two thirds of the sites have signed, it sends
        its shares: of the seeds of the sites on the list, and of the secret keys of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from unskew.deployment.secagg.fixed_point import SumPart
from unskew.deployment.wire.tensor_codec import NAMES
from unskew.methods.dp_sites import SiteDP

LEAST = 3
"""Minimum number of sites of a masked sum: with two, each could compute the other's update."""
PHASES = ("share", "mask", "agree", "unmask")
"""Kinds of the server's messages after the first one, in order."""


def min_sites(cohort: int, noise: SiteDP | None) -> int:
    """Return the minimum number of sites of a masked sum: more than half of a cohort, and at least ``dp:honest``.

    Args:
        cohort: Number of sites that the experiment plans for a round; fewer may be present.
        noise: Rule that adds noise at the sites, or None.
    """
    return max(LEAST, cohort // 2 + 1, 0 if noise is None else noise.honest or 0)


def threshold(sites: int) -> int:
    """Return the number of sites that must remain for a sum to be opened.

    Two groups of this size share more than a third of the sites. So if fewer than a third help the server, it cannot obtain
    both the mask and the secret key of one site (Bonawitz et al. 2017, section 4).
    """
    return 2 * sites // 3 + 1


def parts_as_text(parts: Sequence[SumPart]) -> str:
    """Encode the layout of a sum as JSON."""
    return json.dumps([[part.name, NAMES[part.dtype], list(part.shape)] for part in parts])


def view_digest(run: str, round: int, session: str, ready: dict[str, Any], parts: str) -> str:
    """Return a digest of the data that must be equal for all sites of a sum: participants, keys and model.

    Args:
        run: Identifier of the run.
        round: Number of the round, from 0.
        session: Identifier of the sum.
        ready: Public keys and signature of each site.
        parts: Layout of the sum.
    """
    return hashlib.sha256(json.dumps([run, round, session, sorted(ready.items()), parts]).encode()).hexdigest()


def ready_message(run: str, round: int, session: str, client: int, keys: list[str], model: str) -> list[Any]:
    """Return the message that a site signs before it shares secrets: its public keys and the digest of what it received.

    Args:
        run: Identifier of the run.
        round: Number of the round, from 0.
        session: Identifier of the sum.
        client: Number of the client.
        keys: Public keys of the site.
        model: Digest of model, settings and schema, see ``unskew.deployment.wire.digests.broadcast_digest``.
    """
    return ["ready", run, round, session, client, keys, model]


def survivors_message(view: str, shared: Sequence[int], alive: Sequence[int]) -> list[Any]:
    """Return the message that a site signs before a sum is opened: who shared secrets, and whose updates arrived.

    Args:
        view: Digest from ``view_digest``.
        shared: Clients that shared secrets.
        alive: Clients whose masked update arrived.
    """
    return ["survivors", view, [*shared], [*alive]]
