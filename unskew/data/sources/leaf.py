"""The layout of LEAF: folders ``train`` and ``test`` of JSON files with the samples of each user.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097. Each file is an object with ``users``
(their names), ``num_samples`` and ``user_data``: for each user the inputs ``x`` and labels ``y``. Inputs are lists of numbers
(FEMNIST: the pixels of an image from 0 to 1, row by row) or names of image files (CelebA).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskew.data.readers.images import convert_channels, decode_column
from unskew.data.readers.labels import encode_labels, label_values
from unskew.data.readers.tables import SampleTable, Source, train_test_tables
from unskew.data.validation import as_inputs, as_targets, check_classes
from unskew.errors import DataError
from unskew.filesystem import read_file

SMALLEST = 8
"""Lists of at least so many numbers squared, if they are a square, are gray images."""


class Samples(NamedTuple):
    """Samples of one split: numbers ``[n, f]`` or file names ``[n]``, labels and users."""

    x: np.ndarray
    y: list[Any]
    users: list[str]


def leaf_source(path: Path, images: Path | None = None, size: int | None = None, test_share: float = 0.2) -> Source:
    """Read a folder in LEAF's layout; its column ``user`` says whose a sample is.

    Args:
        path: Holds ``train`` and ``test``, or ``data`` with these.
        images: Where the files lie that inputs name; by default in ``raw/img_align_celeba`` or in ``path``.
        size: Side to which images are brought.
        test_share: Share of the rows to test on where there is no folder ``test``.

    Raises:
        DataError: A file is missing or not of this layout, or inputs differ in kind or length.
    """
    root = leaf_root(path)
    splits = {split: read_split(root / split) for split in ("train", "test") if (root / split).is_dir()}
    kinds = {samples.x.dtype.kind for samples in splits.values()}
    if len(kinds) > 1:
        raise DataError(f"The inputs of {path} are numbers in one split and file names in the other.")
    if kinds == {"f"}:
        xs = [numbers_to_inputs(samples.x, path, splits["train"].x.shape[1]) for samples in splits.values()]
        if len({x.dtype for x in xs}) > 1:  # one split happens to hold whole pixels only
            xs = [x.float() / 255 if x.dtype == torch.uint8 else x for x in xs]
    else:
        folder = images or next((f for f in (root / "raw" / "img_align_celeba", root / "raw") if f.is_dir()), root)
        xs = [open_images(samples.x, f"{path}, {split}", folder, size) for split, samples in splits.items()]
        channels = max(x.shape[1] for x in xs)
        xs = [convert_channels(x, channels) for x in xs]
    names, ys = encode_labels([read_labels(s.y, f"{path}, {split}") for split, s in splits.items()], ())
    check_classes(names, str(path), "classification")
    tables = [
        SampleTable(x, as_targets(y, str(path)), {"user": np.array(s.users)})
        for x, y, s in zip(xs, ys, splits.values(), strict=True)
    ]
    if tables[0].x.shape[1:] != tables[-1].x.shape[1:]:
        raise DataError(f"The training inputs of {path} have another shape than its test inputs.")
    return Source(path.name, *train_test_tables(tables, test_share), names, len(names))


def leaf_root(path: Path) -> Path:
    """The folder that holds ``train``: ``path`` or its ``data``.

    Raises:
        DataError: Neither does, or there is no .json file in it.
    """
    root = path if (path / "train").is_dir() else path / "data"
    if not (root / "train").is_dir():
        raise DataError(f"{path} is not in LEAF's layout: it has no folder 'train' of .json files, nor has its 'data'.")
    if not any((root / "train").glob("*.json")):
        raise DataError(f"{root / 'train'} holds no .json file.")
    return root


def read_split(folder: Path) -> Samples:
    """All users of all files of a folder, in order of the files."""
    users = [user for file in sorted(folder.glob("*.json")) for user in users_of(file)]
    if not users:
        raise DataError(f"{folder} holds no .json file with samples.")
    xs = [x for _, x, _ in users]
    if len({x.dtype.kind for x in xs}) > 1 or len({x.shape[1:] for x in xs}) > 1:
        raise DataError(f"The inputs of {folder} differ in kind or length from user to user.")
    y = [label for _, _, labels in users for label in labels]
    return Samples(np.concatenate(xs), y, [name for name, x, _ in users for _ in range(len(x))])


def users_of(file: Path) -> Iterator[tuple[str, np.ndarray, list[Any]]]:
    """Name, inputs and labels of each user of a file; users without samples are left out."""
    try:
        content = json.loads(read_file(file))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a JSON file: {error}.") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= set(content):
        raise DataError(f"{file} is not of LEAF's layout: an object with 'users', 'num_samples' and 'user_data'.")
    users, data = content["users"], content["user_data"]
    sizes = content.get("num_samples", [None] * len(users))
    lists = isinstance(users, list) and isinstance(sizes, list) and len(sizes) == len(users)
    if not lists or not isinstance(data, dict):
        raise DataError(f"{file}: 'users' and 'num_samples' are lists of the same length, 'user_data' is an object.")
    for user, size in zip(users, sizes, strict=True):
        user_data = data.get(str(user))
        if not isinstance(user_data, dict) or not all(isinstance(user_data.get(name), list) for name in "xy"):
            raise DataError(f"{file}: user {user!r} has no lists 'x' and 'y' in 'user_data'.")
        x, y = user_data["x"], user_data["y"]
        if len(x) != len(y) or (size is not None and size != len(y)):
            raise DataError(f"{file}: user {user!r} has {len(x)} inputs, {len(y)} labels and num_samples {size}.")
        if x:
            yield str(user), read_inputs(x, f"{file}, user {user!r}"), y


def read_inputs(x: list[Any], who: str) -> np.ndarray:
    """Lists of numbers as ``[n, f]``, or file names as ``[n]``.

    Args:
        x: Inputs of a user in the file.
        who: Name of the user, for errors.
    """
    if all(isinstance(row, str) for row in x):
        return np.array(x)
    try:
        values = np.array(x, dtype=np.float32)
    except (ValueError, TypeError):
        values = np.zeros(0, np.float32)
    if values.ndim != 2 or not values.shape[1]:
        raise DataError(f"{who}: inputs must be lists of as many numbers each, or names of image files.")
    return values


def read_labels(y: list[Any], who: str) -> np.ndarray:
    """One class per sample.

    Args:
        y: Labels of a user in the file.
        who: Name of the user, for errors.
    """
    import pyarrow as pa

    try:
        column = pa.chunked_array([pa.array(y)])
    except pa.ArrowException as error:
        raise DataError(f"{who}: the labels are neither all numbers nor all text ({error}).") from error
    return label_values(column, "y", who)


def numbers_to_inputs(x: np.ndarray, path: Path, width: int) -> Tensor:
    """Gray images where the lists are squares of pixels (8-bit, if they are 255ths from 0 to 1), else features.

    Args:
        x: Numbers of all samples, ``[n, f]``.
        path: Folder of the data, for errors.
        width: Number of values of a sample.
    """
    if x.shape[1] != width:
        raise DataError(f"The inputs of {path} have {width} numbers in training and {x.shape[1]} in test.")
    side = math.isqrt(width)
    if side * side != width or side < SMALLEST:
        return as_inputs(x, str(path))
    levels = x * 255
    pixels = bool((x >= 0).all() and (x <= 1).all() and (np.abs(levels - levels.round()) < 1e-2).all())
    squares = levels.round().astype(np.uint8) if pixels else x
    return as_inputs(squares.reshape(-1, 1, side, side), str(path))


def open_images(names: np.ndarray, who: str, folder: Path, size: int | None) -> Tensor:
    """The images of these names.

    Args:
        names: Names of the files, ``[n]``.
        who: Name of the data, for errors.
        folder: Folder of the images.
        size: Side of the result in pixels; None: as they are.
    """
    import pyarrow as pa

    return decode_column(pa.chunked_array([pa.array(names.tolist())]), who, folder, size)
