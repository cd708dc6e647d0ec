"""Built-in data sets: scikit-learn's digits and tables, survival with lung cancer, and Gaussian classes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.data.readers.arrow import pa
from unskew.data.readers.column_roles import ColumnSelection
from unskew.data.readers.files import file_tables
from unskew.data.readers.tables import SampleTable, Source, source_from_tables, train_test_tables
from unskew.data.validation import as_inputs, as_targets
from unskew.errors import DataError

LUNG = {"inst": "institution", "time": "days", "status": "event"}
"""Columns of lifelines' file with other names."""


def _digits() -> np.ndarray:
    """Read pixels (0 to 16) and classes, ``[1797, 65]``, from scikit-learn's file without importing the package."""
    package = find_spec("sklearn")
    file = (
        None
        if package is None or package.origin is None
        else Path(package.origin).parent / "datasets/data/digits.csv.gz"
    )
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # for versions of scikit-learn with another file layout

    data = load_digits()
    return np.column_stack([data.data, data.target])


def digits() -> Source:
    """Load scikit-learn's digits as uint8 images, with a stratified test part of 20 %.

    The rows of both parts are those of ``train_test_split(..., test_size=0.2, stratify=labels, random_state=0)``. They
    are stored in a file, because importing scikit-learn takes as long as a short run.
    """
    values = _digits()
    images, labels = (values[:, :-1].reshape(-1, 8, 8) * 15).astype(np.uint8), values[:, -1].astype(np.int64)
    order = np.load(Path(__file__).with_name("digits-split.npy"))
    parts = np.split(order, [int(0.8 * len(order))])
    train, test = (SampleTable(as_inputs(images[rows], "digits"), torch.from_numpy(labels[rows]), {}) for rows in parts)
    return Source("digits", train, test, tuple(str(c) for c in range(10)), 10)


def scikit_learn_table(name: str) -> Source:
    """Load a table that scikit-learn ships, with a test part of 20 % that is stratified by class.

    Args:
        name: ``iris``, ``wine``, ``breast_cancer`` or ``diabetes``; the last one is a regression.
    """
    from sklearn import datasets

    options = {"scaled": False} if name == "diabetes" else {}
    data = getattr(datasets, f"load_{name}")(**options)
    task = "regression" if name == "diabetes" else "classification"
    names = ("progression",) if name == "diabetes" else tuple(map(str, data.target_names))
    columns = dict(zip(map(str, data.feature_names), data.data.T, strict=True))
    x, y = torch.from_numpy(data.data.astype(np.float32)), as_targets(data.target, name, task)
    train, test = train_test_tables([SampleTable(x, y, columns)])
    return Source(name, train, test, names, len(names), task)


def lung_table() -> Any:
    """Return the rows of the lung cancer data that lifelines ships, without importing the package; one has no institution.

    Loprinzi et al. 1994, Journal of Clinical Oncology 12: 601-607. ``event`` is 1 for a death.

    Raises:
        DataError: If lifelines is not installed.
    """
    package = find_spec("lifelines")
    file = None if package is None or package.origin is None else Path(package.origin).parent / "datasets/lung.csv"
    if file is None or not file.is_file():
        raise DataError("The data set lung comes with the package lifelines. Run pip install --no-deps lifelines.")
    rows, _ = file_tables(file)
    rows = rows.rename_columns([LUNG.get(name, name) for name in rows.column_names])
    rows = rows.filter(pa.compute.is_valid(rows.column("institution")))
    for name, kind in (("institution", pa.string()), ("event", pa.int64())):
        values = rows.column(name).cast(pa.int64())
        if name == "event":  # 1 and 2 in R and in older versions
            values = pa.compute.subtract(values, pa.compute.subtract(pa.compute.max(values), 1))
        rows = rows.set_column(rows.column_names.index(name), name, values.cast(kind))
    return rows


def lung(choice: ColumnSelection) -> Source:
    """Load the survival of patients with lung cancer; missing numbers are the mean unless the user chooses another way.

    Args:
        choice: Column selection of the user.
    """
    missing = "mean" if choice.missing == "error" else choice.missing
    task = "survival" if choice.task == "auto" else choice.task
    choice = choice._replace(missing=missing, task=task)
    return source_from_tables("lung", lung_table(), None, label="days,event", choice=choice)


def gaussians() -> Source:
    """Generate ten Gaussian classes in 10 dimensions.

    The covariance is the identity, the means are ``c (1, ..., 1)`` for ``c = -5 ... 4``. This is the synthetic data of
    Gholami and Seferoglu 2024, arXiv:2404.11754, with a fixed seed.
    """
    draws = np.random.default_rng(0)

    def sample(n: int) -> SampleTable:
        labels = draws.integers(0, 10, n)
        values = draws.normal(size=(n, 10)) + (labels - 5)[:, None]
        return SampleTable(torch.from_numpy(values.astype(np.float32)), torch.from_numpy(labels), {})

    return Source("gaussians", sample(20_000), sample(50_000), tuple(str(c) for c in range(-5, 5)), 10)
