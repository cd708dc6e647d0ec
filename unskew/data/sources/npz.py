"""Data in NumPy files: ``x`` and ``y``, optionally ``x_test`` and ``y_test``, and columns such as a client.

``npz:PATH`` is one file with all arrays. ``npy:PATH`` is a folder with one file per array, such as ``x.npy``; these
files are memory-mapped, so that only the parts that are used are read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from unskew.data.frames import read_classes
from unskew.data.memory_map import mapped_array
from unskew.data.readers.arrow_io import check_expansion
from unskew.data.readers.files import files_with_suffix
from unskew.data.readers.masks import classes_of_masks, gray_values
from unskew.data.readers.tables import SPLIT_SEED, TEST_SHARE, SampleTable, Source
from unskew.data.validation import as_inputs
from unskew.errors import DataError
from unskew.filesystem import check_regular
from unskew.tasks.base import Task
from unskew.tasks.classification import Classification
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
    task: Task = Classification()
    if arrays["y"].ndim > 2:
        gray = {f"{key} of {path}": gray_values(values, str(path)) for key, values in targets.items()}
        (y, *test_y), task = classes_of_masks(gray, masks, lambda part, row: f"{row} in {part}")
        names = task.names
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
