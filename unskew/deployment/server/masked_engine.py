"""Rounds under secure aggregation: the sites train, and the server sees only the sum of their updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unskew.deployment.secagg.fixed_point import SumPart
from unskew.deployment.secagg.protocol import LEAST, min_sites
from unskew.deployment.server.engine import FlowerEngine
from unskew.deployment.server.masked_sum import (
    MaskedSum,
    OpenedSum,
    ReadySite,
    SumReopenedError,
    UnmaskingError,
    WrongSharesError,
    parse_parts,
    ready_site,
)
from unskew.deployment.wire.digests import arrays_digest
from unskew.deployment.wire.fields import LARGEST_NUMBER
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import check_reply_matches, encode_broadcast
from unskew.deployment.wire.tensor_codec import NAMES, InvalidMessageError, encode_record, euclidean_norm
from unskew.errors import ConfigError, EngineError
from unskew.protocol.messages import Broadcast, SummedUpdate, flatten_records, unflatten_records
from unskew.protocol.payload import scatter_slices, slices_length
from unskew.protocol.rules import Method
from unskew.simulation.update_buffer import AVERAGED_METRICS

TRIES = 3
"""Number of attempts of a round if too few sites remain to open its sum."""


class MaskedEngine(FlowerEngine):
    """``FlowerEngine`` under secure aggregation.

    Attributes:
        error: Bound of the rounding error of an entry of the mean update in the last round.
    """

    error = 0.0
    warned = False

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Any]:
        """Train a masked round and yield the sum of its updates as a ``SummedUpdate``; nothing if no site remains."""
        if not broadcasts:
            return
        opened = self._summed(broadcasts)
        weight = sum(broadcast.weight for broadcast in broadcasts if broadcast.client in opened.clients)
        opened = self._within_norm(opened, weight)
        if opened.clients:
            self._report_error(opened.error / weight, len(opened.clients))
            names = [self.sites.name(k) for k in opened.clients]
            self.sites.log("sum opened", sites=names, digest=arrays_digest(encode_record("sum", opened.tensors)))
        for broadcast in broadcasts:
            if broadcast.client not in (*opened.clients, *opened.unusable):
                self.server.clients.drop_sent(broadcast.client)
        if opened.clients or opened.unusable:
            yield self._update(broadcasts, opened, weight)

    def _within_norm(self, opened: OpenedSum, weight: float) -> OpenedSum:
        """Return a sum, or an empty one with a warning if a mean is larger than a plain update may be."""
        for name, total in opened.tensors.items():
            norm = euclidean_norm(total.double()) / (len(opened.clients) if name.startswith("upload/") else weight)
            if norm > self.wire_context.norm and name != "metrics":
                names = ", ".join(map(self.sites.name, opened.clients))
                self.sites.warn(
                    f"The mean of {name} over {names} has the norm {norm:.3g}, above the limit of "
                    f"{self.wire_context.norm:.3g} (--max-norm): at least one of these sites sent wrong numbers. "
                    "The round continues without any update."
                )
                return OpenedSum(unusable=opened.unusable)
        return opened

    def _summed(self, broadcasts: Sequence[Broadcast]) -> OpenedSum:
        """Return the sum of a round; if too few sites remain, try again if ``on_timeout`` is ``wait``."""
        if any(broadcast.up != broadcasts[0].up for broadcast in broadcasts):
            sync = self.wire_context.method.sync
            raise EngineError(
                f"{'' if sync is None else sync.name}.exchanged_slices returns different slices for different sites, which "
                "secure aggregation cannot add up. Return the same slices for all clients of a round, or turn it off."
            )
        text, barred = "", set[int]()
        round, patience = str(broadcasts[0].round + 1), self.sites.round_policy
        planned = self.server.setup.federation_info.plan.cohort  # sites count with it, too: fewer may be present
        least = max(patience.min_updates, min_sites(planned, self.wire_context.site_noise))
        tries = 0
        while tries < TRIES:
            left = {}
            for sent in broadcasts:
                if sent.client not in barred:  # who has lost its state is a new participant at the next attempt
                    current = replace(sent, accepted=self.server.clients.last_rounds.get(sent.client))
                    left[sent.client] = encode_broadcast(current, self.wire_context, "train", self._budget(sent.client))
            summation = MaskedSum(self.sites, broadcasts[0].round, least, self.roster)
            try:
                if len({*left} - {*self.sites.excluded}) < least:
                    raise UnmaskingError
                return summation.of(left, self._reply_reader(broadcasts, summation.session))
            except WrongSharesError as error:  # not counted as an attempt, because fewer sites remain each time
                barred |= {*error.guilty}
                self._report_guilty(error.guilty)
                continue
            except SumReopenedError as error:
                text = (
                    f"Round {round}: its sum over {error} was opened before the server was interrupted, and some of these "
                    "sites are missing. No other sum is opened, because the difference could reveal a single update"
                )
            except UnmaskingError:
                text = f"Round {round}: fewer than {summation.min_sites} of {planned} sites remain, "
                text += "so the sum cannot be opened"
            tries += 1
            if patience.on_timeout == "continue":
                self.sites.warn(f"{text}; the round continues without any update.")
                return OpenedSum()
            if patience.on_timeout == "abort":
                break
            self.sites.warn(f"{text}; the round is restarted.")
        raise EngineError(f"{text}, so the run stops. Resume it when the sites are back.")

    def _report_guilty(self, guilty: dict[int, tuple[str, bool]]) -> None:
        for client, (reason, certain) in guilty.items():
            if certain:
                self.sites.fault(client, f"{reason}, so it is left out of this sum")
            else:
                self.sites.warn(f"{self.sites.name(client)} is left out of this sum: {reason}.")

    def _reply_reader(self, broadcasts: Sequence[Broadcast], session: str) -> Any:
        by_client = {sent.client: sent for sent in broadcasts}
        owners: dict[str, int] = {}

        def take(client: int, frame: Frame) -> ReadySite | None:
            broadcast = by_client[client]
            if self._left_out(client, frame):
                return None
            if frame.kind == "unusable":
                return ReadySite(usable=False)
            if frame.kind != "ready":
                raise InvalidMessageError(f"its kind is {frame.kind[:40]!r}, but its update must be masked")
            check_reply_matches(frame.config, broadcast, self._num_samples(client))
            parts = parse_parts(frame.config)
            self._check_parts(parts, broadcast)
            return ready_site(client, frame, parts, (self.sites.run, broadcast.round, session), self.roster, owners)

        return take

    def _check_parts(self, parts: Sequence[SumPart], broadcast: Broadcast) -> None:
        """Validate that the tensors and their order follow from method, model and request, as ``summands`` lists them."""
        model = NAMES[broadcast.v.dtype]
        expected: list[tuple[str, str, tuple[int, ...]]] = []
        if self.wire_context.sends_model:
            expected.append(("delta", model, (slices_length(broadcast.up, self.wire_context.spec.size),)))
        expected.append(("buffers", NAMES[broadcast.b.dtype], (len(broadcast.b),)))
        if broadcast.report:
            expected.append(("report/v", model, (self.wire_context.spec.size,)))
        uploads = sorted(flatten_records("upload", self.placeholder(broadcast)).items())
        expected += [(name, NAMES[t.dtype], tuple(t.shape)) for name, t in uploads]
        if self.wire_context.site_noise is None:
            expected.append(("metrics", "float64", (len(AVERAGED_METRICS),)))
        if [(part.name, NAMES[part.dtype], part.shape) for part in parts] != expected:
            raise InvalidMessageError("the layout of its update does not match the request")

    def _update(self, broadcasts: Sequence[Broadcast], opened: OpenedSum, weight: float) -> SummedUpdate:
        """Return the message for the server; ``weight`` is the sum of the clients' weights."""
        by_client, sums = {broadcast.client: broadcast for broadcast in broadcasts}, opened.tensors
        v, b = broadcasts[0].v, broadcasts[0].b
        delta = torch.zeros_like(v, dtype=torch.float64)
        if "delta" in sums:
            delta = scatter_slices(delta, broadcasts[0].up, sums["delta"].to(v.device, copy=True))
            for client in () if self.wire_context.needs_base else opened.clients:
                broadcast = by_client[client]
                # In these slices, sites send values instead of changes.
                for span in self.wire_context.base(broadcast.down, broadcast.up):
                    delta[span] -= broadcast.weight * v[span].double()
        like = flatten_records("upload", self.placeholder(broadcasts[0])) if opened.clients else {}
        uploads = {name: to_dtype(sums[name], t.dtype).to(v.device) for name, t in like.items()}
        return SummedUpdate(
            origin_round=broadcasts[0].round,
            clients=tuple(client for client in by_client if client in opened.clients),
            unusable=tuple(client for client in by_client if client in opened.unusable),
            num_samples=sum(map(self._num_samples, opened.clients)),
            weight=weight,
            delta=delta.to(v),
            buffers=sums["buffers"].to(b) if opened.clients else torch.zeros_like(b),
            upload=unflatten_records("upload", uploads),
            report={n.removeprefix("report/"): t.to(v) for n, t in sums.items() if n.startswith("report/")},
            metrics=self._metrics(sums, len(opened.clients)),
        )

    def _metrics(self, sums: dict[str, Tensor], sites: int) -> dict[str, float]:
        """Return the sums of the updates' metrics; NaN for those that are impossible."""
        if "metrics" not in sums:
            return {}
        totals = dict(zip(AVERAGED_METRICS, sums["metrics"].tolist(), strict=True))
        spoiled = [n for n, x in totals.items() if not (n == "loss" or x >= 0) or not abs(x) <= sites * LARGEST_NUMBER]
        if spoiled:
            self.sites.warn(f"The sum of {' and '.join(spoiled)} is invalid, so a site has sent wrong numbers.")
        return totals | dict.fromkeys(spoiled, math.nan)

    def _report_error(self, error: float, sites: int) -> None:
        self.error = error
        if not self.warned:
            self.warned = True
            self.sites.warn(
                f"Secure aggregation: the server has opened the sum of {sites} sites. The rounding error of an "
                f"entry of the mean update is at most {error:.2g}."
            )

    def metrics(self) -> dict[str, Any]:
        """Return the round metric of the rounding error."""
        return {"masking_error": self.error}


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a sum to a dtype; integers are rounded.

    Args:
        tensor: Sum in double precision.
        dtype: Dtype of the summands.
    """
    return (tensor if dtype.is_floating_point else tensor.round()).to(dtype)


def check_maskable(method: Method, cohort: int, asynchronous: bool) -> None:
    """Validate that a run supports masked sums, before anything is sent.

    Args:
        method: Method of the run.
        cohort: Number of clients in a round.
        asynchronous: Whether updates are accepted in later rounds.

    Raises:
        ConfigError: If there are too few sites, or updates are needed one by one.
    """
    if cohort < LEAST:
        raise ConfigError(
            f"secure_aggregation=required needs at least {LEAST} sites in a round, but there are {cohort}: with two, each "
            "could compute the other's update. Let more sites take part, or turn it off if the server may see updates."
        )
    if callable(method.weights):
        raise ConfigError(
            f"{method.name} computes the weights of sites from the data of other sites. No site can verify its weight, and "
            "an unusual one could reveal a single update in the masked sum. Use another method, or turn it off."
        )
    if asynchronous:
        raise ConfigError(
            "--asynchronous processes each update separately, but secure_aggregation=required reveals only sums. Remove "
            "one of the two."
        )
    if method.server is not None and method.server.updates_per_step is not None:
        raise ConfigError(
            f"{method.server.name} empties its buffer in the middle of a round's updates, but in a deployment "
            "secure_aggregation=required reveals only the sum of a whole round. Use another method, or turn it off."
        )
