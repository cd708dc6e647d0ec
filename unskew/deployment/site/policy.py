"""Rules of a site for the statistics that a server requests: permissions, small counts, noise, and no differencing.

A statistic covers all training rows. What the site stores (``statistics_ledger``) prevents that a server learns more from the
difference of two replies: the same request gets the same reply, each column is counted on one grid and each label column with
one list of classes, one data schema prepares all inputs, and after a change of few rows the site does not reply. Kinds of
sums without a permission belong to the experiment and are not restricted here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew.deployment.common.small_counts import follow_from_sum
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.row_hashes import (
    RowHashes,
    RowValues,
    count_changes,
    hash_rows,
    parts_of_rows,
    with_training_rows,
)
from unskew.deployment.site.statistics_ledger import StatisticsLedger, StatisticsRecords, StoredReply
from unskew.errors import ConfigError, first_problem, unknown_name
from unskew.privacy.discrete_laplace import discrete_laplace
from unskew.sums.base import ClientRows, SumKind, SumRequest, Sums
from unskew.sums.exchange import own_sums
from unskew.sums.registry import SUMS

TOLERANCE = 1e-9
"""Rounding error of a sum of privacy losses."""
PREPARED = ("features", "gradients")
"""Permissions of kinds of sums over inputs that the data schema prepares."""
MOST = 10_000
"""Largest number of stored replies; each of them stays on the site's disk."""


@dataclass(frozen=True)
class StatisticsReply:
    """Reply of a site to requests for sums.

    Attributes:
        sums: Tensors for each request.
        hidden: For each request, the positions that are 0 because too few rows are behind them, by tensor: of counts in row
            order, of other sums along the first dimension.
        epsilon: Privacy loss of the reply; 0 for what was sent before.
    """

    sums: list[Sums]
    hidden: list[dict[str, list[int]]]
    epsilon: float = 0.0


@dataclass
class _Message:
    """Requests of one message while the site replies to them.

    Attributes:
        records: Record of earlier replies, and of those of this message.
        hashes: Hashes of the rows, as they are stored.
        same: Files with hashes of the same rows.
        schema: Digest of the data schema.
        experiment: Digest of the experiment.
        masked: Whether the server sees only the sum over sites.
        events: Events for the log.
    """

    records: StatisticsRecords
    hashes: RowHashes
    same: set[str]
    schema: str
    experiment: str
    masked: bool
    events: list[dict[str, Any]] = field(default_factory=list)


class StatisticsPolicy:
    """Replies to requests for sums as ``statistics`` of ``site.yaml`` allows.

    Args:
        config: Configuration of the site.
        folder: Folder of the configuration.
        log: Called with messages for the site's administrator, which may tell more than the server may know.
    """

    def __init__(self, config: SiteConfig, folder: Path, log: Callable[[str], None]):
        self.site, self.rules, self.log = config.name, config.statistics, log
        self.ledger = StatisticsLedger(config.path("state", folder))
        self._hashed: tuple[RowValues, str, RowHashes] | None = None

    def reply(
        self,
        experiment: str,
        run: str,
        requests: Sequence[SumRequest],
        rows: ClientRows,
        values: RowValues,
        masked: bool = False,
        schema: str = "",
    ) -> StatisticsReply:
        """Reply to the requests of one message; the reply and its privacy loss are stored before this returns.

        Args:
            experiment: Digest of the experiment.
            run: Identifier of the run.
            requests: Requests, of which some may need no permission.
            rows: All training rows of the site.
            values: Values of all rows of the site, the training rows first, from ``row_values``; the same object as long as
                the data do not change.
            masked: Whether the server sees only the sum over sites. Small counts then stay, unless ``mask_small`` is set, and
                noisy counts may be negative.
            schema: Digest of the data schema that the server sent, which prepares the inputs of the rows.

        Raises:
            ConfigError: If a statistic is not allowed or needs a second grid or data schema, few rows have changed since an
                earlier reply, or the privacy budget is spent.
            DataError: If the data do not have what is requested.
            CheckpointError: If the record of earlier replies is corrupted, or cannot be written.
        """
        requests = [self._checked(request) for request in requests]
        if plain := [request.kind for request in requests if SUMS[request.kind].masked_only and not masked]:
            raise ConfigError(
                f"The site {self.site} sends the statistic {plain[0]} only under secure aggregation, because it could reveal "
                "single rows."
            )
        if not any(SUMS[request.kind].permission for request in requests):
            return StatisticsReply(own_sums(rows, requests), [{} for _ in requests])
        reply = StatisticsReply([], [])
        with self.ledger.locked():
            records = self.ledger.read()
            hashes = with_training_rows(self._hashes(values, records.key), rows.num_rows)
            message = _Message(records, hashes, self._same_data(records, hashes), schema, experiment, masked)
            for request in requests:
                kind = SUMS[request.kind]
                small: dict[str, list[int]] = {}
                if kind.permission:
                    stored, loss = self._stored(message, kind, request, rows)
                    own, small = self._without_small(kind, request, rows, stored, masked)
                    about = {"request": request.digest, "kind": kind.name, "epsilon": loss, "masked": masked}
                    about["hidden"] = sum(map(len, small.values()))
                    message.events.append({"event": "sent", "run": run, "experiment": experiment, **about})
                else:
                    own = kind.compute(rows, request)
                reply.sums.append(own)
                reply.hidden.append(small)
            # The log comes first: after a crash in between, it has too many replies rather than too few.
            self.ledger.log(message.events)
            if message.records != records:
                self.ledger.write(message.records)
        return replace(reply, epsilon=sum(event["epsilon"] for event in message.events))

    def _checked(self, request: SumRequest) -> SumRequest:
        """Validate a request, and return it in the form that is the same for all requests for the same statistic."""
        kind = SUMS.get(request.kind)
        if kind is None:
            raise ConfigError(unknown_name("statistic", request.kind[:40], SUMS))
        if not kind.permission:
            return request
        what = f"The site {self.site} does not send the statistic {kind.name}"
        if kind.permission not in self.rules.allow:
            line = ", ".join((*self.rules.allow, kind.permission))
            raise ConfigError(
                f"{what}, because it needs the permission {kind.permission}. To permit it, the site's administrator "
                f"sets allow: [{line}] in the section statistics of site.yaml."
            )
        try:
            args = kind.arguments.model_validate_json(json.dumps(dict(request.args))).model_dump(mode="json")
        except ValueError as error:
            raise ConfigError(f"{what} for these arguments: {first_problem(error)}.") from error
        if extra := [*{*request.tensors}.difference(kind.constants)]:
            raise ConfigError(f"{what} for the constant {extra[0][:40]!r}, which is unknown.")
        checked = SumRequest(kind.name, args, request.tensors)
        if self.rules.epsilon is not None and {*kind.shapes(checked)} != {*kind.cells(checked)}:
            raise ConfigError(f"{what}, because noise (statistics.epsilon in site.yaml) can be added to counts only.")
        return checked

    def _hashes(self, values: RowValues, key: str) -> RowHashes:
        """Return the hashes of the rows, computed once for the same data and key."""
        if self._hashed is None or self._hashed[0] is not values or self._hashed[1] != key:
            self._hashed = values, key, hash_rows(values, bytes.fromhex(key))
        return self._hashed[2]

    def _same_data(self, records: StatisticsRecords, hashes: RowHashes) -> set[str]:
        """Return the files with hashes of the same rows, after validating that few changes could not be computed.

        Training rows are also compared alone: a new one could hide among new held-out rows, and experiments divide the same
        rows differently.
        """
        same, now = set(), parts_of_rows(hashes)
        for file in records.data:
            changes, train = map(count_changes, parts_of_rows(self.ledger.tensors(file)), now)
            both = changes | {f"{name} of the training rows": count for name, count in train.items()}
            few = {name: count for name, count in both.items() if 0 < count < self.rules.min_count}
            if few:
                self.log(
                    "Statistics refused. Rows changed since an earlier reply: "
                    + ", ".join(f"{count} in {name}" for name, count in few.items())
                )
                raise ConfigError(
                    f"The data of the site {self.site} differ in fewer than {self.rules.min_count} rows from those of an "
                    "earlier reply, so the difference could reveal single rows. Repeat the request when more rows have "
                    "changed. Otherwise, the site's administrator can run unskew deploy forget site.yaml."
                )
            if not changes["all columns"]:
                same.add(file)
        return same

    def _stored(
        self, message: _Message, kind: SumKind, request: SumRequest, rows: ClientRows
    ) -> tuple[dict[str, Tensor], float]:
        """Return the stored tensors of a reply and its privacy loss, 0 for an earlier reply."""
        records, rules = message.records, self.rules
        for column, grid in kind.grids(request, rows).items():
            if records.grids.get(column, grid) != grid:
                raise ConfigError(
                    f"The site {self.site} has already counted {column} on the grid {[*records.grids[column]]} and counts "
                    f"it on no other one, because two grids would reveal finer cells. Set its range to that of the first "
                    "request. Otherwise, the site's administrator can run unskew deploy forget site.yaml."
                )
            records = records.model_copy(update={"grids": {**records.grids, column: grid}})
        if kind.permission in PREPARED:
            if records.data_schema not in ("", message.schema):
                raise ConfigError(
                    f"The site {self.site} has already sent sums of inputs that another data schema prepared (means, "
                    "categories or normalization) and sends none with a second one, because the difference would reveal "
                    "smaller groups. Use the data schema of the first request. Otherwise, the site's administrator can run "
                    "unskew deploy forget site.yaml."
                )
            records = records.model_copy(update={"data_schema": message.schema})
        labels = rows.labels if kind.uses_labels else ()
        for what, digest in only_values(kind, request, rows, message.masked).items():
            if records.fixed.get(what, digest) != digest:
                raise ConfigError(
                    f"The site {self.site} has already sent statistics with other {what}, and sends none with these, because "
                    "the difference could reveal counts of single rows or sites. Use those of the first request. Otherwise, "
                    "the site's administrator can run unskew deploy forget site.yaml."
                )
            records = records.model_copy(update={"fixed": {**records.fixed, what: digest}})
        experiment = message.experiment if kind.of_experiment else ""
        identity = hashlib.sha256(json.dumps([request.digest, labels, experiment]).encode()).hexdigest()
        for reply in records.replies:
            if (reply.request, reply.epsilon) == (identity, rules.epsilon) and reply.data in message.same:
                message.records = records
                return self.ledger.tensors(reply.sums), 0.0
        if len(records.replies) >= MOST:
            raise ConfigError(
                f"The site {self.site} has sent {MOST:,} statistics and sends no new ones. Its administrator can run unskew "
                "deploy forget site.yaml."
            )
        own, loss = kind.compute(rows, request), 0.0
        kind.check(request, own)
        if rules.epsilon is not None:
            for name, counts in own.items():
                noise = torch.tensor(discrete_laplace(rules.epsilon, counts.numel()), dtype=torch.int64)
                own = {**own, name: counts + noise.reshape(counts.shape)}
                # A row changes one disjoint count, and possibly each of the others.
                loss += rules.epsilon * (1 if kind.disjoint(rows) else counts.numel())
        spent = records.spent + loss
        if rules.total_epsilon is not None and spent > rules.total_epsilon + TOLERANCE:
            raise ConfigError(
                f"The site {self.site} sends no more new statistics: with {kind.name}, the sum of privacy losses would be "
                f"{spent:g}, more than total_epsilon={rules.total_epsilon:g} in its site.yaml."
            )
        # Experiments may divide the same data into other training rows, so what decides about small groups is stored, too.
        tensors = {"rows": torch.tensor(rows.num_rows)} | {f"sums/{name}": tensor for name, tensor in own.items()}
        tensors |= {f"groups/{name}": sizes for name, sizes in kind.group_sizes(rows, request).items()}
        data = self.ledger.write_tensors(message.hashes)
        file = self.ledger.write_tensors(tensors)
        reply = StoredReply(request=identity, data=data, epsilon=rules.epsilon, sums=file)
        update = {
            "replies": (*records.replies, reply),
            "data": (*dict.fromkeys((*records.data, data)),),
            "spent": spent,
        }
        message.records = records.model_copy(update=update)
        message.same.add(data)
        return tensors, loss

    def _without_small(
        self, kind: SumKind, request: SumRequest, rows: ClientRows, stored: dict[str, Tensor], masked: bool
    ) -> tuple[Sums, dict[str, list[int]]]:
        """Return the tensors to send, with 0 for small counts and groups, and their positions."""
        own = {name.removeprefix("sums/"): tensor for name, tensor in stored.items() if name.startswith("sums/")}
        if masked and not self.rules.mask_small:
            return own, {}
        least, noisy, positions = self.rules.min_count, self.rules.epsilon is not None, {}
        total = int(stored["rows"]) if kind.disjoint(rows) else None
        for name, tensor in own.items():
            groups = stored.get(f"groups/{name}")
            if groups is not None:
                small = torch.zeros(len(groups), dtype=torch.bool)
                for sizes in groups.unbind(1) if groups.dim() > 1 else (groups,):
                    # Every row is in a group, but the size of a group may be that of a part of it.
                    rows_of_groups = None if total is None else int(sizes.sum())
                    small |= small_cells(sizes, least, rows_of_groups)
            elif name in kind.cells(request):
                small = tensor < least if noisy else small_cells(tensor, least, total)
            else:
                continue
            own[name] = tensor.masked_fill(small.reshape(*small.shape, *[1] * (tensor.dim() - small.dim())), 0)
            if small.any():
                positions[name] = torch.nonzero(small.flatten())[:, 0].tolist()
        return own, positions


def only_values(kind: SumKind, request: SumRequest, rows: ClientRows, masked: bool) -> dict[str, str]:
    """Return the digest of each part of a request for which a site accepts a single value, by its name.

    These are the list of classes, because another one would get new noise for the same counts, and ``SumKind.once``.

    Args:
        kind: Kind of the request.
        request: The request.
        rows: Training rows of the site.
        masked: Whether the server sees only the sum over sites.
    """
    labels = f" of {', '.join(rows.labels)}" if kind.uses_labels and rows.labels else ""
    digests = {}
    if request.args.get("classes"):
        digests[f"classes{labels}"] = hashlib.sha256(json.dumps(rows.class_names).encode()).hexdigest()
    for name in kind.once if masked else ():
        if name in request.tensors:
            digests[f"{name} for {kind.name}{labels}"] = replace(request, tensors={name: request.tensors[name]}).digest
    return digests


def small_cells(counts: Tensor, least: int, total: int | None) -> Tensor:
    """Return which counts to hide: all from 1 to below ``least``, and if their sum is known, more until it says little.

    What is hidden depends on the values and not on their order, and equal counts are hidden together. So every exchange of
    values among hidden cells gives the same reply, and each of them has at least two possible values. The same holds for a
    small number of rows without a value if two cells are hidden, which could be small instead of it.

    Args:
        counts: Number of rows in each cell.
        least: Smallest count that is not hidden.
        total: Number of rows if each is in at most one cell, so that the sum of the hidden counts follows from the others;
            None otherwise.

    >>> small_cells(torch.tensor([3, 0, 40, 20]), 10, 63).tolist()
    [True, False, False, True]
    """
    flat = counts.flatten()
    small = (flat > 0) & (flat < least)
    if total is None:
        return small.reshape(counts.shape)
    hidden, fewest, rest = flat[small].tolist(), 0, total - int(flat.sum())
    if 0 < rest < least:  # rows without a value are a cell as well, which is never sent
        hidden, fewest = [*hidden, rest], 2
    while hidden and (sum(hidden) < least or small.sum() < fewest or follow_from_sum(hidden, 1, least - 1)):
        shown = flat[(flat > 0) & ~small]
        if not len(shown):
            small[:] = True  # all rows are in small cells
            break
        added = flat == shown.min()
        small |= added
        hidden += flat[added].tolist()
    return small.reshape(counts.shape)
