"""Synthetic images for ``diagnose``: from a run, from files or from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from unskew.data.federation import Federation, concatenate_inputs, take_rows
from unskew.data.frames import check_same_index
from unskew.data.readers.arrow_io import read_tables
from unskew.data.readers.files import concatenate_parts
from unskew.data.readers.images import decode_column
from unskew.data.validation import as_targets, normalize_inputs_layout, to_model_layout
from unskew.errors import DataError, short_repr
from unskew.generators import synthetic_dataset
from unskew.measurements.heterogeneity import MeasurementScope, Pair, SyntheticOf, selected_samples
from unskew.seeding import generator

Synthetic = Federation | Sequence[tuple[object, object]] | tuple[object, object]

POOL = "a sample of the clients' own data, the same for all"


def synthetic_sets(
    synthetic: Synthetic | str | Path | None, federation: Federation, scope: MeasurementScope, ids: Sequence[int]
) -> tuple[SyntheticOf, str]:
    """Return each client's synthetic set, and a description of all sets.

    Args:
        synthetic: Synthetic data, or their location.
        federation: Data of all clients.
        scope: Limits of the measurement.
        ids: Clients to measure.

    Raises:
        DataError: If the images do not fit the federation.
    """
    if synthetic is None:
        share = max(1, (scope.samples or 1000) // len(ids))
        few = replace(scope, samples=share)
        pairs = [selected_samples(federation.clients[k], few) for k in ids]
        pool = concatenate_inputs([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        return lambda k: pool, POOL
    if isinstance(synthetic, str | Path):
        x, y = read_images(Path(synthetic))
        some = torch.randperm(len(y), generator=generator(scope.seed, "diagnosed images"))[: scope.samples]
        pair = validate_images((take_rows(x, some), y[some]), federation, f"the set in {synthetic}")
        return lambda k: pair, f"{len(some)} of the {len(y)} images in {synthetic}, the same for all"
    if isinstance(synthetic, Federation):
        synthetic = [(client.x, client.y) for client in synthetic.clients]
    if isinstance(synthetic, tuple) and len(synthetic) == 2 and not isinstance(synthetic[0], tuple | list):
        shared = validate_images(synthetic, federation, "the synthetic data")
        return lambda k: shared, "given in Python, the same for all"
    if not isinstance(synthetic, Sequence):
        raise DataError(f"Synthetic data must be (x, y), a list of such pairs, or a path, not {short_repr(synthetic)}.")
    if len(synthetic) != len(federation.clients):
        raise DataError(
            f"There are {len(synthetic)} synthetic sets for {len(federation.clients)} clients. Pass one for each, or one "
            "(x, y)."
        )
    sets = {k: validate_images(synthetic[k], federation, f"synthetic set {k}") for k in ids}
    return sets.__getitem__, "given in Python, one set for each client"


def image_files(path: Path) -> list[Path]:
    """Return the parquet files at a path: a file, a folder or a run folder; empty if there are none.

    Args:
        path: File or folder.

    Raises:
        CheckpointError: If the run's summary is corrupted.
    """
    try:
        path.exists()
    except OSError:  # the name is too long for a file
        return []
    folders = [path, path / "data", path / "synthetic", path / "synthetic" / "data"]
    shared = synthetic_dataset.shared_set(path, synthetic_dataset.stored_name(path))
    folders += [] if shared is None else [shared / "data"]
    files = [[folder] if folder.is_file() else sorted(folder.glob("*.parquet")) for folder in folders]
    return next(filter(None, files), [])


def read_images(path: Path) -> Pair:
    """Read images and labels from a parquet file, a folder of such files, or a run that generated some.

    Args:
        path: File or folder.

    Raises:
        DataError: If there are no images, or they cannot be read.
    """
    files = image_files(path)
    if not files:
        raise DataError(f"{path} contains no synthetic images: no parquet file, and no folder 'synthetic' with one.")
    table, _ = concatenate_parts(read_tables(files), files, len(files))
    for column in ("image", "label"):
        if column not in table.column_names:
            raise DataError(f"{files[0]} has no column {column!r}. Its columns are: {', '.join(table.column_names)}.")
    y = torch.from_numpy(table.column("label").to_numpy().copy())
    return decode_column(table.column("image"), str(files[0])), y


def validate_images(pair: object, federation: Federation, who: str) -> Pair:
    """Validate a synthetic set and convert it to tensors like the federation's data.

    Args:
        pair: Images and labels.
        federation: Data of all clients.
        who: Name of the set, for error messages.

    Raises:
        DataError: If the value is not a pair of images and labels, or does not fit the federation.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
    check_same_index(pair[0], pair[1], who)
    x, y = (
        to_model_layout(normalize_inputs_layout(pair[0], who)),
        as_targets(pair[1], who, federation.task),
    )
    federation.objective.check(y, federation.classes, who)
    stored = federation.test[0].dtype
    same_type = x.dtype == stored or (x.is_floating_point() and stored.is_floating_point)  # of any precision
    if tuple(x.shape[1:]) != federation.shape or len(x) != len(y) or not same_type:
        raise DataError(
            f"{who} has {len(x)} inputs of shape {tuple(x.shape[1:])} and type {x.dtype} with {len(y)} labels; the clients' "
            f"are of shape {federation.shape} and type {stored}."
        )
    return x, y
