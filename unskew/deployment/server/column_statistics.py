"""Global column statistics, computed before the first round: mean and scale of columns and targets, and categories.

Each site first reports counts, sums and categories. The server then requests the squared deviations from the global mean.
The resulting statistics are bit-identical to those of a simulation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from unskew.data.column_statistics import (
    global_means,
    global_moments,
)
from unskew.data.partitioned import GlobalStats, PartitionedSource
from unskew.data.readers.encoders import (
    ClientStats,
    Encoder,
    fit_encoders,
    numeric_columns,
)
from unskew.data.target_scaling import target_scaling_bytes, task_with_moments
from unskew.deployment.server.data_exchange import MOST, request_all
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.fields import read_integer, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import InvalidMessageError, decode_record, encode_record
from unskew.errors import ConfigError, DataError
from unskew.protocol.messages import Tensors
from unskew.tasks.registry import TASKS

LONGEST = 1000
"""Maximum number of characters of a category value."""
HIGHEST = 1e60
"""Largest magnitude of a sum: the sums of all sites must be finite."""


def parse_sums(
    frame: Frame, num_samples: int, known: Sequence[Encoder], targets: int
) -> tuple[ClientStats, np.ndarray, np.ndarray]:
    """Parse a site's first report.

    Args:
        frame: Report of the site.
        num_samples: Number of training samples of the site.
        known: Encoders of the columns.
        targets: Number of regression targets.

    Returns:
        The statistics of the columns, and the counts and the sums of the targets.

    Raises:
        InvalidMessageError: If the report is invalid.
    """
    arrays, width = decode_record(frame, "sums"), len(numeric_columns(known))
    counts, sums = (parse_vector(arrays, name, width + targets) for name in ("counts", "sums"))
    if not ((counts >= 0) & (counts <= num_samples)).all() or not (counts[width:] == num_samples).all():
        raise InvalidMessageError(f"it counts more values than its {num_samples} samples can have")
    try:
        values = json.loads(read_text(frame.config, "values"))
        coded = len(known) - width
        lists = isinstance(values, list) and len(values) == coded and all(isinstance(some, list) for some in values)
        if not lists or not all(isinstance(v, str) and len(v) <= LONGEST for some in values for v in some):
            raise ValueError
        if any(len(set(some)) < len(some) or len(some) > num_samples for some in values):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError("its categories cannot be read") from error
    return (
        ClientStats(num_samples, counts[:width], sums[:width], tuple(map(tuple, values))),
        counts[width:],
        sums[width:],
    )


def parse_vector(arrays: Tensors, name: str, size: int) -> np.ndarray:
    """Return a vector of ``size`` finite numbers from a message: int64 for ``counts``, float64 otherwise.

    Args:
        arrays: Tensors of the message by name.
        name: Name of the vector.
        size: Expected length.

    Raises:
        InvalidMessageError: If the vector is missing, has another length or dtype, or contains invalid values.
    """
    vector = arrays.get(name)
    wanted = torch.int64 if name == "counts" else torch.float64
    if (
        vector is None
        or vector.dtype != wanted
        or tuple(vector.shape) != (size,)
        or not (vector.abs() <= HIGHEST).all()
    ):
        raise InvalidMessageError(f"its {name} are not {size} finite numbers")
    if name == "squares" and (vector < 0).any():
        raise InvalidMessageError("a sum of squares is negative")
    return vector.numpy()


def collect_global_stats(drawn: PartitionedSource, frames: Mapping[int, Frame], sites: SiteManager) -> GlobalStats:
    """Collect the global statistics of all sites, including the second report.

    Args:
        drawn: The experiment's data as loaded at the server; the sites have the same columns.
        frames: First report of each client, in order.
        sites: Connected sites.

    Raises:
        ConfigError: If no site has a value in one of the columns.
        EngineError: If too few sites reply.
    """
    known, regression = drawn.source.encoders, TASKS[drawn.source.task].standardized
    targets = drawn.source.classes if regression else 0
    names = [*(known[j].name for j in numeric_columns(known)), *(drawn.source.class_names if regression else ())]
    width = len(names) - targets
    first = {}
    for client, frame in frames.items():
        try:
            first[client] = parse_sums(frame, read_integer(frame.config, "num_samples", MOST), known, targets)
        except InvalidMessageError as error:
            sites.fault(client, f"its column statistics were rejected because {error}", last=True)
    both = [
        (np.concatenate([columns.counts, counts]), np.concatenate([columns.sums, sums]))
        for columns, counts, sums in first.values()
    ]
    try:
        mean = global_means(both, names)[1]
    except DataError as error:
        raise ConfigError(str(error).replace("client", "site")) from error
    request = Frame("squares", {}, {}, encode_record("sums", {"mean": torch.from_numpy(mean)}))
    replies = request_all(
        sites, dict.fromkeys(first, request), "sums", lambda client, frame: parse_squares(frame, len(names))
    )
    if len(replies) < len(first):  # without a site that has sent no valid squares, the means are others
        return collect_global_stats(drawn, {client: frames[client] for client in replies}, sites)
    second = list(replies.values())
    columns = None
    scale = None
    sent = None
    if known:
        rest = [columns for columns, _, _ in first.values()]
        columns = fit_encoders(known, drawn.source.indicate, rest, lambda _: (sums[:width] for sums in second))
        sent = columns.traffic
    if regression:
        of_targets = [(counts, sums) for _, counts, sums in first.values()]
        scale = task_with_moments(
            global_moments(of_targets, lambda _: (squares[width:] for squares in second), names[width:])
        )
        cost = target_scaling_bytes(len(first), targets)
        sent = cost if sent is None else sent + cost
    return GlobalStats(columns, scale, sent)


def parse_squares(frame: Frame, size: int) -> np.ndarray:
    """Parse a site's second report.

    Args:
        frame: Report of the site.
        size: Number of columns and targets.

    Raises:
        InvalidMessageError: If the report is invalid.
    """
    if frame.kind != "squares":
        raise InvalidMessageError(f"its kind is {frame.kind[:40]!r} instead of 'squares'")
    return parse_vector(decode_record(frame, "sums"), "squares", size)
