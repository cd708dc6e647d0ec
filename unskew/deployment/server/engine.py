"""Flower engine: each client trains at its site and returns its update as a message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

import torch

from unskew.deployment.server import round_requests
from unskew.deployment.server.placeholder import placeholder_upload
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.context import WireContext
from unskew.deployment.wire.digests import arrays_digest
from unskew.deployment.wire.fields import read_metric, read_number
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import decode_update, encode_broadcast
from unskew.deployment.wire.tensor_codec import InvalidMessageError, channels_last_images, euclidean_norm, printable
from unskew.engines.base import EngineConfig
from unskew.errors import EngineError
from unskew.protocol.messages import Broadcast, Tensors, Update, flatten_records
from unskew.simulation.client_store import ClientStore
from unskew.simulation.server import Server

HELD = 256 << 20
"""Maximum number of bytes of updates kept in memory while earlier clients' updates are missing."""


FACTOR = 30.0
"""An update is discarded if a tensor's norm exceeds this many times the median of the other sites' norms."""


def tensor_norms(update: Update) -> dict[str, float]:
    """Return the Euclidean norms of an update's tensors by name, omitting tensors with numbers that are not finite."""
    tensors = {"delta": update.delta, **flatten_records("upload", update.upload)}
    floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
    norms = {name: euclidean_norm(t) for name, t in floats.items()}
    return {name: norm for name, norm in norms.items() if not math.isnan(norm)}


def norm_outliers(norms: Mapping[int, float], floor: float) -> dict[int, float]:
    """Return the clients whose norm is far above those of the others, with the limit that each exceeds.

    The limit is ``FACTOR`` times the median of the others' norms without the smallest one, and at least ``floor``. So no
    single site can lower the limit of another, for example by sending zeros. At least two others are required.

    Args:
        norms: Norm of each client's tensor.
        floor: Norm up to which no update is too large.

    >>> norm_outliers({0: 1.0, 1: 2.0, 2: 100.0}, floor=5.0)
    {2: 60.0}
    """
    outliers = {}
    for client, norm in norms.items():
        others = sorted(other for k, other in norms.items() if k != client)
        limit = max(floor, FACTOR * median_high(others[1:])) if len(others) > 1 else math.inf
        if norm > limit:
            outliers[client] = limit
    return outliers


class ArrivedUpdates:
    """Updates waiting for earlier ones, in memory up to ``HELD`` bytes, so that memory does not grow with the sites.

    Args:
        device: Device of the returned updates.
        folder: Folder for the updates beyond ``HELD`` bytes; None keeps all in memory.
    """

    def __init__(self, device: torch.device, folder: Path | None):
        self.device = device
        self.fields: dict[int, dict[str, Any]] = {}
        self.store = ClientStore(None if folder is None else folder / "arrived", HELD)

    def __contains__(self, client: int) -> bool:
        return client in self.fields

    def put(self, update: Update) -> None:
        """Store an update."""
        self.fields[update.client] = update.fields()
        self.store.put(update.client, update.tensors())

    def take(self, client: int) -> Update:
        """Remove and return the update of a client."""
        tensors = {name: channels_last_images(t) for name, t in self.store.take(client).items()}
        return Update.of(self.fields.pop(client), tensors, self.device)

    def close(self) -> None:
        """Remove the files."""
        self.store.close()


@dataclass(eq=False)
class FlowerEngine:
    """Trains the clients of a cohort at their sites.

    Attributes:
        setup: Engine configuration as the server sees it.
        sites: Connected sites.
        server: Server of the run; it treats a client that has lost its state as a new one.
        wire_context: Wire context, for encoding and validating messages.
        budget: Fields of the clients' local budget that data rules have changed.
        roster: Public signing keys, by client.
        folder: Run folder, for updates that wait for earlier ones; None keeps them in memory.
        outdated: Clients whose sites have already trained later rounds.
    """

    name = "flower"

    setup: EngineConfig
    sites: SiteManager
    server: Server
    wire_context: WireContext
    budget: dict[str, int]
    roster: Mapping[int, Any]
    folder: Path | None
    outdated: set[int] = field(default_factory=set, init=False)
    _placeholder: dict[tuple[bool, frozenset[tuple[str, str, torch.Size]]], dict[str, Tensors]] = field(
        default_factory=dict, init=False
    )

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort at its sites and yield the updates in broadcast order, without late or invalid ones."""
        by_client = {broadcast.client: broadcast for broadcast in broadcasts}
        requests = {
            k: encode_broadcast(broadcast, self.wire_context, "train", self._budget(k))
            for k, broadcast in by_client.items()
        }
        round = str(broadcasts[0].round + 1) if broadcasts else ""
        refused = self.sites.counts["refused"]
        arrived = ArrivedUpdates(self.setup.device, self.folder)
        norms = {}
        for client, update in round_requests.ask_sites(
            self.sites, requests, round, lambda client, frame: self.accept_reply(by_client[client], frame)
        ):
            norms[client] = tensor_norms(update)
            arrived.put(update)
        too_large = self.too_large(norms, norms, broadcasts)
        self._check_enough(round, len(norms) - len(too_large), len(broadcasts), refused)
        for broadcast in broadcasts:  # aggregated in broadcast order, regardless of the order of arrival
            update = arrived.take(broadcast.client) if broadcast.client in arrived else None
            if update is None or broadcast.client in too_large:
                self.server.clients.drop_sent(broadcast.client)
            else:
                yield update
        arrived.close()

    def too_large(
        self, norms: Mapping[int, Mapping[str, float]], clients: Iterable[int], broadcasts: Sequence[Broadcast]
    ) -> set[int]:
        """Return the clients whose update is far larger than the others', and count a fault for each.

        Args:
            norms: Norms of the updates' tensors, by client.
            clients: Clients to check.
            broadcasts: Broadcasts of the round; an update within the norm of the model is never too large.
        """
        floor = float(torch.linalg.vector_norm(broadcasts[0].v)) if broadcasts else 0.0
        outliers: set[int] = set()
        for name in sorted({name for norm_of in norms.values() for name in norm_of}):
            exceeded = norm_outliers({k: norm_of[name] for k, norm_of in norms.items() if name in norm_of}, floor)
            for client in sorted(exceeded.keys() & {*clients} - outliers):
                outliers.add(client)
                self.sites.fault(
                    client,
                    f"its update is discarded because {name} has the norm {norms[client][name]:.3g}, above the limit "
                    f"{exceeded[client]:.3g} ({FACTOR:g} times the median of the other sites, or the norm of the model)",
                )
        return outliers

    def _check_enough(self, round: str, accepted: int, asked: int, refused: int) -> None:
        """Stop the run if a round has fewer updates than it requires because replies were rejected or sites are excluded.

        Missing replies are a matter of the timeout, and sites that cannot take part in the round are not at fault.

        Args:
            round: Label of the round.
            accepted: Number of accepted updates.
            asked: Number of sites that were asked.
            refused: Number of rejected replies before the round.

        Raises:
            EngineError: If there are too few updates, unless ``on_timeout`` is ``continue``.
        """
        sites, policy = self.sites, self.sites.round_policy
        least, rejected = min(policy.min_updates, asked), sites.counts["refused"] - refused
        excluded = len(sites.excluded)
        at_fault = rejected or len(sites.sites) - excluded < least
        if at_fault and accepted < least and policy.on_timeout != "continue":
            raise EngineError(
                f"Round {round}: {rejected} replies were rejected, {excluded} sites are excluded, so {accepted} of at least "
                f"{least} updates remain, and the run stops. Correct these sites and resume it, or require fewer updates."
            )

    def accept_reply(self, broadcast: Broadcast, frame: Frame) -> Update | None:
        """Decode a site's reply to ``broadcast``; None if the site cannot take part in this round.

        Args:
            broadcast: Broadcast that was sent to the client.
            frame: Reply of the client's site.

        Raises:
            UnskewError: If the reply is not a valid update.
        """
        if self._left_out(broadcast.client, frame):
            return None
        update = decode_update(frame, broadcast, self.wire_context, self._num_samples(broadcast.client))
        like = self.placeholder(broadcast)
        if update.upload.keys() != like.keys():
            raise InvalidMessageError("it has uploads of other rules than those of the method that send some")
        for rule in self.wire_context.method.client:
            rule.check_sent(update.upload.get(rule.name, {}), like.get(rule.name, {}), self.wire_context.spec)
        self.sites.log("update accepted", broadcast.client, digest=arrays_digest(frame.arrays))
        return update

    def placeholder(self, broadcast: Broadcast) -> dict[str, Tensors]:
        """Return the uploads of a placeholder client, by rule and name; those of all sites must have their layout.

        Args:
            broadcast: Broadcast of the round; a survey after the last round has other uploads than the rounds before, and
                the uploads of a rule may depend on the names and shapes of what its server half sends.
        """
        sent = frozenset((rule, name, t.shape) for rule, own in broadcast.download.items() for name, t in own.items())
        key = broadcast.closing, sent
        if key not in self._placeholder:
            self._placeholder[key] = placeholder_upload(self.setup, broadcast)
        return self._placeholder[key]

    @property
    def in_flight(self) -> set[int]:
        """Clients whose update has been requested and has not arrived; always empty in synchronous rounds."""
        return set()

    def _num_samples(self, client: int) -> int:
        return self.setup.federation.clients[client].num_samples

    def _budget(self, client: int) -> dict[str, int]:
        budget = dict(self.budget)
        if self.setup.training.counted is not None:
            budget["counted"] = self.setup.training.counted[client]
        return budget

    def _left_out(self, client: int, frame: Frame) -> bool:
        """Return whether a site has no update in this round without being at fault, and report the reason."""
        reason = printable(frame.config.get("reason"))
        if frame.kind == "forgotten":
            self.server.clients.forget(client)
            self.sites.warn(
                f"{self.sites.name(client)} has lost its state of earlier rounds ({reason}); it continues as a new "
                "participant."
            )
            return True
        if frame.kind != "outdated":
            self.outdated.discard(client)
            return False
        self.outdated.add(client)
        if 2 * len(self.outdated) > len(self.sites.nodes):
            raise EngineError(
                f"Most sites have already trained later rounds of this run ({self.sites.name(client)}: {reason}). The run "
                "folder is probably an old copy: resume the newest one, or start a new run."
            )
        self.sites.warn(f"{self.sites.name(client)} is skipped in this round: {reason}.")
        return True

    def measure(self, broadcasts: Sequence[Broadcast], personal: bool) -> dict[int, dict[str, float]]:
        """Evaluate models at the clients' sites.

        Args:
            broadcasts: Broadcasts with the model to evaluate.
            personal: Whether to evaluate personal models, too.

        Returns:
            Accuracy and loss, by client; with ``personal``, also those of the personal model.
        """
        requests = {
            broadcast.client: encode_broadcast(
                broadcast, self.wire_context, "evaluate", {"own": personal, **self._budget(broadcast.client)}
            )
            for broadcast in broadcasts
        }

        def take(client: int, frame: Frame) -> dict[str, float] | None:
            if self._left_out(client, frame):
                return None
            if frame.kind != "scores":
                raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'scores'")
            task, scores = self.setup.task, dict[str, float]()
            for which in ("", "own_") if personal else ("",):
                name = f"{which}accuracy"
                # A primary metric that compares samples is undefined without pairs of them.
                undefined = task.ranked and math.isnan(read_metric(frame.metrics, name))
                scores[name] = math.nan if undefined else read_number(frame.metrics, name, task.least, 1.0)
                scores[f"{which}loss"] = read_metric(frame.metrics, f"{which}loss")
            return scores

        return dict(sorted(round_requests.ask_sites(self.sites, requests, "scores", take)))

    def metrics(self) -> dict[str, Any]:
        """Return the engine's round metrics; none for this engine."""
        return {}

    def close(self) -> None:
        """Do nothing: the connection to the sites is closed where it was opened."""
