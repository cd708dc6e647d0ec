"""Generated images next to real images of the same clients, if the data of the run are available."""

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
from unskew.data.spec import DataSpec
from unskew.errors import UnskewError
from unskew.generators import synthetic_dataset
from unskew.generators.synthetic_dataset import SyntheticSet
from unskew.reporting.run_description import synthetic_folders
from unskew.reporting.run_groups import MethodRuns
from unskew.reporting.run_reader import RunFiles

CLASSES = 6
IMAGES = 4
SIDE = 32
"""Maximum number of classes of a client, of images of each, and of pixels per side."""


@dataclass(frozen=True)
class ImageRow:
    """Real and generated images of one class, each as a strip in a data URI."""

    name: str
    real: str
    made: str


def synthetic_and_real(one: MethodRuns) -> tuple[str, list[ImageRow]] | None:
    """Return a client and its rows, of the first run whose synthetic set and data are available; otherwise None."""
    for run in one.runs:
        images_found = _at_hand(run)
        if images_found is not None and len(images_found[0].y):
            images, federation = images_found
            client = images.makers[0]
            return f"{federation.client_label(client)}, seed {run.summary['seed']}", _rows(images, federation, client)
    return None


def _at_hand(run: RunFiles) -> tuple[SyntheticSet, Federation] | None:
    """Load a run's synthetic set and original data, without network access and without code named by the folder."""
    folders = [folder for folder in synthetic_folders(run) if (folder / synthetic_dataset.ABOUT).is_file()]
    folder = folders[0] if folders else None
    federation = None if folder is None else federation_at_hand(run)
    if folder is None or federation is None:
        return None
    try:
        dataset = synthetic_dataset.load(folder)
    except (UnskewError, OSError):
        return None
    images = federation.test[0].dtype == torch.uint8 and tuple(dataset.x.shape[1:]) == tuple(federation.shape)
    known = (
        len(dataset.y) > 0
        and int(dataset.y.max()) < federation.classes
        and max(dataset.makers) < len(federation.clients)
    )
    return (dataset, federation) if images and known else None


def federation_at_hand(run: RunFiles) -> Federation | None:
    """Load a run's data, without network access and without code named by the folder; None if they are not available.

    Args:
        run: Files of the run.
    """
    if "://" in str(run.config.get("data")) + str(run.config.get("data_path")):
        return None
    try:
        with from_cache():
            names = {*DataSpec.model_fields, "seed"}
            config = experiment({name: value for name, value in run.config.items() if name in names})
            federation = federation_of(config.data_spec, config.seed)
    except (UnskewError, OSError, ImportError):
        return None
    same = federation.fingerprint == run.summary["partition_hash"] and federation.name == run.summary["data"]
    return federation if same else None


def _rows(made: SyntheticSet, federation: Federation, client: int) -> list[ImageRow]:
    """Return a row for each of the classes of which the client generated most, in the order of classes."""
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
    """Return images ``[n, C, H, W]`` side by side as a data URI; empty if there are none."""
    if not len(images):
        return ""
    images = resize_images(images, SIDE, SIDE) if max(images.shape[2:]) > SIDE else images
    separated = [
        np.pad(image, ((0, 0), (0, 1), (0, 0)), constant_values=255) for image in images.permute(0, 2, 3, 1).numpy()
    ]
    pixels = np.concatenate(separated, axis=1)[:, :-1]
    return image_address(pixels, "png" if pixels.shape[2] == 1 else "jpeg")


def image_address(pixels: np.ndarray, kind: str = "png") -> str:
    """Return an image as a data URI.

    Args:
        pixels: uint8 ``[H, W, C]`` with one or three channels.
        kind: ``png`` or ``jpeg``.
    """
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, kind)
    return f"data:image/{kind};base64," + base64.b64encode(out.getvalue()).decode()
