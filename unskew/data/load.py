"""Loading of federations by name: load a data source, partition it, and store the clients as slices of one array."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.config_fields import validate_fields
from unskew.data.federation import Federation
from unskew.data.from_arrays import check_integer, num_training_samples
from unskew.data.harmonized_source import check_harmonize, harmonizable, harmonized
from unskew.data.loading_warnings import collect_warnings
from unskew.data.partition.parsing import partition_column
from unskew.data.partition.partitioner import Partition, make_partition
from unskew.data.partitioned import PartitionedSource
from unskew.data.readers.column_roles import ColumnSelection
from unskew.data.readers.tables import SampleTable, Source
from unskew.data.readers.text import is_text, load_texts
from unskew.data.remote import with_local_files
from unskew.data.server_data import purpose_generator, repeat_channels, server_data
from unskew.data.shift import with_shift
from unskew.data.sources.registry import load_source
from unskew.data.spec import DataSpec, SegmentationSpec, Split, TextSpec, is_table, parse_shift, parse_split
from unskew.data.splits import held_out_mask
from unskew.data.unseen import split_partitioned
from unskew.data.validation import check_classes
from unskew.errors import ConfigError, abbreviate
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS
from unskew.tasks.segmentation import Segmentation

LOG = logging.getLogger("unskew")


def load_federation(data: str, *, seed: int = 0, **options: Any) -> Federation:
    """Load a data set and partition it among clients.

    Args:
        data: Data source, as in ``unskew.Experiment``.
        seed: Random seed of the partition, of each client's held-out samples, and of the server's samples.
        **options: Data fields of ``unskew.Experiment``, such as ``partition="dirichlet:0.1", clients=10, label="stars"``;
            ``partition`` may also be an object, as for ``unskew.data.partition.partitioner.make_partition``.

    Raises:
        ConfigError: If an option is not valid, or options contradict each other.
        DataError: If the data do not match the options or are not valid.

    >>> federation = load_federation("digits", partition="iid", clients=3, server_data=100)
    >>> federation.sizes.tolist(), len(federation.test[1])
    ([431, 431, 431], 260)
    """
    check_integer(seed, "seed")
    partition = options.get("partition", "")
    passed = {} if isinstance(partition, str) else {"partition": partition}  # an object is not validated as a text
    paths = {name: str(value) for name, value in options.items() if isinstance(value, Path)}
    spec = validate_fields(DataSpec, {"data": data, **options, **paths, **dict.fromkeys(passed, "iid")})
    return federation_of(spec.model_copy(update=passed), seed)


def federation_of(spec: DataSpec, seed: int) -> Federation:
    """Load the federation that ``spec`` describes.

    Args:
        spec: Data specification.
        seed: Random seed of the run.

    Raises:
        ConfigError: If fields contradict each other.
        DataError: If the data do not match the fields or are not valid.
    """
    with collect_warnings() as texts:
        partitioned = load_partitioned(spec, seed)
        if spec.unseen:
            federation = split_partitioned(partitioned, spec.unseen)
        else:
            partitioned = harmonized(partitioned)
            federation = partitioned.federation(partitioned.known())
    return replace(federation, warnings=tuple(texts))


def load_partitioned(spec: DataSpec, seed: int) -> PartitionedSource:
    """Load and partition the data, without computing global statistics.

    Args:
        spec: Data specification.
        seed: Random seed of the run.
    """
    check_harmonize(spec)
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
    labels = train.y.numpy() if "counts" in TASKS[source.task].provides else None
    parts = partition_samples(spec, train, labels, source.classes, seed)
    # Order rows by client and shuffle within each client, so that a random part is held out.
    owner = np.repeat(np.arange(parts.clients), parts.sizes)
    rng = purpose_generator(seed, "holdout")
    keys = rng.random(len(owner))
    held_out = np.zeros(len(owner), bool)
    distinct, kind = np.unique(parts.sizes, return_inverse=True)
    num_training = np.array([num_training_samples(int(n), spec.holdout) for n in distinct])
    splits = parts.offsets[:-1] + num_training[kind]
    split = parse_split(spec.split_by) if spec.split_by is not None else Split()
    if split.group is not None or split.time is not None or train.texts is not None:
        own = [parts.indices(k) for k in range(parts.clients)]
        held_out = held_out_mask(train.columns, split, own, spec.holdout, len(train), rng, train.texts)[parts.order]
        splits = parts.offsets[1:] - np.bincount(owner, held_out, parts.clients).astype(np.int64)
        without = int((splits == parts.offsets[1:]).sum())
        if train.texts is not None and split == Split() and spec.holdout and without:
            LOG.warning(
                "%s: %d of %d clients have a single text each, which was cut into rows of text.block tokens and is not "
                "divided, so they hold out nothing. Divide such texts into several rows of the file, or set holdout to 0.",
                source.name,
                without,
                parts.clients,
            )
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


def partition_samples(
    spec: DataSpec, train: SampleTable, labels: np.ndarray | None, classes: int, seed: int
) -> Partition:
    """Partition training samples among clients; if texts were cut into several rows, all rows of a text go to one client.

    Args:
        spec: Data specification.
        train: Training samples.
        labels: Class of each sample, or None.
        classes: Number of classes.
        seed: Random seed of the run.
    """
    columns, index = train.columns, None
    # natural:COLUMN never separates the rows of a text, and its min counts rows.
    if train.texts is not None and not (isinstance(spec.partition, str) and spec.partition.startswith("natural:")):
        _, first_rows, index = np.unique(train.texts, return_index=True, return_inverse=True)
        columns = {name: values[first_rows] for name, values in columns.items()}
    samples = len(train) if index is None else len(first_rows)
    parts = make_partition(
        spec.partition, labels, spec.clients, seed, classes=classes, columns=columns, samples=samples
    )
    if index is None:
        return parts
    owner = np.full(samples, -1, np.int64)
    owner[parts.order] = np.repeat(np.arange(parts.clients), parts.sizes)
    of_rows = Partition.from_owner(owner[index.reshape(-1)], parts.clients, parts.name)
    return replace(of_rows, names=parts.names)


def task_options(spec: DataSpec) -> Any:
    """Return the section with the options of the task that a specification names, or None."""
    section = "" if spec.task == "auto" else TASKS[spec.task].section
    return getattr(spec, section) if section else None


def task_of_spec(spec: DataSpec) -> Task | None:
    """Return the task that a specification names, with its options; None if it names none."""
    return None if spec.task == "auto" else TASKS[spec.task].configured(task_options(spec))


def load_source_for(spec: DataSpec) -> Source:
    """Load the data source, before it is partitioned."""
    path, label, text = spec.data_path, spec.label, spec.text
    divides = partition_column(spec.partition)
    split = None if spec.split_by is None else parse_split(spec.split_by)
    choice = ColumnSelection(
        spec.features,
        spec.exclude,
        divides,
        spec.categories,
        spec.dates,
        spec.missing,
        spec.task,
        split=split or (),
        sorts=isinstance(spec.partition, str) and spec.partition.startswith("sorted"),
        harmonized=is_table(spec.data) and spec.harmonize.method != "none",
        options=task_options(spec),
    )
    if is_text(spec.data):
        if choice.mixed:
            raise ConfigError(f"task, categories, dates and missing require a table, but {spec.data} contains texts.")
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
            text=text,
            csv=spec.csv.spec,
            split=split,
            divides=divides,
        )
    if text.columns:
        raise ConfigError(f"text.columns={','.join(text.columns)} requires texts, but {spec.data} contains none.")
    if text != TextSpec():
        raise ConfigError(f"The section text requires texts, but {spec.data} contains none.")
    source = load_source(
        spec.data,
        path=path,
        label=label,
        image=spec.image,
        label_separator=spec.label_separator,
        size=spec.image_size,
        classes=spec.max_classes,
        choice=choice,
        csv=spec.csv.spec,
        masks=Segmentation().configured(spec.segmentation),
    )
    pixels = source.objective.pixels
    if not pixels and (choice.masks or spec.segmentation != SegmentationSpec()):
        option = "task=segmentation" if choice.masks else "The section segmentation"
        raise ConfigError(
            f"{option} requires masks: masks:PATH, a table with image and mask columns, or arrays with y [n, height, width]. "
            f"{source.name} has none."
        )
    if pixels and spec.task not in ("auto", source.task):
        raise ConfigError(f"task={spec.task} is not the task of {source.name}, which has masks. Remove it.")
    if spec.image_size is not None and source.train.x.dim() != 4:
        raise ConfigError(
            f"image_size={spec.image_size} requires images, but the inputs of {source.name} are not images."
        )
    section = source.objective.section
    for other in {task.section for task in TASKS.values()} - {"", section}:
        if getattr(spec, other) != type(getattr(spec, other))():
            raise ConfigError(
                f"{other} has options of another task: the task of {source.name} is {source.task}. Remove {other}, or set "
                f"task={other} and its labels."
            )
    if section:
        source = replace(source, trained_for=source.objective.configured(getattr(spec, section)))
    return harmonizable(source, spec)
