"""Fields of a configuration for images: their size, and the classes of masks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from unskew.config.inference.inferred_config import InferredConfig
from unskew.data.readers.images import open_image, upright_size
from unskew.data.readers.masks import decode_mask, image_mask_folders
from unskew.errors import DataError
from unskew.expressions import quote
from unskew.tasks.segmentation import Segmentation

SIDE, KEPT_SIDE = 32, 64
"""Images are resized to the first side length, unless all have the same size of at most the second."""
MOST_LEVELS = 20
"""Maximum number of gray values of masks that are taken for classes; more come from compression."""


def set_mask_fields(inferred: InferredConfig, path: Path, data: str, clients: str | None) -> None:
    """Set fields for folders of images and masks.

    Args:
        inferred: Configuration to complete.
        path: Folder in the layout of ``image_mask_folders``.
        data: Name of this folder, as the user wrote it.
        clients: Column that names the clients, ``site`` or ``name``; None means the sites, if there are several.

    Raises:
        DataError: If the folders are not complete, or a file cannot be read.
    """
    pairs = image_mask_folders(path)
    images, masks = ([file for files in pairs.values() for file in files[side]] for side in (0, 1))
    sites = sorted({site for site, _ in pairs} - {""})
    where = f" of {len(sites)} sites: {', '.join(sites)}" if sites else ""
    inferred.seen.append(f"a segmentation: {len(images)} images with masks{where}")
    inferred.set("data", f"masks:{data}", "folders images and masks")
    set_image_size(inferred, images)
    owner = clients or ("site" if len(sites) > 1 else None)
    if owner is not None:
        inferred.set("partition", f"natural:{quote(owner)}", f"one client per {owner}")
    else:
        inferred.set("partition", "iid", "there are no folders of several sites; sorted:foreground is a skew")
        inferred.set("clients", max(2, min(10, len(images) // 20)))
    set_segmentation(inferred, ((file.name, file.read_bytes()) for file in masks))


def set_segmentation(inferred: InferredConfig, masks: Iterable[tuple[str, bytes]]) -> None:
    """Set model and optimizer of a segmentation, and the gray values of its classes if they are not the default.

    Args:
        inferred: Configuration to complete.
        masks: Name and content of each mask.

    Raises:
        DataError: If a mask cannot be read.
    """
    levels: set[int] = set()
    for name, content in masks:
        try:
            levels |= {*np.unique(decode_mask(content)).tolist()}
        except (OSError, ValueError, SyntaxError, EOFError) as error:  # pillow raises all of them on corrupted files
            raise DataError(f"Mask {name} cannot be used ({error}). Repair or remove it.") from error
    values = sorted(levels)
    try:
        classes = Segmentation().described(levels).class_names
    except DataError:
        if len(levels) > MOST_LEVELS:
            raise
        classes = tuple(map(str, values))
        inferred.set("segmentation", {"values": values}, "gray value of each class; classes: [NAME, ...] names them")
    inferred.seen.append(
        f"gray values of the masks: {', '.join(map(str, values))}, for the classes {', '.join(classes)}"
    )
    inferred.set("model", "unet", "for segmentation")
    inferred.set("optimizer", "adam")


def set_image_size(inferred: InferredConfig, images: Sequence[Path | io.BytesIO]) -> None:
    """Set the image size, unless all images have the same small size.

    Args:
        inferred: Configuration to complete.
        images: Files, or their contents.
    """
    sizes = set()
    for image in images:
        try:
            with open_image(image) as opened:
                sizes.add(upright_size(opened))
        except (OSError, ValueError, SyntaxError) as error:
            name = f"The image {image}" if isinstance(image, Path) else "An image of the table"
            raise DataError(f"{name} cannot be read ({error}). Repair or remove it.") from error
    if len(sizes) == 1 and max(width_height := sizes.pop()) <= KEPT_SIDE:
        inferred.seen.append("all images have {} x {} pixels, so image_size is not set".format(*width_height))
    else:
        inferred.set("image_size", SIDE, "images are resized to this side length; larger images take longer")
