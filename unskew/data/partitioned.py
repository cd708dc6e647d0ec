"""Samples partitioned among clients, before and after global statistics from client sums transform them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from unskew.data.clients import DrawnClients, IndexedRows, take_rows
from unskew.data.federation import Federation, ServerData
from unskew.data.memory_map import locate_tensor
from unskew.data.normalization import Normalization
from unskew.data.partition.parsing import parse_partition
from unskew.data.partition.partitioner import Partition, get_column
from unskew.data.readers.encoders import FittedEncoders, client_stats, fit_encoders, missing_values, squared_deviations
from unskew.data.readers.tables import SampleTable, Source, fit_normalization
from unskew.data.spec import DataSpec
from unskew.data.target_scaling import fit_target_scaling
from unskew.tasks.registry import TASKS
from unskew.tasks.regression import Regression


class GlobalStats(NamedTuple):
    """Global statistics computed from client sums.

    Attributes:
        columns: Fitted encoders of a table with mixed column types, or None.
        targets: Regression task with the mean and scale of its targets, or None.
        traffic: Bytes that each client sent and received for the statistics, ``[K, 2]``; None if there was no traffic.
    """

    columns: FittedEncoders | None = None
    targets: Regression | None = None
    traffic: np.ndarray | None = None


@dataclass(frozen=True)
class PartitionedSource:
    """Data source with its partition among clients.

    Attributes:
        spec: Data specification with local files.
        named: The same specification as requested, before URLs were replaced by local files.
        seed: Random seed of the run.
        source: The data source.
        train: Samples that are partitioned among clients.
        test: Samples of the global test set.
        at_server: Server data, or None.
        parts: The data partition.
        rows: Indices into ``train``, client by client, in each client's order.
        splits: Position in ``rows`` where each client's held-out samples start, ``[K]``.
    """

    spec: DataSpec
    named: DataSpec
    seed: int
    source: Source
    train: SampleTable
    test: SampleTable
    at_server: ServerData | None
    parts: Partition
    rows: Tensor
    splits: np.ndarray

    def client(self, k: int) -> tuple[SampleTable, SampleTable]:
        """Return a client's training and held-out samples, not encoded and not scaled."""
        start, split, stop = int(self.parts.offsets[k]), int(self.splits[k]), int(self.parts.offsets[k + 1])
        first, held_out = (self.rows[a:b] for a, b in ((start, split), (split, stop)))
        x, y = self.train.x, self.train.y
        return SampleTable(take_rows(x, first), y[first], {}), SampleTable(take_rows(x, held_out), y[held_out], {})

    def only(self, ids: np.ndarray) -> PartitionedSource:
        """Return the same data with only some of the clients, which are numbered from 0.

        Args:
            ids: Clients to keep, in order.
        """
        parts = self.parts
        positions = np.concatenate([np.arange(parts.offsets[k], parts.offsets[k + 1]) for k in ids])
        offsets = np.concatenate([[0], np.cumsum(parts.sizes[ids])]).astype(np.int64)
        names = tuple(parts.names[k] for k in ids) if parts.names else ()
        selected = Partition(parts.order[positions], offsets, parts.name, names)
        splits = offsets[:-1] + (self.splits - parts.offsets[:-1])[ids]
        return replace(self, parts=selected, rows=self.rows[positions], splits=splits)

    def _each(self, values: np.ndarray) -> Iterator[np.ndarray]:
        """Iterate over the training part of each client of an array with one entry per row."""
        order = self.rows.numpy()
        spans = zip(self.parts.offsets[:-1], self.splits, strict=True)
        return (values[order[start:stop]] for start, stop in spans)

    def known(self) -> GlobalStats:
        """Compute the statistics that encode columns and scale targets, from sums over clients' training samples."""
        columns = None
        targets = None
        total = None
        if self.source.encoders:
            before, x = self.source.encoders, self.train.x.numpy()
            columns = fit_encoders(
                before,
                self.source.indicate,
                [client_stats(part, before) for part in self._each(x)],
                lambda mean: (squared_deviations(part, before, mean) for part in self._each(x)),
            )
            total = columns.traffic
        if TASKS[self.source.task].standardized:
            y = self.train.y.numpy()
            targets, sent = fit_target_scaling(lambda: self._each(y), self.source.class_names)
            total = sent if total is None else total + sent
        return GlobalStats(columns, targets, total)

    def federation(self, known: GlobalStats) -> Federation:
        """Build the federation, with inputs and targets transformed by the global statistics."""
        source = self.source
        train = self.train
        test = self.test
        at_server = self.at_server
        rows = self.rows
        y = train.y[rows]
        offsets = self.parts.offsets
        normalization: Normalization | None
        missing = None
        if known.columns is not None:
            apply = known.columns.apply
            absent = missing_values(train.x.numpy(), source.encoders)
            missing = np.stack([absent[self.rows[a:b]].sum(0) for a, b in pairwise(offsets)])
            train, test = (replace(part, x=apply(part.x)) for part in (train, test))
            at_server = None if at_server is None else replace(at_server, x=apply(at_server.x))
            normalization = known.columns.normalization
        elif len(y) == len(train):
            normalization = source.normalization
        else:
            normalization = fit_normalization(take_rows(train.x, rows))
        if known.targets is not None:
            scaled = known.targets.standardize
            y, test = scaled(y), replace(test, y=scaled(test.y))
            at_server = None if at_server is None else replace(at_server, y=scaled(at_server.y))
        in_file = locate_tensor(train.x) is not None
        clients = DrawnClients(IndexedRows(train.x, rows, offsets), train.x[:1], y, offsets, self.splits, in_file)
        clients.source = self.named, self.seed
        return Federation(
            clients=clients,
            test=(test.x, test.y),
            server=at_server,
            task=source.task,
            classes=source.classes,
            normalization=normalization,
            class_names=source.class_names,
            name=source.name,
            partition=self.parts.name,
            fingerprint=self.parts.fingerprint,
            client_names=self.parts.names,
            text_groups=rows_per_value(self.parts, train, self.spec.partition) if TASKS[source.task].tokens else None,
            columns=source.columns,
            encoders=() if known.columns is None else known.columns.encoders,
            trained_for=known.targets,
            stats_traffic=known.traffic,
            missing=missing,
        )


def rows_per_value(
    parts: Partition, train: SampleTable, partition: object
) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """Count rows per client and value of the column by which the data are partitioned.

    Args:
        parts: The data partition.
        train: Training samples.
        partition: Partition expression or object.

    Returns:
        Counts ``[K, G]`` and the ``G`` values; None without such a column or with more than 100 values.
    """
    column = (
        parse_partition(partition)[1]
        if isinstance(partition, str) and partition.startswith(("natural:", "sorted:"))
        else ""
    )
    if not column:
        return None
    names, values = np.unique(get_column(train.columns, column, "partition").astype(str), return_inverse=True)
    if len(names) > 100:  # probably a numeric column, not groups of texts
        return None
    counts = [np.bincount(values.reshape(-1)[parts.indices(k)], minlength=len(names)) for k in range(parts.clients)]
    return np.stack(counts), tuple(names.tolist())
