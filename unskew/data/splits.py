"""Splits into training and held-out rows that keep groups together, hold out the newest rows, or follow a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from unskew.data.partition.partitioner import get_column
from unskew.data.spec import Split
from unskew.errors import ConfigError, DataError


class SplitUnits(NamedTuple):
    """Rows that are held out together.

    Attributes:
        codes: Unit of each row, ``[n]``.
        ranks: Rank of each unit, ``[U]``; the units with the highest ranks are held out, those of equal rank together.
    """

    codes: np.ndarray
    ranks: np.ndarray


def make_units(
    columns: Mapping[str, np.ndarray],
    split: Split,
    rows: int,
    rng: np.random.Generator,
    texts: np.ndarray | None = None,
) -> SplitUnits:
    """Return the units of a split, ranked by time if the split has a time column, otherwise randomly.

    Args:
        columns: Columns of the data by name.
        split: Group and time columns of the split.
        rows: Number of rows.
        rng: Random number generator.
        texts: Index of each row's text, the unit of a split without a group column; None if each row is a unit.

    Raises:
        DataError: If a column does not exist or has missing values, or the time column contains strings.
    """
    codes = np.arange(rows)
    if split.group is not None:
        codes = np.unique(get_column(columns, split.group, "split_by"), return_inverse=True)[1].reshape(-1)
    elif texts is not None:
        codes = np.unique(texts, return_inverse=True)[1].reshape(-1)
    units = int(codes.max()) + 1 if rows else 0
    if split.time is None:
        return SplitUnits(codes, rng.permutation(units))
    times = get_column(columns, split.time, "split_by")
    if times.dtype.kind == "b":
        raise DataError(
            f"The column {split.time!r} of split_by contains truth values. Choose a column of dates or numbers."
        )
    if times.dtype.kind not in "iufM":
        raise DataError(
            f"The column {split.time!r} of split_by contains strings such as {str(times[0])!r}. Write dates as "
            "2024-01-31, or set csv.dates to their format, such as %d.%m.%Y."
        )
    newest = np.full(units, -1)
    np.maximum.at(newest, codes, np.unique(times, return_inverse=True)[1].reshape(-1))
    return SplitUnits(codes, newest)


def select_held_out_units(units: SplitUnits, rows: np.ndarray, share: float) -> np.ndarray:
    """Return the units with the highest ranks whose total size is nearest to a share of the rows.

    Units of equal rank, such as rows of one date, stay together: all of them are held out if the total is then nearer to
    the share. If there are two or more ranks and the share is positive, at least one is held out and at least one is not.

    Args:
        units: Groups of rows that are not split.
        rows: Rows to choose from.
        share: Share of held-out rows.

    >>> units = SplitUnits(np.array([0, 0, 0, 1, 2, 2]), np.array([2, 1, 0]))
    >>> select_held_out_units(units, np.arange(6), 0.5).tolist()
    [0]
    """
    names, sizes = np.unique(units.codes[rows], return_counts=True)
    ranks, rank_of = np.unique(-units.ranks[names], return_inverse=True)
    if len(ranks) < 2 or not share:
        return names[:0]
    sums = np.cumsum(np.bincount(rank_of, weights=sizes))[:-1]
    return np.asarray(names[rank_of <= int(np.abs(sums - share * len(rows)).argmin())])


def test_row_mask(
    columns: Mapping[str, np.ndarray],
    split: Split,
    rows: int,
    share: float,
    seed: int,
    classes: np.ndarray | None,
    texts: np.ndarray | None,
) -> np.ndarray:
    """Return the mask of test rows, boolean ``[n]``.

    If groups are drawn and a class would have no test rows, the groups of each class are drawn separately.

    Args:
        columns: Columns of the data by name.
        split: Columns of the split.
        rows: Number of rows.
        share: Share of test rows.
        seed: Random seed of the order of groups.
        classes: Class of each row, ``[n]``, or None.
        texts: Index of each row's text, if a text was cut into several rows; otherwise None.

    Raises:
        DataError: If no training or no test rows remain, or the split column has other values than train and test.
    """
    if split.given is not None:
        values = np.char.lower(np.char.strip(get_column(columns, split.given, "split_by").astype(str)))
        other = sorted(set(values.tolist()) - {"train", "test"})
        if other:
            raise DataError(
                f"The column {split.given!r} of split_by has the value {other[0]!r}. Write train or test in each row."
            )
        held_out = values == "test"
    else:
        units = make_units(columns, split, rows, np.random.default_rng(seed), texts)
        held_out = np.isin(units.codes, select_held_out_units(units, np.arange(rows), share))
        if classes is not None and split.time is None and len({*classes[held_out].tolist()}) < len({*classes.tolist()}):
            first_rows = np.unique(units.codes, return_index=True)[1]
            class_of = classes[first_rows][units.codes]  # class of the first row in the same group
            strata = [np.flatnonzero(class_of == name) for name in np.unique(class_of)]
            chosen = [select_held_out_units(units, stratum, share) for stratum in strata]
            held_out = np.isin(units.codes, np.concatenate(chosen))
    if not held_out.any() and texts is not None and split == Split():
        raise DataError(
            "All rows are parts of a single text, and a text is not divided between training and test data. Divide it into "
            "several rows of the file, or provide test data."
        )
    if not held_out.any() or held_out.all():
        raise DataError(
            f"split_by leaves no rows to {'train' if held_out.any() else 'test'} on. The column "
            f"{split.given or split.group or split.time!r} needs at least two values."
        )
    return np.asarray(held_out)


def check_no_shared_groups(train: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray], split: Split) -> None:
    """Validate that training and test files have no group in common.

    Args:
        train: Columns of the training file.
        test: Columns of the test file.
        split: Columns of the split.

    Raises:
        ConfigError: If a column marks the test rows although there is a test file.
        DataError: If a group is in both files.
    """
    if split.given is not None:
        raise ConfigError(f"split_by=column:{split.given} splits a file, but there is a test file; use one of the two.")
    if split.group is not None:
        both = np.intersect1d(get_column(train, split.group, "split_by"), get_column(test, split.group, "split_by"))
        if len(both):
            raise DataError(
                f"split_by={split.group}: {len(both)} values, such as {both[0]!s}, are in the training and in the "
                "test rows."
            )


def held_out_mask(
    columns: Mapping[str, np.ndarray],
    split: Split,
    clients: list[np.ndarray],
    share: float,
    rows: int,
    rng: np.random.Generator,
    texts: np.ndarray | None = None,
) -> np.ndarray:
    """Return the mask of held-out rows, boolean ``[n]``.

    If a client holds out a group, all clients with rows of this group hold them out.

    Args:
        columns: Columns of the data by name.
        split: Group and time columns of the split.
        clients: Rows of each client.
        share: Share of held-out rows.
        rows: Number of rows.
        rng: Random number generator.
        texts: Index of each row's text, if a text was cut into several rows; otherwise None.

    Raises:
        DataError: If a client would have no rows to train on.
    """
    units = make_units(columns, split, rows, rng, texts)
    held_per_client = [select_held_out_units(units, own, share) for own in clients]
    held_out = np.isin(units.codes, np.concatenate(held_per_client))
    for k, own in enumerate(clients):
        if held_out[own].all():
            raise DataError(
                f"Client {k} would hold out all of its rows, because other clients hold out the same values of "
                f"{split.group}. Use holdout=0, or a partition that keeps these values together."
            )
    return np.asarray(held_out)
