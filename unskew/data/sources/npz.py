"""Data in NumPy files: ``x`` and ``y``, optionally ``x_test`` and ``y_test``, and columns such as a client.

``npz:PATH`` is one file with all arrays. ``npy:PATH`` is a folder with one file per array, such as ``x.npy``; these
files are memory-mapped, so that only the parts that are used are read.

Files in the layout of MedMNIST (Yang et al. 2023, doi:10.1038/s41597-022-01721-8) have the arrays ``train_images``,
``train_labels``, ``val_images``, ``val_labels``, ``test_images`` and ``test_labels``.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from unskew.data.frames import read_classes
from unskew.data.memory_map import mapped_array
from unskew.data.readers.arrow_io import check_expansion
from unskew.data.readers.files import files_with_suffix
from unskew.data.readers.masks import classes_of_masks, gray_values
from unskew.data.readers.tables import SPLIT_SEED, TEST_SHARE, SampleTable, Source
from unskew.data.validation import as_inputs, as_targets
from unskew.errors import DataError
from unskew.filesystem import check_regular
from unskew.tasks.base import Task
from unskew.tasks.classification import Classification, MultiLabel
from unskew.tasks.segmentation import Segmentation


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Load the arrays of a file, or map those of a folder, without unpickling.

    Args:
        path: File ``.npz``, or folder of ``.npy`` files.

    Raises:
        DataError: If a file cannot be read, or there are no ``x`` and ``y`` of the same length.
    """
    folder = path.is_dir()
    try:
        if folder:
            arrays = {
                file.stem: np.load(file, mmap_mode="r", allow_pickle=False)
                for file in files_with_suffix(path.iterdir(), ".npy")
            }
        else:
            check_regular(path)
            with zipfile.ZipFile(path) as members:
                check_expansion(str(path), sum(member.file_size for member in members.infolist()), path.stat().st_size)
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        strange = next((name for name, value in arrays.items() if not isinstance(value, np.ndarray)), None)
        if strange is not None:
            raise ValueError(f"{strange} is not an array")
        arrays = {name: np.char.decode(value) if value.dtype.kind == "S" else value for name, value in arrays.items()}
        if "train_images" in arrays:
            arrays = from_medmnist(arrays, path)
    except DataError:
        raise
    except Exception as error:  # corrupted bytes raise many types in zipfile, zlib and NumPy
        what = "a folder of arrays (.npy)" if folder else "a file of arrays (.npz)"
        raise DataError(f"{path} cannot be read as {what}: {error}.") from error
    for key, other in (("x", "y"), ("x_test", "y_test")):
        if (key in arrays) != (other in arrays) or (key == "x" and key not in arrays):
            raise DataError(
                f"{path} must contain the arrays {key} and {other}. It has: {', '.join(sorted(arrays)) or 'none'}."
            )
        if key in arrays and (not arrays[key].ndim or arrays[key].shape[:1] != arrays[other].shape[:1]):
            raise DataError(f"{path}: {key} and {other} must have the same number of rows.")
    return arrays


def from_medmnist(arrays: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Rename arrays in the layout of MedMNIST to those of ``npz``; validation rows join the training rows.

    Args:
        arrays: Arrays named ``train_NAME``, and optionally ``val_NAME`` and ``test_NAME``.
        path: Path of the file, for errors.

    Raises:
        DataError: If an array of a part is missing, or parts differ in shape.
    """
    names = {"images": "x", "labels": "y"}
    wanted = [f"{part}_{name}" for part in ("train", "val", "test") if f"{part}_images" in arrays for name in names]
    for key in wanted:
        like = arrays.get(f"train_{key.partition('_')[2]}")
        if key not in arrays or like is None or arrays[key].shape[1:] != like.shape[1:]:
            raise DataError(f"{path} must contain {key}, in the shape of the training part. Save the file again.")
    renamed = {}
    for key in [key for key in arrays if key.startswith("train_")]:
        name = key.removeprefix("train_")
        column = names.get(name, name)
        parts = [arrays[f"{part}_{name}"] for part in ("train", "val") if f"{part}_{name}" in arrays]
        renamed[column] = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if f"test_{name}" in arrays:
            renamed[f"{column}_test"] = arrays[f"test_{name}"]
    return renamed


def is_array_folder(path: Path) -> Path:
    """Validate that a folder contains ``x.npy`` and ``y.npy``, and return it.

    Args:
        path: Folder to check.

    Raises:
        DataError: If one of the files is missing.
    """
    if not all((path / f"{name}.npy").is_file() for name in "xy"):
        raise DataError(f"{path} must be a folder with the files x.npy and y.npy.")
    return path


def npz_source(path: Path, masks: Segmentation) -> Source:
    """Load the data set; one-dimensional arrays with the length of ``y`` become columns, such as the client.

    Args:
        path: Path of the ``.npz`` file, or of the folder of ``.npy`` files.
        masks: Segmentation with configured classes, for a ``y`` of masks ``[n, height, width]``.

    Raises:
        DataError: If the arrays are not valid.
    """
    arrays = load_arrays(path)
    for values in arrays.values():
        mapped_array(values)
    n = len(arrays["y"])
    columns = {
        k: v
        for k, v in arrays.items()
        if k not in ("x", "y") and v.ndim == 1 and len(v) == n and not k.endswith("_test")
    }
    x = as_inputs(arrays["x"], str(path))
    targets = {key: arrays[key] for key in ("y", "y_test") if key in arrays}
    targets = {key: y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y for key, y in targets.items()}
    task: Task = Classification()
    if targets["y"].ndim > 2:
        gray = {f"{key} of {path}": gray_values(values, str(path)) for key, values in targets.items()}
        (y, *test_y), task = classes_of_masks(gray, masks, lambda part, row: f"{row} in {part}")
        names = task.names
    elif targets["y"].ndim == 2:
        (y, *test_y), names = read_several_labels([*targets.values()], str(path))
        task = MultiLabel()
    else:
        (y, *test_y), names = read_classes([*targets.values()], str(path))
    samples = SampleTable(x, y, columns)
    if test_y:
        test = SampleTable(as_inputs(arrays["x_test"], str(path)), test_y[0], {})
        train = samples
    else:
        order = np.random.default_rng(SPLIT_SEED).permutation(n)
        cut = max(1, round(n * TEST_SHARE))
        if n - cut < 1:
            raise DataError(f"{path} has {n} rows, too few for a training and a test part.")
        test, train = samples.rows(np.sort(order[:cut])), samples.rows(np.sort(order[cut:]))
    for part in (train, test):
        task.check(part.y, len(names), str(path), part.x)
    return Source(path.stem, train, test, names, len(names), task.name, trained_for=task if task.pixels else None)


def read_several_labels(labels: Sequence[np.ndarray], who: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the labels of several parts, ``[n, L]`` of 0 and 1, and their names, which are numbers from 0.

    Args:
        labels: Labels of each part.
        who: Name of the data, for errors.

    Raises:
        DataError: If the parts have different numbers of labels, or a value is neither 0 nor 1.
    """
    if len({y.shape[1:] for y in labels}) > 1:
        raise DataError(f"{who}: training and test rows must have the same number of labels.")
    return [as_targets(y, who, "multilabel") for y in labels], tuple(map(str, range(labels[0].shape[1])))
