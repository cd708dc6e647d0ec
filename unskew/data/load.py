"""Loading of federations by name: load a data source, partition it, and store the clients as slices of one array."""

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
from unskew.data.readers.column_roles import ColumnSelection
from unskew.data.readers.tables import Source
from unskew.data.readers.text import is_text, load_texts
from unskew.data.remote import with_local_files
from unskew.data.server_data import purpose_generator, repeat_channels, server_data
from unskew.data.shift import with_shift
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
    parse_shift,
    parse_split,
    parse_unseen,
)
from unskew.data.splits import held_out_mask
from unskew.data.unseen import split_partitioned
from unskew.data.validation import check_classes
from unskew.errors import ConfigError, abbreviate, short_repr, unknown_name
from unskew.expressions import unquote
from unskew.tasks.registry import TASKS

LOG = logging.getLogger("unskew")
MISSING = ("error", "mean", "indicator")
"""Options for missing numbers in a table."""


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
    unseen: float | str | Sequence[str] = 0.0,
    shift: str | None = None,
) -> Federation:
    """Load a data set and partition it among clients.

    Args:
        name: Name of the data set, as for ``unskew.data.sources.registry.load_source``.
        partition: Data partition, as for ``unskew.data.partition.partitioner.make_partition``.
        clients: Number of clients. None, only for ``natural:COLUMN``, means one client per value. ``auto`` means None
            for ``natural`` partitions and 10 for others.
        seed: Random seed of the partition, of each client's held-out samples, and of the server's samples.
        data_path: Local files of the data set.
        label: Label column; if it contains lists, the task is multi-label.
        image: Column of encoded images.
        label_separator: Separator between the labels of a row, in a string label column of a table.
        image_size: Side length to which images are resized, including those of the server.
        max_classes: Keep only the samples of this many first classes.
        max_train_samples: Number of training samples to keep, drawn uniformly; the test set is not affected.
        holdout: Share of each client's samples that is held out for evaluation.
        server_data: Number of test samples that move to the server and are not used for evaluation. Or the name of a
            data set: the server gets its training images, resized to the clients' size, as out-of-domain data. If only
            the server or only the clients have color images, the other's gray images are repeated to three channels.
        server_data_path: Local files of the server's data set.
        text: Text columns, one or a pair. Without a label, the task is then ``language``.
        tokenizer: Tokenizer of the texts: a name on the Hugging Face Hub, a folder, or ``bytes``.
        block: Maximum number of tokens per text.
        reserve_test_samples: Exclude at least this many test samples from evaluation: the ones that ``server_data``
            with the same number would move to the server.
        features: Input columns of a table, in this order. By default, all numeric columns except the label and the
            column that decides the partition.
        exclude: Columns of a table that are not inputs.
        task: ``auto``, or ``regression`` to predict the numbers of one or more label columns: ``"systolic,diastolic"``.
        categories: Categorical columns of a table; ``auto`` means every string column.
        dates: Date columns of a table; the input is the number of days since 1970.
        missing: ``error`` rejects missing numbers in a table, ``mean`` replaces them by the column's mean, and
            ``indicator`` also adds an input that marks them.
        csv: Format of CSV files, if detection fails: ``separator``, ``decimal`` and ``encoding``.
        split_by: Column whose values are never split between training and held-out rows, such as ``patient_id``.
            ``time:COLUMN`` holds out the newest rows, ``patient_id,time:COLUMN`` the patients with the newest rows, and
            ``column:COLUMN`` the rows with the value ``test``.
        unseen: Clients that take no part in training and are evaluated after it: their share, drawn by the seed, or
            their names.
        shift: Feature shift of the clients' inputs: ``rotate:ANGLE``, ``rotate:ANGLE,groups=G`` or ``noise:SIGMA``.

    Raises:
        ConfigError: If arguments contradict each other.
        DataError: If the data do not match the arguments or are not valid.

    >>> federation = load_federation("digits", partition="iid", clients=3, server_data=100)
    >>> federation.sizes.tolist(), len(federation.test[1])
    ([431, 431, 431], 260)
    """
    if not isinstance(name, str):
        raise ConfigError(f"The data set must be a string such as 'digits' or 'table:PATH', not {short_repr(name)}.")
    if isinstance(clients, str) and clients == "auto":
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
    text_options: dict[str, Any] = {
        "label": label,
        "image": image,
        "label_separator": label_separator,
        "tokenizer": tokenizer,
    }
    text_options |= {"split_by": split_by, "shift": shift, "task": task, "missing": missing}
    paths = {"data_path": data_path, "server_data_path": server_data_path}
    for field, text_or_path in (text_options | paths).items():
        if not isinstance(text_or_path, str | None) and not (field in paths and isinstance(text_or_path, Path)):
            raise ConfigError(f"{field} must be a string, not {short_repr(text_or_path)}.")
    if label_separator == "":
        raise ConfigError("label_separator must not be empty. Use for example '|'.")
    spec = DataSpec(
        data=as_text_source(name, parse_names(text)),
        data_path=data_path,
        label=label and unquote(label),
        label_separator=label_separator,
        image=image and unquote(image),
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
        unseen=parse_unseen(unseen),
        shift=shift,
    )
    return federation_of(spec, seed)


def federation_of(spec: DataSpec, seed: int) -> Federation:
    """Load the federation that ``spec`` describes.

    Args:
        spec: Data specification.
        seed: Random seed of the run.

    Raises:
        ConfigError: If fields contradict each other.
        DataError: If the data do not match the fields or are not valid.
    """
    partitioned = load_partitioned(spec, seed)
    if spec.unseen:
        return split_partitioned(partitioned, spec.unseen)
    return partitioned.federation(partitioned.known())


def load_partitioned(spec: DataSpec, seed: int) -> PartitionedSource:
    """Load and partition the data, without computing global statistics.

    Args:
        spec: Data specification.
        seed: Random seed of the run.
    """
    named, spec = spec, with_local_files(spec)
    source = load_source_for(spec)
    check_classes(source.class_names or ("",) * source.classes, source.name, source.task)
    at_server, test = server_data(spec, source, source.test, seed)
    if at_server is not None and not at_server.in_domain:
        source, test = repeat_channels(source, test, at_server.x.shape[1])
    train = source.train
    if spec.max_train_samples is not None:
        if not 1 <= spec.max_train_samples <= len(train):
            raise ConfigError(
                f"max_train_samples={spec.max_train_samples} must be from 1 to {len(train)}, the number of training "
                f"samples of {spec.data}."
            )
        train = train.rows(
            np.sort(purpose_generator(seed, "keep_samples").permutation(len(train))[: spec.max_train_samples])
        )
    labels = train.y.numpy() if TASKS[source.task].labeled else None
    parts = make_partition(
        spec.partition, labels, spec.clients, seed, classes=source.classes, columns=train.columns, samples=len(train)
    )
    # Order rows by client and shuffle within each client, so that a random part is held out.
    owner = np.repeat(np.arange(parts.clients), parts.sizes)
    rng = purpose_generator(seed, "holdout")
    keys = rng.random(len(owner))
    held_out = np.zeros(len(owner), bool)
    distinct, kind = np.unique(parts.sizes, return_inverse=True)
    num_training = np.array([num_training_samples(int(n), spec.holdout) for n in distinct])
    splits = parts.offsets[:-1] + num_training[kind]
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
            LOG.warning("the test set has %d classes that no client has: %s", len(absent), names)
    partitioned = PartitionedSource(
        spec, named, seed, source, train, test, at_server, parts, torch.from_numpy(shuffled), splits
    )
    return partitioned if spec.shift is None else with_shift(partitioned, parse_shift(spec.shift))


def load_source_for(spec: DataSpec) -> Source:
    """Load the data source, before it is partitioned."""
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
        sorts=isinstance(spec.partition, str) and spec.partition.startswith("sorted"),
    )
    if is_text(spec.data):
        if choice.mixed:
            raise ConfigError(
                f"task=regression, categories, dates and missing require a table, but {spec.data} contains texts."
            )
        if spec.features or spec.exclude:
            raise ConfigError(f"features and exclude require a table, but {spec.data} contains texts.")
        for_images = (spec.image, spec.label_separator, spec.image_size, spec.max_classes)
        if any(option is not None for option in for_images):
            raise ConfigError(
                f"{spec.data} contains texts, which do not support image, image_size, label_separator or max_classes."
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
        raise ConfigError(f"text.columns={','.join(text.columns)} requires texts, but {spec.data} contains none.")
    if text != TextSpec():
        raise ConfigError(f"text.tokenizer and text.block require texts, but {spec.data} contains none.")
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
        raise ConfigError(
            f"image_size={spec.image_size} requires images, but the inputs of {source.name} are not images."
        )
    return source
