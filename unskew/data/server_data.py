"""Data at the server: test samples that move there, or another data set."""

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
    """The server's samples, and the test rows that are left.

    Args:
        spec: Description of the data.
        source: The source.
        test: Test samples.
        seed: Seed of the run.
    """
    rng, reserve_test_samples = purpose_generator(seed, "server"), spec.reserve_test_samples
    order = rng.permutation(len(test))
    group = None if spec.split_by is None else parse_split(spec.split_by).group
    units = None if group is None else make_units(test.columns, Split(group), len(test), rng)
    if units is not None:
        order = order[np.argsort(units.ranks[units.codes[order]], kind="stable")]
    if reserve_test_samples >= len(test):
        raise DataError(
            f"reserve_test_samples={reserve_test_samples} leaves none of the {len(test)} test samples to evaluate on."
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
            "server_data_path is given, but server does not name a data set to load from it."
            if server is None
            else f"server_data={server} takes samples of the test set; leave out server_data_path."
        )
    if server is None:
        return None, test
    if not 1 <= server < len(test):
        raise DataError(
            f"server_data={server} takes samples of the test set, which has {len(test)} and must keep some for evaluation; "
            f"use a number from 1 to {len(test) - 1}."
        )
    taken, left = (
        torch.from_numpy(np.sort(order[:server])),
        remaining_rows(order, max(server, reserve_test_samples), units),
    )
    return ServerData(take_rows(test.x, taken), test.y[taken]), test.rows(left)


def remaining_rows(order: np.ndarray, count: int, units: SplitUnits | None) -> np.ndarray:
    """Return the test rows that are left for evaluation after the first ones of an order, without rows of their groups.

    Args:
        order: Order of the test rows.
        count: Number of rows that the server receives.
        units: Groups of rows that stay together, or None.

    Raises:
        DataError: If none is left.
    """
    left = order[count:]
    if units is not None:
        left = left[~np.isin(units.codes[left], units.codes[order[:count]])]
    if not len(left):
        raise DataError(f"{count} test samples and all rows of their groups leave none to evaluate on; use fewer.")
    return np.sort(left)


def load_other_dataset(name: str, path: str | Path | None, source: Source, test: SampleTable) -> ServerData:
    """The training images of another data set, brought to the clients' size; gray ones to their channels, too.

    Args:
        name: Name of the data set.
        path: Folder of its files, or None.
        source: Source of the clients' data.
        test: Test samples.
    """
    # Decoded at the clients' size, if these have one side: larger images may not fit into memory.
    size = int(test.x.shape[2]) if test.x.dim() == 4 and test.x.shape[2] == test.x.shape[3] else None
    images = load_source(name, path=path, size=size).train
    if images.x.dim() != 4 or test.x.dim() != 4:
        raise DataError(f"The server's data set {name!r} and {source.name!r} must both hold images.")
    if images.x.dtype != test.x.dtype:
        raise DataError(
            f"The images of the server's data set {name!r} are {images.x.dtype}, those of {source.name!r} "
            f"{test.x.dtype}; bring them to one range and type first."
        )
    channels, height, width = test.x.shape[1:]
    channels = max(channels, images.x.shape[1])
    return ServerData(convert_channels(resize_images(images.x, height, width), channels), images.y, in_domain=False)


def repeat_channels(source: Source, test: SampleTable, channels: int) -> tuple[Source, SampleTable]:
    """The clients' gray images repeated, so that one model takes them and the server's in color (Zhu et al. 2025).

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
    """A generator of its own for each purpose.

    Args:
        seed: Seed of the run.
        purpose: Name of what the numbers are used for.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(f"unskew/{purpose}".encode())]))
