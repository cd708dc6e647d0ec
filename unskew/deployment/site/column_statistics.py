"""A site's statistics of columns and targets, from which the server computes the global ones before the first round.

The site first reports counts, sums and categories, then the squared deviations from the global mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from unskew.data.column_statistics import MOMENTS, category_bytes, counts_and_sums, sums_of_squares
from unskew.data.readers.encoders import client_stats, numeric_columns, squared_deviations
from unskew.deployment.site.data import SiteData
from unskew.deployment.wire.frames import Blob
from unskew.deployment.wire.tensor_codec import InvalidMessageError, encode_record
from unskew.errors import abbreviate
from unskew.protocol.messages import Tensors
from unskew.tasks.registry import TASKS


def site_sums(samples: SiteData) -> tuple[dict[str, Blob], str]:
    """Compute a site's first report: counts and sums of its columns and targets, and its categories as JSON."""
    columns, targets = columns_and_targets(samples)
    first = client_stats(columns, samples.source.encoders)
    counts, sums = counts_and_sums(targets)
    both = {"counts": np.concatenate([first.counts, counts]), "sums": np.concatenate([first.sums, sums])}
    return encode_record("sums", as_tensors(both)), json.dumps(first.values, ensure_ascii=False)


def site_squares(samples: SiteData, mean: Tensor) -> dict[str, Blob]:
    """Compute a site's second report: squared deviations from the global mean.

    Args:
        samples: Data of the site.
        mean: Mean of each column over all sites.

    Raises:
        InvalidMessageError: If ``mean`` does not contain one finite float64 value per column and target.
    """
    columns, targets = columns_and_targets(samples)
    width = len(numeric_columns(samples.source.encoders))
    if mean.dtype != torch.float64 or tuple(mean.shape) != (width + targets.shape[1],) or not mean.isfinite().all():
        raise InvalidMessageError("it does not have a mean for each column")
    both = mean.numpy()
    squares = [
        squared_deviations(columns, samples.source.encoders, both[:width]),
        sums_of_squares(targets, both[width:]),
    ]
    return encode_record("sums", as_tensors({"squares": np.concatenate(squares)}))


def columns_and_targets(samples: SiteData) -> tuple[np.ndarray, np.ndarray]:
    """Return the training columns and targets of a site; each is an array of width 0 if the site has none."""
    rows, nothing = samples.train, np.zeros((len(samples.train), 0))
    regression = TASKS[samples.source.task].standardized
    return rows.x.numpy() if samples.source.encoders else nothing, rows.y.numpy() if regression else nothing


def as_tensors(arrays: Mapping[str, np.ndarray]) -> Tensors:
    """Convert NumPy arrays to tensors; dtypes stay the same."""
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}


def describe_sums(samples: SiteData) -> list[str]:
    """Describe, for the administrator of a site, the statistics that the site will send."""
    encoders, lines = samples.source.encoders, []
    names = [encoders[j].name for j in numeric_columns(encoders)]
    names += list(samples.source.class_names) if TASKS[samples.source.task].standardized else []
    if names:
        lines.append(
            f"for each of {', '.join(names)}: number of values, their sum, and the sum of squared deviations from the mean "
            f"of all sites; {MOMENTS * len(names)} bytes"
        )
    coded = [encoder.name for encoder in encoders if encoder.kind == "category"]
    for name, values in zip(coded, client_stats(columns_and_targets(samples)[0], encoders).values, strict=True):
        lines.append(
            f"the values of the category {name}: {abbreviate(values, 20) or 'none'}; {category_bytes(values)} bytes"
        )
    return lines
