"""Samples partitioned among clients, before and after global statistics from client sums transform them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.data.clients import DrawnClients, IndexedRows, take_rows
from unskew.data.column_statistics import column_totals
from unskew.data.federation import Federation, ServerData
from unskew.data.harmonize import Harmonization
from unskew.data.memory_map import locate_tensor
from unskew.data.normalization import Normalization
from unskew.data.packing import PADDING, pack_rows
from unskew.data.partition.parsing import parse_partition
from unskew.data.partition.partitioner import Partition, get_column
from unskew.data.readers.column_roles import LABEL
from unskew.data.readers.encoders import (
    FittedEncoders,
    column_rows,
    fit_encoders,
    missing_values,
    numeric_columns,
    values_of,
)
from unskew.data.readers.tables import SampleTable, Source, fit_normalization
from unskew.data.spec import DataSpec, TextSpec, parse_split
from unskew.data.target_scaling import fitted_task, task_with_moments
from unskew.sums.base import ClientRows, Computed
from unskew.sums.exchange import Exchange, SimulatedExchange
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS


class GlobalStats(NamedTuple):
    """Global statistics computed from client sums.

    Attributes:
        columns: Fitted encoders of a table with mixed column types, or None.
        task: Task with constants from the data, such as the mean and scale of regression targets; None if it has none.
        traffic: Bytes that each client sent and received for the statistics, ``[K, 2]``; None if there was no traffic.
    """

    columns: FittedEncoders | None = None
    task: Task | None = None
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
        harmonization: Harmonization that was applied to the inputs, or None.
        sent: Bytes that each client sent and received for it, ``[K, 2]``.
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
    harmonization: Harmonization | None = None
    sent: np.ndarray | None = None

    def client(self, k: int) -> tuple[SampleTable, SampleTable]:
        """Return a client's training and held-out samples, not encoded and not scaled."""
        start, split, stop = int(self.parts.offsets[k]), int(self.splits[k]), int(self.parts.offsets[k + 1])
        first, held_out = (self.rows[a:b] for a, b in ((start, split), (split, stop)))
        x, y = self.train.x, self.train.y
        parts = SampleTable(take_rows(x, first), y[first], {}), SampleTable(take_rows(x, held_out), y[held_out], {})
        return packed_if_requested(parts[0], self.spec.text), padded_if_packed(parts[1], self.spec.text)

    def packed(self) -> PartitionedSource:
        """Return the same data with the training texts of each client packed, and those of the server."""
        bounds = np.sort(np.concatenate([self.parts.offsets, self.splits])).tolist()
        pack = partial(packed_if_requested, text=self.spec.text)
        pad = partial(padded_if_packed, text=self.spec.text)
        tables = [
            (pad if number % 2 else pack)(self.train.rows(self.rows[start:stop].numpy()))
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]
        offsets = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
        train = SampleTable(
            torch.cat([table.x for table in tables]),
            torch.cat([table.y for table in tables]),
            {name: np.concatenate([table.columns[name] for table in tables]) for name in self.train.columns},
        )
        server = None if self.at_server is None else pack(SampleTable(self.at_server.x, self.at_server.y, {}))
        return replace(
            self,
            train=train,
            test=pad(self.test),
            at_server=None if server is None else ServerData(server.x, server.y),
            parts=replace(self.parts, order=np.arange(len(train)), offsets=offsets[::2]),
            rows=torch.arange(len(train)),
            splits=offsets[1::2],
        )

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

    def held_out(self, training: PartitionedSource) -> PartitionedSource:
        """Return the same clients with all of their samples held out, because they train on none.

        Samples are left out whose group (``split_by``) is in the training samples of other clients.

        Args:
            training: Clients that train.
        """
        order = self.rows.numpy()
        keep = np.ones(len(order), bool)
        group = None if self.spec.split_by is None else parse_split(self.spec.split_by).group
        if group is not None:
            groups = get_column(self.train.columns, group, "split_by")
            keep = ~np.isin(groups[order], groups[np.concatenate([*training.training_rows()])])
        left = np.concatenate([[0], np.cumsum(keep)])
        offsets = left[self.parts.offsets].astype(np.int64)
        parts = Partition(self.parts.order[keep], offsets, self.parts.name, self.parts.names)
        return replace(self, parts=parts, rows=self.rows[torch.from_numpy(keep)], splits=offsets[:-1])

    def training_rows(self) -> Iterator[np.ndarray]:
        """Iterate over the indices of each client's training samples in ``train``."""
        order = self.rows.numpy()
        return (order[start:stop] for start, stop in zip(self.parts.offsets[:-1], self.splits, strict=True))

    def client_rows(self) -> Iterator[ClientRows]:
        """Iterate over the training rows of the clients, as sums use them."""
        return (rows_of_table(self.source, self.train.x, self.train.y, rows) for rows in self.training_rows())

    def known(self, exchange: Exchange | None = None, rows: int | None = None) -> GlobalStats:
        """Compute the statistics that encode columns and fit the task, from sums over clients' training samples.

        Args:
            exchange: Asks all clients for sums; by default, they are computed here.
            rows: Number of training samples of all clients; by default, of those here.

        Raises:
            DataError: If no client has a value in some column, or the task cannot be fitted.
        """
        source, known = self.source, self.source.encoders
        targets = target_names(source)
        if not known and not targets and not source.objective.fits:
            return GlobalStats()
        exchange = exchange or SimulatedExchange(self.client_rows)
        rows = int((self.splits - self.parts.offsets[:-1]).sum()) if rows is None else rows
        agreed = self.spec.category_values
        coded = [encoder.name for encoder in known if encoder.kind == "category" and encoder.name not in agreed]
        found = column_totals(exchange, [known[j].name for j in numeric_columns(known)], targets, coded)
        task: Task | None = task_with_moments(found.targets) if targets else None
        sent = found.result_bytes
        if source.objective.fits:
            task, constants = fitted_task(source.objective, exchange)
            sent += constants
        return GlobalStats(
            fit_encoders(known, source.indicate, found, rows, agreed) if known else None,
            task,
            exchange.traffic + [0, sent] + (0 if self.sent is None else self.sent),
        )

    def federation(self, known: GlobalStats) -> Federation:
        """Build the federation, with inputs and targets transformed by the global statistics."""
        if self.spec.text.pack:
            single = self.spec.model_copy(update={"text": self.spec.text.model_copy(update={"pack": False})})
            federation = replace(self.packed(), spec=single).federation(known)
            return replace(federation, fingerprint=self.parts.fingerprint)
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
            missing = np.stack([absent[rows.numpy()[a:b]].sum(0) for a, b in pairwise(offsets)])
            train, test = (replace(part, x=apply(part.x)) for part in (train, test))
            at_server = None if at_server is None else replace(at_server, x=apply(at_server.x))
            normalization = known.columns.normalization
        elif len(y) in (0, len(train)):
            normalization = source.normalization
        else:
            normalization = fit_normalization(take_rows(train.x, rows))
        task = known.task or source.trained_for
        if known.task is not None:
            scaled = known.task.standardize
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
            classes=source.classes if task is None else len(task.names) or source.classes,
            normalization=normalization,
            class_names=source.class_names if task is None else task.names or source.class_names,
            name=source.name,
            partition=self.parts.name,
            fingerprint=self.parts.fingerprint,
            client_names=self.parts.names,
            text_groups=rows_per_value(self) if TASKS[source.task].tokens else None,
            columns=source.columns,
            encoders=() if known.columns is None else known.columns.encoders,
            trained_for=task,
            stats_traffic=known.traffic,
            harmonization=self.harmonization,
            missing=missing,
            split_group=None if self.spec.split_by is None else parse_split(self.spec.split_by).group,
        )


def packed_if_requested(texts: SampleTable, text: TextSpec) -> SampleTable:
    """Return a table whose rows have several of the texts each, with the columns of the first, if ``text.pack`` is set.

    Args:
        texts: Table with a text in each row.
        text: Options of texts.
    """
    if not text.pack:
        return texts
    x, y, first = pack_rows(texts.x, texts.y, packed_width(texts, text))
    return SampleTable(x, y, {name: values[first] for name, values in texts.columns.items()})


def padded_if_packed(texts: SampleTable, text: TextSpec) -> SampleTable:
    """Return a table for evaluation, whose texts are not packed, with the width of packed rows if ``text.pack`` is set.

    Args:
        texts: Table with a text in each row.
        text: Options of texts.
    """
    if not text.pack:
        return texts
    padding = (0, packed_width(texts, text) - texts.x.shape[1])
    x, y = (F.pad(values, padding, value=PADDING) for values in (texts.x, texts.y))
    return replace(texts, x=x, y=y)


def packed_width(texts: SampleTable, text: TextSpec) -> int:
    """Return the number of inputs of a packed row: ``block - 1``, or one more if the mark of a truncated answer needs it.

    Args:
        texts: Table with a text in each row, padded to the longest of all tables.
        text: Options of texts.
    """
    return max(text.block - 1, texts.x.shape[1])


def target_names(source: Source) -> tuple[str, ...]:
    """Return the names of the targets of regression; empty for other tasks."""
    if not TASKS[source.task].standardized:
        return ()
    return tuple(source.class_names) or tuple(str(t) for t in range(source.classes))


def label_columns(source: Source) -> tuple[str, ...]:
    """Return the names of the label columns of a table; empty for other data."""
    return tuple(name for name, role in source.columns.items() if role.startswith(LABEL))


def rows_of_table(source: Source, x: Tensor, y: Tensor, rows: np.ndarray) -> ClientRows:
    """Return rows of a data source as sums use them, before global statistics are applied.

    Args:
        source: Data source.
        x: Its inputs as read.
        y: Its targets as read.
        rows: Indices of the rows.
    """
    known, targets = source.encoders, target_names(source)
    table = x.numpy()[rows] if known else np.zeros((len(rows), 0))
    names, coded = (
        [encoder.name for encoder in known],
        [j for j, encoder in enumerate(known) if encoder.kind == "category"],
    )
    return replace(
        column_rows(table, known),
        values=Computed([names[j] for j in coded], lambda i: values_of(table[:, coded[i]], known[coded[i]])),
        missing=Computed(names, lambda j: int(missing_values(table[:, j : j + 1], known[j : j + 1]).sum())),
        target_names=targets,
        targets=y.numpy()[rows] if targets else np.zeros((len(rows), 0)),
        y=y[torch.from_numpy(rows)] if source.objective.fits else None,
        labels=label_columns(source),
    )


def rows_per_value(drawn: PartitionedSource) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """Count training rows per client and value of the column by which the data are partitioned.

    Args:
        drawn: Partitioned samples.

    Returns:
        Counts ``[K, G]`` and the ``G`` values; None without such a column or with more than 100 values.
    """
    partition = drawn.spec.partition
    column = (
        parse_partition(partition)[1]
        if isinstance(partition, str) and partition.startswith(("natural:", "sorted:"))
        else ""
    )
    if not column:
        return None
    names, values = np.unique(get_column(drawn.train.columns, column, "partition").astype(str), return_inverse=True)
    if len(names) > 100:  # probably a numeric column, not groups of texts
        return None
    counts = [np.bincount(values.reshape(-1)[rows], minlength=len(names)) for rows in drawn.training_rows()]
    return np.stack(counts), tuple(names.tolist())
