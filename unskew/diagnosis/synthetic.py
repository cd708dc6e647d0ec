"""Synthetic images that ``diagnose`` sets beside the real ones: from a run, from files or from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from unskew.data.federation import Federation, cat_inputs, take
from unskew.data.readers.files import joined
from unskew.data.readers.images import decode_column
from unskew.data.validation import as_targets, check_targets, given_inputs, laid_out, without_padding
from unskew.errors import CheckpointError, DataError, shown
from unskew.filesystem import read_json
from unskew.measurements.heterogeneity import Pair, Scope, SyntheticOf, drawn
from unskew.seeding import generator

Synthetic = Federation | Sequence[tuple[object, object]] | tuple[object, object]

POOL = "a sample of the clients' own data, the same for all"


def synthetic_of(
    synthetic: Synthetic | str | Path | None, federation: Federation, scope: Scope, ids: Sequence[int]
) -> tuple[SyntheticOf, str]:
    """Each client's synthetic set, and what to call them all.

    Raises:
        DataError: They do not fit the federation.
    """
    if synthetic is None:
        share = max(1, (scope.samples or 1000) // len(ids))
        few = replace(scope, samples=share)
        pairs = [drawn(federation.clients[k], few) for k in ids]
        pool = cat_inputs([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        return lambda k: pool, POOL
    if isinstance(synthetic, str | Path):
        x, y = kept_images(Path(synthetic))
        some = torch.randperm(len(y), generator=generator(scope.seed, "diagnosed images"))[: scope.samples]
        pair = checked((take(x, some), y[some]), federation, f"the set in {synthetic}")
        return lambda k: pair, f"{len(some)} of the {len(y)} images in {synthetic}, the same for all"
    if isinstance(synthetic, Federation):
        synthetic = [(client.x, client.y) for client in synthetic.clients]
    if isinstance(synthetic, tuple) and len(synthetic) == 2 and not isinstance(synthetic[0], tuple | list):
        shared = checked(synthetic, federation, "the synthetic data")
        return lambda k: shared, "given, the same for all"
    if not isinstance(synthetic, Sequence):
        raise DataError(f"Synthetic data are given as (x, y), a list of these, or a place, not as {shown(synthetic)}.")
    if len(synthetic) != len(federation.clients):
        raise DataError(
            f"There are {len(synthetic)} synthetic sets for {len(federation.clients)} clients; give one for each, or one "
            "(x, y)."
        )
    sets = {k: checked(synthetic[k], federation, f"synthetic set {k}") for k in ids}
    return sets.__getitem__, "given, one set for each client"


def image_files(path: Path) -> list[Path]:
    """The parquet files of a folder or of the run that it is; empty if there are none.

    Raises:
        CheckpointError: The run's summary is damaged.
    """
    try:
        path.exists()
    except OSError:  # the name is too long for any file
        return []
    places = [path, path / "data", path / "synthetic", path / "synthetic" / "data"]
    if (path / "summary.json").is_file():
        try:
            used = read_json(path / "summary.json").get("synthetic")
            places += [Path(used), Path(used) / "data"] if used else []
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path / 'summary.json'} is damaged; remove it and resume the run.") from error
    files = [[place] if place.is_file() else sorted(place.glob("*.parquet")) for place in places]
    return next(filter(None, files), [])


def kept_images(path: Path) -> Pair:
    """Images and labels of a parquet file, a folder of them, or a run that made some.

    Raises:
        DataError: There are none, or they cannot be read.
    """
    files = image_files(path)
    if not files:
        raise DataError(f"{path} holds no synthetic images: no parquet file, and no folder 'synthetic' with one.")
    table = joined(files)
    for column in ("image", "label"):
        if column not in table.column_names:
            raise DataError(f"{files[0]} has no column {column!r}; its columns are: {', '.join(table.column_names)}.")
    y = torch.from_numpy(table.column("label").to_numpy().copy())
    return decode_column(table.column("image"), str(files[0])), y


def checked(pair: object, federation: Federation, who: str) -> Pair:
    """A synthetic set as tensors that look like the federation's data.

    Raises:
        DataError: It is no pair, or does not fit.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
    x, y = (
        laid_out(without_padding(given_inputs(pair[0], who), "classification")),
        as_targets(pair[1], who, federation.task),
    )
    check_targets(y, federation.classes, who)
    stored = federation.test[0].dtype
    same_type = x.dtype == stored or (x.is_floating_point() and stored.is_floating_point)  # of any precision
    if tuple(x.shape[1:]) != federation.shape or len(x) != len(y) or not same_type:
        raise DataError(
            f"{who} has {len(x)} inputs of shape {tuple(x.shape[1:])} and type {x.dtype} with {len(y)} labels; the clients' "
            f"are of shape {federation.shape} and type {stored}."
        )
    return x, y
