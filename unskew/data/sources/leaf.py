"""Data in LEAF's layout: folders ``train`` and ``test`` of JSON files with the samples of each user.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097. Each file is an object with ``users``
(their names), ``num_samples`` and ``user_data``, which has inputs ``x`` and labels ``y`` for each user. Inputs are
lists of numbers (FEMNIST: the pixels of an image from 0 to 1, row by row) or names of image files (CelebA).
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

from unskew.data.readers.arrow import pa
from unskew.data.readers.files import files_with_suffix
from unskew.data.readers.image_folders import is_image_file, path_column
from unskew.data.readers.images import convert_channels, decode_column
from unskew.data.readers.labels import encode_labels, label_values
from unskew.data.readers.tables import SampleTable, Source, train_test_tables
from unskew.data.validation import as_inputs, as_targets, check_classes
from unskew.errors import DataError
from unskew.filesystem import read_file

SMALLEST = 8
"""Minimum side length of gray images: lists of a square number of at least ``SMALLEST**2`` values are images."""


class Samples(NamedTuple):
    """Samples of one split: numbers ``[n, f]`` or file names ``[n]``, labels and users."""

    x: np.ndarray
    y: list[Any]
    users: list[str]


def leaf_source(path: Path, images: Path | None = None, size: int | None = None) -> Source:
    """Read a folder in LEAF's layout; the column ``user`` has the user of each sample.

    Args:
        path: Folder with ``train`` and ``test``, or with a subfolder ``data`` that contains them.
        images: Folder of the image files that inputs name; by default ``raw/img_align_celeba``, ``raw``, or the folder
            of ``train``, whichever exists first.
        size: Side length to which images are resized.

    Raises:
        DataError: If a file is missing or not in this layout, or inputs differ in type or length.
    """
    root = leaf_root(path)
    splits = {split: read_split(root / split) for split in ("train", "test") if (root / split).is_dir()}
    kinds = {samples.x.dtype.kind for samples in splits.values()}
    if len(kinds) > 1:
        raise DataError(f"The inputs of {path} are numbers in one split and file names in the other.")
    if kinds == {"f"}:
        xs = [numbers_to_inputs(samples.x, path, splits["train"].x.shape[1]) for samples in splits.values()]
        if len({x.dtype for x in xs}) > 1:  # only one split consists of 8-bit pixel values
            xs = [x.float() / 255 if x.dtype == torch.uint8 else x for x in xs]
    else:
        folder = images or next((f for f in (root / "raw" / "img_align_celeba", root / "raw") if f.is_dir()), root)
        xs = [
            decode_column(path_column(samples.x), f"{path}, {split}", folder, size) for split, samples in splits.items()
        ]
        channels = max(x.shape[1] for x in xs)
        xs = [convert_channels(x, channels) for x in xs]
    names, ys = encode_labels([read_labels(s.y, f"{path}, {split}") for split, s in splits.items()], ())
    check_classes(names, str(path), "classification")
    tables = [
        SampleTable(x, as_targets(y, str(path)), {"user": np.array(s.users)})
        for x, y, s in zip(xs, ys, splits.values(), strict=True)
    ]
    if tables[0].x.shape[1:] != tables[-1].x.shape[1:]:
        raise DataError(f"The training inputs and the test inputs of {path} have different shapes.")
    return Source(path.name, *train_test_tables(tables), names, len(names))


def leaf_root(path: Path) -> Path:
    """Return the folder that contains ``train``: ``path`` or its subfolder ``data``.

    Args:
        path: Folder of a LEAF data set.

    Raises:
        DataError: If neither contains it, or ``train`` has no .json file.
    """
    root = path if (path / "train").is_dir() else path / "data"
    if not (root / "train").is_dir():
        raise DataError(f"{path} is not in LEAF's layout: neither it nor its folder 'data' has a folder 'train'.")
    if not any((root / "train").glob("*.json")):
        raise DataError(f"{root / 'train'} contains no .json file.")
    return root


def read_split(folder: Path) -> Samples:
    """Read the samples of all users in all files of a folder, in order of the files."""
    users = [user for file in files_with_suffix(folder.iterdir(), ".json") for user in users_of(file)]
    if not users:
        raise DataError(f"{folder} contains no .json file with samples.")
    xs = [x for _, x, _ in users]
    if len({x.dtype.kind for x in xs}) > 1 or len({x.shape[1:] for x in xs}) > 1:
        raise DataError(f"The inputs of {folder} differ in type or length between users.")
    y = [label for _, _, labels in users for label in labels]
    return Samples(np.concatenate(xs), y, [name for name, x, _ in users for _ in range(len(x))])


def users_of(file: Path) -> Iterator[tuple[str, np.ndarray, list[Any]]]:
    """Iterate over name, inputs and labels of each user in a file; users without samples are skipped."""
    try:
        content = json.loads(read_file(file))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a JSON file: {error}.") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= set(content):
        raise DataError(f"{file} is not in LEAF's layout: an object with 'users', 'num_samples' and 'user_data'.")
    users, data = content["users"], content["user_data"]
    sizes = content.get("num_samples", [None] * len(users))
    lists = isinstance(users, list) and isinstance(sizes, list) and len(sizes) == len(users)
    if not lists or not isinstance(data, dict):
        raise DataError(f"{file}: 'users' and 'num_samples' must be lists of equal length, and 'user_data' an object.")
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
    """Convert inputs to an array: lists of numbers to ``[n, f]``, file names to ``[n]``.

    Args:
        x: Inputs of one user.
        who: File and user, for errors.
    """
    if all(isinstance(row, str) and is_image_file(Path(row)) for row in x):
        return np.array(x)
    try:
        values = np.array(x, dtype=np.float32)
    except (ValueError, TypeError):
        values = np.zeros(0, np.float32)
    if values.ndim != 2 or not values.shape[1]:
        if any(isinstance(value, str) for row in x if isinstance(row, str | list) for value in row):
            raise DataError(
                f"{who}: x contains texts; LEAF's texts are not supported. Convert them to a .jsonl file with the "
                "columns text, label and user, one sample per line, and use text:PATH."
            )
        raise DataError(f"{who}: inputs must be lists of numbers with equal lengths, or names of image files.")
    return values


def read_labels(y: list[Any], who: str) -> np.ndarray:
    """Convert labels to an array with one class per sample.

    Args:
        y: Labels of one split.
        who: Folder and split, for errors.
    """
    try:
        column = pa.chunked_array([pa.array(y)])
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"{who}: the labels must be all numbers or all strings ({error}).") from error
    return label_values(column, "y", who)


def numbers_to_inputs(x: np.ndarray, path: Path, width: int) -> Tensor:
    """Convert lists of numbers to gray images if their length is a square number, otherwise to features.

    Images become uint8 if all values are multiples of 1/255 in [0, 1].

    Args:
        x: Numbers of all samples, ``[n, f]``.
        path: Folder of the data, for errors.
        width: Number of values per sample in the training split.
    """
    if x.shape[1] != width:
        raise DataError(f"The inputs of {path} have {width} numbers in train, but {x.shape[1]} in test.")
    side = math.isqrt(width)
    if side * side != width or side < SMALLEST:
        return as_inputs(x, str(path))
    levels = x * 255
    pixels = bool((x >= 0).all() and (x <= 1).all() and (np.abs(levels - levels.round()) < 1e-2).all())
    squares = levels.round().astype(np.uint8) if pixels else x
    return as_inputs(squares.reshape(-1, 1, side, side), str(path))
