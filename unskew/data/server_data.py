"""Server data: test samples that move to the server, or another data set."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from unskew.data.clients import take_rows
from unskew.data.federation import ServerData
from unskew.data.readers.images import convert_channels, resize_images
from unskew.data.readers.tables import SampleTable, Source
from unskew.data.sources.registry import load_source
from unskew.data.spec import DataSpec, Split, parse_split
from unskew.data.splits import SplitUnits, make_units
from unskew.errors import ConfigError, DataError


def server_data(spec: DataSpec, source: Source, test: SampleTable, seed: int) -> tuple[ServerData | None, SampleTable]:
    """Return the server data (None if there are none) and the remaining test samples.

    Args:
        spec: Data specification.
        source: Source of the clients' data.
        test: Test samples.
        seed: Random seed of the run.
    """
    rng, reserve_test_samples = purpose_generator(seed, "server"), spec.reserve_test_samples
    order = rng.permutation(len(test))
    group = None if spec.split_by is None else parse_split(spec.split_by).group
    grouped = group is not None or test.texts is not None
    units = make_units(test.columns, Split(group), len(test), rng, test.texts) if grouped else None
    if units is not None:
        order = order[np.argsort(units.ranks[units.codes[order]], kind="stable")]
    if reserve_test_samples >= len(test):
        raise DataError(
            f"reserve_test_samples={reserve_test_samples} leaves none of the {len(test)} test samples for evaluation."
        )
    server = spec.server_data
    if isinstance(server, str) and re.fullmatch(r"-?[0-9]{1,18}", server):
        server = int(server)
    if server is None or isinstance(server, str):
        test = test.rows(remaining_rows(order, reserve_test_samples, units)) if reserve_test_samples else test
    if isinstance(server, str):
        return load_other_dataset(server, spec.server_data_path, source, test), test
    if spec.server_data_path is not None:
        raise ConfigError(
            "server_data_path requires server_data with the name of the data set to load from it."
            if server is None
            else f"server_data={server} uses samples of the test set. Remove server_data_path."
        )
    if server is None:
        return None, test
    if not 1 <= server < len(test):
        raise DataError(
            f"server_data={server} uses samples of the test set, which has {len(test)} and needs some for evaluation. "
            f"Use a number from 1 to {len(test) - 1}."
        )
    taken, left = (
        torch.from_numpy(np.sort(order[:server])),
        remaining_rows(order, max(server, reserve_test_samples), units),
    )
    return ServerData(take_rows(test.x, taken), test.y[taken]), test.rows(left)


def remaining_rows(order: np.ndarray, count: int, units: SplitUnits | None) -> np.ndarray:
    """Return the test rows that remain for evaluation, without the first ``count`` rows and all rows of their groups.

    Args:
        order: Order of the test rows.
        count: Number of rows that are not for evaluation.
        units: Groups of rows that are not split, or None.

    Raises:
        DataError: If no row remains.
    """
    left = order[count:]
    if units is not None:
        left = left[~np.isin(units.codes[left], units.codes[order[:count]])]
    if not len(left):
        raise DataError(f"{count} test samples and all rows of their groups leave none for evaluation. Use fewer.")
    return np.sort(left)


def load_other_dataset(name: str, path: str | Path | None, source: Source, test: SampleTable) -> ServerData:
    """Load the training images of another data set, with the clients' image size and at least their number of channels.

    Args:
        name: Name of the data set.
        path: Folder of the data set's files, or None.
        source: Source of the clients' data.
        test: Test samples.
    """
    # If the clients' images are square, decode at their size: larger images may not fit into memory.
    size = int(test.x.shape[2]) if test.x.dim() == 4 and test.x.shape[2] == test.x.shape[3] else None
    images = load_source(name, path=path, size=size).train
    if images.x.dim() != 4 or test.x.dim() != 4:
        raise DataError(f"The server's data set {name!r} and {source.name!r} must both contain images.")
    if images.x.dtype != test.x.dtype:
        raise DataError(
            f"The images of the server's data set {name!r} are {images.x.dtype}, those of {source.name!r} "
            f"{test.x.dtype}. Convert them to the same range and dtype first."
        )
    channels, height, width = test.x.shape[1:]
    channels = max(channels, images.x.shape[1])
    return ServerData(convert_channels(resize_images(images.x, height, width), channels), images.y, in_domain=False)


def repeat_channels(source: Source, test: SampleTable, channels: int) -> tuple[Source, SampleTable]:
    """Repeat the channel of the clients' gray images if the server has color images (Zhu et al. 2025).

    Args:
        source: Source of the clients' data.
        test: Test samples.
        channels: Number of channels of the result.
    """
    if source.train.x.shape[1] == channels:
        return source, test
    train, test = (replace(part, x=convert_channels(part.x, channels)) for part in (source.train, test))
    return replace(source, train=train), test


def purpose_generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a random number generator that depends on the seed and the purpose.

    Args:
        seed: Random seed of the run.
        purpose: Name of the purpose; different purposes have independent generators.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(f"unskew/{purpose}".encode())]))
