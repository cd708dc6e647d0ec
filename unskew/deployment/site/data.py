"""Data of a site: its own samples, or its client's part of the experiment's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from unskew.config.experiment import Experiment
from unskew.data.federation import ClientData, Federation
from unskew.data.load import load_partitioned, load_source_for, task_options
from unskew.data.partition.parsing import partition_column
from unskew.data.partition.partitioner import Partition
from unskew.data.partitioned import PartitionedSource, packed_if_requested, padded_if_packed, rows_of_table
from unskew.data.readers.column_roles import ColumnSelection
from unskew.data.readers.encoders import Encoder, FittedEncoders
from unskew.data.readers.tables import SampleTable, Source
from unskew.data.readers.text import is_text
from unskew.data.sources.registry import load_source
from unskew.data.spec import DataSpec, TextSpec, parse_split
from unskew.data.task_options import apply_task_options
from unskew.deployment.common.client_view import SingleClientView
from unskew.deployment.common.data_schema import DataSchema, reference_schema
from unskew.deployment.site.config import OwnData, SiteConfig, resolve_path
from unskew.errors import ConfigError, DataError
from unskew.sums.base import ClientRows
from unskew.tasks.registry import TASKS


@dataclass(frozen=True)
class SiteData:
    """A site's samples as read, before global column statistics are applied.

    Attributes:
        client: Client number of the site; ``total``: number of clients.
        who: Name of the site in error messages.
        train: Training samples.
        held: Held-out samples.
        source: Data source of the samples.
        has_texts: Whether the samples are texts of the site, of at most ``text.block`` tokens, instead of arrays.
    """

    client: int
    total: int
    who: str
    train: SampleTable
    held: SampleTable
    source: Source
    has_texts: bool = False

    def federation(self, reference: DataSchema, loss: str) -> Federation:
        """Build the federation of this site: its samples encoded according to ``reference``, and empty other clients.

        Args:
            reference: Schema of the data.
            loss: Loss of regression, or ``auto``.

        Raises:
            DataError: If there are no training samples, or a class is unknown to the server.
            ConfigError: If the data do not match the schema.
        """
        source, parts = self.source, (self.train, self.held)
        self.check_kind(reference)
        if reference.columns:
            fitted = FittedEncoders(reference.columns, source.encoders)
            x, x_test = (fitted.apply(part.x) for part in parts)
        else:
            x, x_test = (part.x for part in parts)
        task, names = reference.objective, reference.class_names or source.class_names
        if "counts" not in task.provides:
            y, y_test = (task.standardize(part.y) for part in parts)
        else:
            y, y_test = (relabel(part.y, source.class_names, reference.class_names, self.who) for part in parts)
        if x.dtype == torch.int64 and x.shape[1] < reference.shape[0]:
            wide = reference.shape[0] - x.shape[1]  # text is padded to the longest one
            x, x_test = (pad(part, (0, wide), value=-1) for part in (x, x_test))
            y, y_test = (pad(part, (0, wide), value=-1) if part.dim() > 1 else part for part in (y, y_test))
        classes = len(reference.class_names) or source.classes
        relabeled = replace(
            reference, shape=tuple(x.shape[1:]), classes=classes, class_names=names, task=source.task, dtype=x.dtype
        )
        if task.tokens:
            relabeled = replace(relabeled, classes=reference.classes, class_names=reference.class_names)
        if self.has_texts:  # its longest text may be longer than the server's
            relabeled = replace(relabeled, shape=reference.shape)
        reference.check(relabeled, self.who)
        federation = Federation(
            clients=SingleClientView(ClientData(self.client, x, y, x_test, y_test), self.total),
            test=(x[:0], y[:0]),
            task=reference.task,
            classes=reference.classes,
            normalization=reference.normalization,
            class_names=reference.class_names,
            trained_for=task,
            encoders=reference.columns,
        )
        return apply_task_options(federation, loss, reference.weights or None)

    def rows(self) -> ClientRows:
        """Return the training rows as sums use them, before global statistics are applied."""
        return rows_of_table(self.source, self.train.x, self.train.y, np.arange(len(self.train)))

    def check_kind(self, reference: DataSchema) -> None:
        """Validate that task, classes, targets and columns match the server's.

        Args:
            reference: Data schema of the server.

        Raises:
            ConfigError: If targets or columns differ from the server's.
            DataError: If there are no training samples, or a class is unknown to the server.
        """
        source = self.source
        if not len(self.train):
            raise DataError(f"{self.who} has no training samples.")
        if "counts" in reference.objective.provides and source.task == reference.task:
            relabel(self.train.y[:0], source.class_names, reference.class_names, self.who)
        own = TASKS[source.task]
        if (own.standardized or own.pixels) and source.class_names != reference.class_names:
            what = "targets" if own.standardized else "classes"
            raise ConfigError(
                f"{self.who} has the {what} {', '.join(source.class_names)}, but the server has "
                f"{', '.join(reference.class_names)}."
            )
        own_columns, other_columns = (
            [(encoder.name, encoder.kind) for encoder in some] for some in (source.encoders, reference.columns)
        )
        if own_columns != other_columns:
            listings = (
                ", ".join(f"{name} ({kind})" for name, kind in some[:20]) or "none"
                for some in (own_columns, other_columns)
            )
            raise ConfigError("{} has the columns {}, but the server's are {}.".format(self.who, *listings))


def own_split(config: Experiment, client: int, who: str) -> tuple[SiteData, PartitionedSource]:
    """Load a client's part of the experiment's own data.

    Args:
        config: The experiment.
        client: Number of the client.
        who: Name of the site, for errors.

    Returns:
        The client's data, and the data of all clients.

    Raises:
        DataError: If the client number is too large.
    """
    partitioned = load_partitioned(config.data_spec, config.seed)
    total = partitioned.parts.clients
    if client >= total:
        raise DataError(f"The experiment has {total} clients, so client {client} does not exist.")
    return SiteData(client, total, who, *partitioned.client(client), partitioned.source), partitioned


def schema_from_own_data(samples: SiteData, config: Experiment) -> DataSchema:
    """Return the data schema of a site's data alone, for checks before the server has sent global statistics.

    Args:
        samples: Data of the site.
        config: The experiment.
    """
    source, first = replace(samples.source, trained_for=samples.source.objective.of_one_site), samples.train
    rows = np.arange(len(first))
    parts = Partition(rows, np.array([0, len(rows)]), "alone")
    spec = config.data_spec.model_copy(update={"partition": "iid", "text": TextSpec()})  # texts are packed already
    split_at, ids = parts.offsets[1:], torch.from_numpy(rows)
    partitioned = PartitionedSource(spec, spec, 0, source, first, samples.held, None, parts, ids, split_at)
    return reference_schema(partitioned, config)


def load_site_data(
    config: SiteConfig, experiment: Experiment, folder: Path, columns: Sequence[Encoder] | None = None
) -> SiteData:
    """Load the samples that a site's configuration names; the test split of their source is held out.

    Args:
        config: Configuration of the site.
        experiment: Experiment that the samples are for.
        folder: Folder of the site's configuration.
        columns: Columns of the server, for a table of mixed columns; None if the server has not sent them yet.

    Raises:
        ConfigError: If the experiment does not state the number of clients.
        DataError: If the data cannot be read.
    """
    data = config.data
    assert isinstance(data, OwnData), "a rehearsal reads the experiment's data"
    if experiment.clients is None:
        raise ConfigError("If the sites have their own data, the experiment must set clients, the number of sites.")
    prefix, colon, path = data.source.partition(":")
    name = f"{prefix}:{resolve_path(folder, path)}" if colon else data.source
    data_path = None if data.data_path is None else str(resolve_path(folder, data.data_path))
    choice = column_selection(data, experiment, columns)
    if choice.mixed:
        source = load_source(
            name, path=data_path, label=data.label, image=data.image, size=data.image_size, choice=choice
        )
        source = replace(source, trained_for=choice.objective)
    else:
        spec = DataSpec(
            data=name,
            data_path=data_path,
            label=data.label,
            label_separator=data.label_separator,
            image=data.image,
            image_size=data.image_size,
            features=data.features,
            exclude=data.exclude,
            partition="iid",
            text=experiment.data_spec.text,
            task=experiment.task if choice.masks else "auto",
            segmentation=experiment.segmentation,
            split_by=experiment.split_by,
        )
        source = load_source_for(spec)
    who = f"The site {config.name}"
    train, test = packed_if_requested(source.train, experiment.text), padded_if_packed(source.test, experiment.text)
    return SiteData(config.client, experiment.clients, who, train, test, source, is_text(name))


def column_selection(data: OwnData, experiment: Experiment, columns: Sequence[Encoder] | None) -> ColumnSelection:
    """Return the column selection: from the server if it has sent columns, otherwise from site and experiment.

    Args:
        data: Configuration of the site's data.
        experiment: The experiment.
        columns: Encoders that the server sent, or None.
    """
    choice = ColumnSelection(
        data.features or experiment.features,
        (*data.exclude, *experiment.exclude),
        partition_column(experiment.partition),
        experiment.categories,
        experiment.dates,
        experiment.missing,
        experiment.task,
        agreed=True,
        split=parse_split(experiment.split_by) if experiment.split_by is not None else (),
        sorts=experiment.partition.startswith("sorted"),
        options=task_options(experiment.data_spec),
    )
    if not columns:
        return choice
    named = {kind: tuple(column.name for column in columns if column.kind == kind) for kind in ("category", "date")}
    features = tuple(column.name for column in columns)
    return choice._replace(features=features, categories=named["category"], dates=named["date"])


def relabel(y: Tensor, site_classes: Sequence[str], server_classes: Sequence[str], who: str) -> Tensor:
    """Convert labels from the site's class indices to the server's.

    Args:
        y: Labels of the site, ``[n]``.
        site_classes: Class names of the site.
        server_classes: Class names of the server.
        who: Name of the site, for errors.

    Raises:
        DataError: If the server does not know a class.

    >>> relabel(torch.tensor([0, 1, 1]), ("no", "yes"), ("maybe", "no", "yes"), "a").tolist()
    [1, 2, 2]
    """
    if not server_classes or not site_classes:
        return y
    unknown = [name for name in site_classes if name not in server_classes]
    if unknown:
        raise DataError(
            f"{who} has samples of class {unknown[0]!r}, which the server does not know: "
            f"{', '.join(server_classes[:20])}."
        )
    index_of = torch.tensor([list(server_classes).index(name) for name in site_classes])
    if y.dim() > 1:
        wide = torch.zeros(len(y), len(server_classes), dtype=y.dtype)
        wide[:, index_of] = y
        return wide
    return index_of[y]
