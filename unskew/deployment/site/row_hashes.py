"""Keyed hashes of a site's rows, by which the site recognizes changed data without storing the values.

Each value is hashed together with the name of its column. So two reads of the same rows can be compared on the columns that
both have, also if two experiments use different columns. The hashes do not depend on the order of rows, on the types that are
inferred for columns, on the numbering of classes, nor on the division into training and held-out rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from unskew.data.readers.column_roles import INPUT, LABEL
from unskew.data.readers.tables import SampleTable, Source
from unskew.deployment.site.data import SiteData
from unskew.tasks.registry import TASKS

RowHashes = dict[str, Tensor]
"""Hash of the value of each row, int64 ``[n]``, by column."""
RowValues = dict[str, list[object]]
"""Value of each row by column."""


def row_values(samples: SiteData) -> RowValues:
    """Return inputs and targets of all rows of a site by column, the training rows first.

    Args:
        samples: Data of the site.
    """
    train, held = (_values(part, samples.source) for part in (samples.train, samples.held))
    return {name: [*train[name], *held[name]] for name in train}


def _values(rows: SampleTable, source: Source) -> RowValues:
    inputs = [name for name, role in source.columns.items() if role.startswith(INPUT) and name in rows.columns]
    values: RowValues = {name: rows.columns[name].tolist() for name in inputs}
    if not inputs:
        text = rows.x.dtype == torch.int64  # the longest text decides how many tokens the others are padded to
        values["inputs"] = [(row[row >= 0] if text else row).tobytes() for row in rows.x.contiguous().numpy()]
    names, y = source.class_names, rows.y.tolist()
    label = next((name for name, role in source.columns.items() if role.startswith(LABEL)), "label")
    task = TASKS[source.task]
    if task.numeric_labels:
        values |= {name: [row[j] for row in y] for j, name in enumerate(names)}
    elif not task.exclusive:
        values[label] = [str([name for name, has in zip(names, row, strict=True) if has]) for row in y]
    elif names and rows.y.dim() == 1:
        values[label] = [names[number] for number in y]
    return values


def hash_rows(values: Mapping[str, list[object]], key: bytes) -> RowHashes:
    """Hash the values of rows with keyed BLAKE2b, to 64 bits.

    Args:
        values: Value of each row by column.
        key: Secret key.
    """
    hashes = {}
    for name, column in values.items():
        known: dict[bytes, bytes] = {}
        digests, prefix = [], name.encode() + b"\0"
        for text in map(_as_bytes, column):
            if text not in known:
                known[text] = hashlib.blake2b(prefix + text, digest_size=8, key=key).digest()
            digests.append(known[text])
        hashes[name] = torch.from_numpy(np.frombuffer(b"".join(digests), np.int64).copy())
    return hashes


def _as_bytes(value: object) -> bytes:
    """Encode a value; a number is the same as its text, because one word makes a column of numbers one of texts."""
    if isinstance(value, bytes):
        return value
    try:
        return repr(float(value)).encode()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return b"nan" if value is None else str(value).encode()


def with_training_rows(hashes: RowHashes, count: int) -> RowHashes:
    """Return hashes as they are stored: with the number of training rows, which are the first ones.

    Args:
        hashes: Hashes of all rows.
        count: Number of training rows.
    """
    return {"train": torch.tensor(count), **{f"rows/{name}": values for name, values in hashes.items()}}


def parts_of_rows(stored: RowHashes) -> tuple[RowHashes, RowHashes]:
    """Return the hashes of all rows, and of the training rows.

    Args:
        stored: Hashes, from ``with_training_rows``.
    """
    rows = {name.removeprefix("rows/"): values for name, values in stored.items() if name.startswith("rows/")}
    return rows, {name: values[: int(stored["train"])] for name, values in rows.items()}


def count_changes(before: RowHashes, now: RowHashes) -> dict[str, int]:
    """Count the rows that were added, removed or changed, in each column of both and in these columns together.

    Without common columns, this is the difference of the numbers of rows.

    Args:
        before: Hashes of the earlier rows.
        now: Hashes of the current rows.
    """
    names = [name for name in now if name in before]
    changes = {name: _num_changed(before[name], now[name]) for name in names}
    # Sums modulo 2^64: a hash depends on its column, so values that were exchanged between rows change the sums.
    together = [
        sum((rows[name] for name in names), torch.zeros_like(next(iter(rows.values())))) for rows in (before, now)
    ]
    return {**changes, "all columns": _num_changed(*together)}


def _num_changed(before: Tensor, now: Tensor) -> int:
    """Return the number of changed values: the larger one of the number of new and of missing ones."""
    values, number = np.unique(np.concatenate([before.numpy(), now.numpy()]), return_inverse=True)
    counts = [np.bincount(some, minlength=len(values)) for some in np.split(number, [len(before)])]
    balance = counts[1] - counts[0]
    return max(int(balance.clip(min=0).sum()), int((-balance).clip(min=0).sum()))
