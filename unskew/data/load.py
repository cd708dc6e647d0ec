"""From a name to a federation: load a source, partition it, and lay the clients out as slices of one array."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unskew.data.federation import Federation
from unskew.data.from_arrays import check_integer, num_training_samples
from unskew.data.partition.parsing import partition_column
from unskew.data.partition.partitioner import make_partition
from unskew.data.partitioned import PartitionedSource
from unskew.data.readers.column_roles import ColumnSelection, abbreviate
from unskew.data.readers.tables import Source
from unskew.data.readers.text import is_text, load_texts
from unskew.data.remote import with_local_files
from unskew.data.server_data import purpose_generator, repeat_channels, server_data
from unskew.data.sources.registry import load_source
from unskew.data.spec import (
    DETECTED,
    CsvSpec,
    DataSpec,
    Split,
    TextSpec,
    as_text_source,
    csv_spec,
    parse_names,
    parse_split,
)
from unskew.data.splits import held_out_mask
from unskew.errors import ConfigError, short_repr, unknown_name
from unskew.tasks.registry import TASKS

LOG = logging.getLogger("unskew")
MISSING = ("error", "mean", "indicator")
"""Treatments of missing numbers in a table."""


def load_federation(
    name: str,
    *,
    partition: str | object = "dirichlet:0.1",
    clients: int | Literal["auto"] | None = "auto",
    seed: int = 0,
    data_path: str | Path | None = None,
    label: str | None = None,
    image: str | None = None,
    label_separator: str | None = None,
    image_size: int | None = None,
    max_classes: int | None = None,
    max_train_samples: int | None = None,
    holdout: float = 0.1,
    server_data: int | str | None = None,
    server_data_path: str | Path | None = None,
    text: Sequence[str] = (),
    tokenizer: str | None = None,
    block: int = 128,
    reserve_test_samples: int = 0,
    features: Sequence[str] = (),
    exclude: Sequence[str] = (),
    task: str = "auto",
    categories: Sequence[str] = (),
    dates: Sequence[str] = (),
    missing: str = "error",
    csv: Mapping[str, str] | CsvSpec = DETECTED,
    split_by: str | None = None,
) -> Federation:
    """Load a data set and divide it among clients.

    Args:
        name: The data set, as for ``unskew.data.sources.registry.load_source``.
        partition: Who holds what, as for ``unskew.data.partition.partitioner.make_partition``.
        clients: Number of clients; None for ``natural:COLUMN`` with all of its values. ``auto`` is None for ``natural``
            partitions and 10 for the others.
        seed: Decides the partition, which samples each client holds out, and which ones the server gets.
        data_path: Local files of the data set.
        label: The label column; where it holds lists, the task is multi-label.
        image: The column of encoded images.
        label_separator: What stands between the labels of a row, in a table's label column of text.
        image_size: Side to which images are brought, those of the server too.
        max_classes: Keep the samples of the first so many classes only.
        max_train_samples: Train on so many samples only, drawn uniformly by the seed; the test part stays whole.
        holdout: Share of each client's samples kept for its own evaluation.
        server_data: A number of test samples that move to the server and are no longer used for evaluation; or a data
            set: the server gets its training images, brought to the clients' size; they are out of domain. Gray
            images, the server's or the clients', are repeated to three channels where the others have colors.
        server_data_path: Local files of the server's data set.
        text: Text columns of a data set of texts, one or a pair. Without a label the task is then ``language``.
        tokenizer: Of texts: a name at the hub, a folder, or ``bytes``.
        block: At most so many tokens a text.
        reserve_test_samples: At least this many test samples are not used for evaluation: those that ``server_data`` with
            the same number would take.

        features: Columns of a table that are inputs, in this order; without them, all that hold numbers and neither are the
            label nor decide the partition.
        exclude: Columns of a table that are not inputs.
        task: ``regression`` predicts the numbers of the label column, or of several: ``"systolic,diastolic"``.
        categories: Categorical columns of a table; ``auto`` stands for every column of text.
        dates: Date columns of a table; the days since 1970 are the input.
        missing: ``mean`` replaces missing numbers of a table by the column's mean; ``indicator`` also adds an input that says
            where they were.
        csv: Format of CSV files, where it is not detected: ``separator``, ``decimal`` and ``encoding``.
        split_by: Column whose values are never divided between training and held-out rows, such as ``patient_id``;
            ``time:COLUMN`` holds out the newest rows, ``patient_id,time:COLUMN`` the patients with the newest rows; and
            ``column:COLUMN`` the rows with the value ``test``.

    Raises:
        ConfigError: Arguments do not fit together.
        DataError: The data cannot be used as asked.

    >>> federation = load_federation("digits", partition="iid", clients=3, server_data=100)
    >>> federation.sizes.tolist(), len(federation.test[1])
    ([431, 431, 431], 260)
    """
    if not isinstance(name, str):
        raise ConfigError(f"A data set is named by text such as 'digits' or 'table:PATH', not by {short_repr(name)}.")
    if clients == "auto":
        clients = None if str(partition).startswith("natural") else DataSpec.clients
    counts = {
        "seed": seed,
        "clients": clients,
        "block": block,
        "reserve_test_samples": reserve_test_samples,
        "image_size": image_size,
    }
    for field, value in (counts | {"max_classes": max_classes, "max_train_samples": max_train_samples}).items():
        if value is not None or field in ("seed", "block", "reserve_test_samples"):
            check_integer(value, field)
    if server_data is not None and not isinstance(server_data, str):
        check_integer(server_data, "server_data")
    said: dict[str, Any] = {"label": label, "image": image, "label_separator": label_separator, "tokenizer": tokenizer}
    said["split_by"] = split_by
    paths = {"data_path": data_path, "server_data_path": server_data_path}
    for field, text_or_path in (said | paths).items():
        if not isinstance(text_or_path, str | None) and not (field in paths and isinstance(text_or_path, Path)):
            raise ConfigError(f"{field} must be text, not {short_repr(text_or_path)}.")
    if label_separator == "":
        raise ConfigError("label_separator must be a text of one character at least, such as '|'.")
    spec = DataSpec(
        data=as_text_source(name, parse_names(text)),
        data_path=data_path,
        label=label,
        label_separator=label_separator,
        image=image,
        image_size=image_size,
        max_classes=max_classes,
        max_train_samples=max_train_samples,
        partition=partition,
        clients=clients,
        holdout=holdout,
        server_data=server_data,
        server_data_path=server_data_path,
        text=TextSpec(parse_names(text), tokenizer, block),
        reserve_test_samples=reserve_test_samples,
        features=parse_names(features),
        exclude=parse_names(exclude),
        task=task,
        categories=parse_names(categories),
        dates=parse_names(dates),
        missing=missing,
        csv=csv_spec(csv),
        split_by=split_by,
    )
    return federation_of(spec, seed)


def federation_of(spec: DataSpec, seed: int) -> Federation:
    """The federation that ``spec`` describes; ``seed`` decides every draw.

    Args:
        spec: Description of the data.
        seed: Seed of the run.

    Raises:
        ConfigError: Fields do not fit together.
        DataError: The data cannot be used as the fields describe them.
    """
    partitioned = load_partitioned(spec, seed)
    return partitioned.federation(partitioned.known())


def load_partitioned(spec: DataSpec, seed: int) -> PartitionedSource:
    """Load and partition the data before any global statistics are known; see ``federation_of``.

    Args:
        spec: Description of the data.
        seed: Seed of the run.
    """
    named, spec = spec, with_local_files(spec)
    source = load_source_for(spec)
    at_server, test = server_data(spec, source, source.test, seed)
    if at_server is not None and not at_server.in_domain:
        source, test = repeat_channels(source, test, at_server.x.shape[1])
    train = source.train
    if spec.max_train_samples is not None:
        if not 1 <= spec.max_train_samples <= len(train):
            raise ConfigError(
                f"max_train_samples={spec.max_train_samples} must be from 1 to the {len(train)} training samples of "
                f"{spec.data}."
            )
        train = train.rows(
            np.sort(purpose_generator(seed, "keep_samples").permutation(len(train))[: spec.max_train_samples])
        )
    labels = train.y.numpy() if TASKS[source.task].labeled else None
    parts = make_partition(
        spec.partition, labels, spec.clients, seed, classes=source.classes, columns=train.columns, samples=len(train)
    )
    # Client by client, shuffled inside each client, so that the part held out is a random one.
    owner = np.repeat(np.arange(parts.clients), parts.sizes)
    rng = purpose_generator(seed, "holdout")
    keys = rng.random(len(owner))
    held_out = np.zeros(len(owner), bool)
    splits = parts.offsets[:-1] + np.array([num_training_samples(int(n), spec.holdout) for n in parts.sizes])
    split = parse_split(spec.split_by) if spec.split_by is not None else Split()
    if split.group is not None or split.time is not None:
        own = [parts.indices(k) for k in range(parts.clients)]
        held_out = held_out_mask(train.columns, split, own, spec.holdout, len(train), rng)[parts.order]
        splits = parts.offsets[1:] - np.bincount(owner, held_out, parts.clients).astype(np.int64)
    shuffled = parts.order[np.lexsort((keys, held_out, owner))]
    if labels is not None and labels.ndim == 1:
        absent = np.setdiff1d(test.y.numpy(), labels[parts.order])
        if len(absent):
            names = abbreviate([str(source.class_names[c]) for c in absent])
            LOG.warning("the test set has %d classes of which no client has a sample: %s", len(absent), names)
    return PartitionedSource(
        spec, named, seed, source, train, test, at_server, parts, torch.from_numpy(shuffled), splits
    )


def load_source_for(spec: DataSpec) -> Source:
    """The samples, before anybody holds them."""
    path, label, text = spec.data_path, spec.label, spec.text
    for field, allowed in (("task", ("auto", "regression")), ("missing", MISSING)):
        if getattr(spec, field) not in allowed:
            raise ConfigError(unknown_name(field, short_repr(getattr(spec, field), str), allowed))
    regression = spec.task == "regression"
    divides = partition_column(spec.partition)
    split = None if spec.split_by is None else parse_split(spec.split_by)
    choice = ColumnSelection(
        spec.features,
        spec.exclude,
        divides,
        spec.categories,
        spec.dates,
        spec.missing,
        regression,
        split=split or (),
    )
    if is_text(spec.data):
        if choice.mixed:
            raise ConfigError(
                f"task=regression, categories, dates and missing are for tables; {spec.data} holds texts."
            )
        if spec.features or spec.exclude:
            raise ConfigError(f"features and exclude choose among the columns of a table; {spec.data} holds texts.")
        for_images = (spec.image, spec.label_separator, spec.image_size, spec.max_classes)
        if any(option is not None for option in for_images):
            raise ConfigError(
                f"{spec.data} holds texts; it takes no image, image_size, label_separator or max_classes."
            )
        return load_texts(
            spec.data,
            path=path,
            label=label,
            columns=text.columns,
            tokenizer=text.tokenizer,
            block=text.block,
            csv=spec.csv,
            split=split,
        )
    if text.columns:
        raise ConfigError(f"text.columns={','.join(text.columns)} names columns of texts, but {spec.data} holds none.")
    if text != TextSpec():
        raise ConfigError(f"text.tokenizer and text.block say how texts are read, but {spec.data} holds none.")
    source = load_source(
        spec.data,
        path=path,
        label=label,
        image=spec.image,
        label_separator=spec.label_separator,
        size=spec.image_size,
        classes=spec.max_classes,
        choice=choice,
        csv=spec.csv,
    )
    if spec.image_size is not None and source.train.x.dim() != 4:
        raise ConfigError(f"image_size={spec.image_size} belongs to images, but the inputs of {source.name} are none.")
    return source
