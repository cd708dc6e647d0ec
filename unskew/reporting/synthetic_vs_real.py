"""Generated data next to real images of the same clients, if the data of the run are available."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unskew.config.loader import experiment
from unskew.data.clients import take_rows
from unskew.data.federation import Federation
from unskew.data.load import federation_of
from unskew.data.readers.hub import from_cache
from unskew.data.readers.images import resize_images
from unskew.errors import UnskewError
from unskew.generators import synthetic_dataset
from unskew.generators.synthetic_dataset import SyntheticSet
from unskew.reporting.run_description import synthetic_folders
from unskew.reporting.run_groups import MethodRuns
from unskew.reporting.run_reader import RunFiles

CLASSES, IMAGES, SIDE = 6, 4, 32
"""Classes of one client, images of each, and the largest side of one: a page has room for a few."""


@dataclass(frozen=True)
class ImageRow:
    """Images of one class as data addresses, each a strip of some: real ones, and those that the client made."""

    name: str
    real: str
    made: str


def synthetic_and_real(one: MethodRuns) -> tuple[str, list[ImageRow]] | None:
    """A client and its rows, of the first run whose synthetic set and data are both at hand; None if there is none."""
    for run in one.runs:
        images_found = _at_hand(run)
        if images_found is not None and len(images_found[0].y):
            images, federation = images_found
            client = images.makers[0]
            return f"{federation.client_label(client)}, seed {run.summary['seed']}", _rows(images, federation, client)
    return None


def _at_hand(run: RunFiles) -> tuple[SyntheticSet, Federation] | None:
    """The synthetic set of a run and the data it was made from, without a network and without code that the folder names."""
    folder = next(
        (
            images_folder
            for images_folder in synthetic_folders(run)
            if (images_folder / synthetic_dataset.ABOUT).is_file()
        ),
        None,
    )
    if folder is None or "://" in str(run.config.get("data")) + str(run.config.get("data_path")):
        return None
    try:
        with from_cache():
            config = experiment(run.config)
            federation = federation_of(config.data_spec, config.seed)
        dataset = synthetic_dataset.load(folder)
    except (UnskewError, OSError, ImportError):
        return None
    same = federation.fingerprint == run.summary["partition_hash"] and federation.name == run.summary["data"]
    images = federation.test[0].dtype == torch.uint8 and tuple(dataset.x.shape[1:]) == tuple(federation.shape)
    known = (
        len(dataset.y) > 0
        and int(dataset.y.max()) < federation.classes
        and max(dataset.makers) < len(federation.clients)
    )
    return (dataset, federation) if same and images and known else None


def _rows(made: SyntheticSet, federation: Federation, client: int) -> list[ImageRow]:
    """A row for each of the classes of which the client made most, in their order."""
    own = federation.clients[client]
    labels = made.y[made.source == client]
    counts = torch.bincount(labels, minlength=federation.classes)
    most = sorted(counts.argsort(descending=True, stable=True)[:CLASSES].tolist())
    rows = []
    for k in (k for k in most if counts[k]):
        real = take_rows(own.x, (own.y == k).nonzero().flatten()[:IMAGES])
        own_images = take_rows(made.x, ((made.source == client) & (made.y == k)).nonzero().flatten()[:IMAGES])
        rows.append(ImageRow(federation.names[k], _strip(real), _strip(own_images)))
    return rows


def _strip(images: Tensor) -> str:
    """Images ``[n, C, H, W]`` side by side, as a data address; empty if there are none."""
    from PIL import Image

    if not len(images):
        return ""
    images = resize_images(images, SIDE, SIDE) if max(images.shape[2:]) > SIDE else images
    apart = [
        np.pad(image, ((0, 0), (0, 1), (0, 0)), constant_values=255) for image in images.permute(0, 2, 3, 1).numpy()
    ]
    pixels = np.concatenate(apart, axis=1)[:, :-1]
    out = io.BytesIO()
    kind = "png" if pixels.shape[2] == 1 else "jpeg"
    Image.fromarray(pixels[..., 0] if kind == "png" else pixels).save(out, kind)
    return f"data:image/{kind};base64," + base64.b64encode(out.getvalue()).decode()
