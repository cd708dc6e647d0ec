"""Arrays with ``x`` and ``y``, perhaps ``x_test`` and ``y_test``, and columns such as a client.

``npz:PATH`` is one file that holds all of them. ``npy:PATH`` is a folder with a file for each, ``x.npy`` and so on: these are
mapped, and only what is used of them is read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unskew.data.memory_map import mapped_array
from unskew.data.readers.tables import SPLIT_SEED, SampleTable, Source
from unskew.data.validation import as_inputs, as_targets, check_targets
from unskew.errors import DataError
from unskew.filesystem import check_regular


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, or those of a folder as they lie in their files; nothing executable is loaded.

    Raises:
        DataError: The file cannot be read, or has no ``x`` and ``y`` of the same length.
    """
    folder = path.is_dir()
    try:
        if folder:
            arrays = {
                file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(path.glob("*.npy"))
            }
        else:
            check_regular(path)
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        strange = next((name for name, value in arrays.items() if not isinstance(value, np.ndarray)), None)
        if strange is not None:
            raise ValueError(f"{strange} is not an array")
    except Exception as error:  # damaged bytes lead to errors of any kind, deep in zipfile, zlib and NumPy
        what = "a folder of arrays (.npy)" if folder else "a file of arrays (.npz)"
        raise DataError(f"{path} cannot be read as {what}: {error}.") from error
    for key, other in (("x", "y"), ("x_test", "y_test")):
        if (key in arrays) != (other in arrays) or (key == "x" and key not in arrays):
            raise DataError(
                f"{path} must hold the arrays {key} and {other}; it has: {', '.join(sorted(arrays)) or 'none'}."
            )
        if key in arrays and (not arrays[key].ndim or arrays[key].shape[:1] != arrays[other].shape[:1]):
            raise DataError(f"{path}: {key} and {other} must have as many rows as each other.")
    return arrays


def is_array_folder(path: Path) -> Path:
    """A folder that holds ``x.npy`` and ``y.npy``.

    Raises:
        DataError: The folder contains arrays, but not all that are needed.
    """
    if not all((path / f"{name}.npy").is_file() for name in "xy"):
        raise DataError(f"{path} must be a folder with the files x.npy and y.npy.")
    return path


def npz_source(path: Path, test_share: float) -> Source:
    """The data set; arrays of one dimension and as many rows as ``y`` are columns, such as who holds a sample.

    Args:
        path: The file.
        test_share: Share of test samples, if the file has no test set.

    Raises:
        DataError: The arrays cannot be used.
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
    x, y = as_inputs(arrays["x"], str(path)), as_targets(arrays["y"], str(path))
    samples = SampleTable(x, y, columns)
    if "x_test" in arrays:
        test = SampleTable(as_inputs(arrays["x_test"], str(path)), as_targets(arrays["y_test"], str(path)), {})
        train = samples
    else:
        order = np.random.default_rng(SPLIT_SEED).permutation(n)
        cut = max(1, round(n * test_share))
        if n - cut < 1:
            raise DataError(f"{path} has {n} rows, too few to train and to test on.")
        test, train = samples.rows(np.sort(order[:cut])), samples.rows(np.sort(order[cut:]))
    classes = 1 + max(int(part.y.max()) for part in (train, test))
    for part in (train, test):
        check_targets(part.y, classes, str(path))
    return Source(path.stem, train, test, tuple(str(c) for c in range(classes)), classes)
