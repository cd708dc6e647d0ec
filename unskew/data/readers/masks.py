"""Masks of segmentation: folders of images and masks, decoding of mask files, and classes by gray value."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.data.readers.arrow import pa
from unskew.data.readers.arrow_io import check_expansion
from unskew.data.readers.image_folders import (
    LOG,
    SPLITS,
    check_split_names,
    is_hidden,
    is_image_file,
    path_column,
    visible_files,
)
from unskew.data.readers.images import image_bytes, open_image, orientation, reduced_mode, turn_upright, upright_size
from unskew.data.validation import as_tensor
from unskew.errors import DataError, abbreviate
from unskew.tasks.base import OUTSIDE
from unskew.tasks.segmentation import Segmentation, pixel_shares

IMAGES, MASKS = "images", "masks"
"""Names of the folders with images and with their masks, and of the columns ``image`` and ``mask`` in the singular."""
PARTS = ("train", "test")
LAYOUT = "[SITE/][train|test/]images/NAME.* and masks/NAME.* with the same names"
FEW = 5


def image_mask_folders(path: Path) -> dict[tuple[str, str], tuple[list[Path], list[Path]]]:
    """Return the image files and the mask files of each pair of folders ``images`` and ``masks``.

    Args:
        path: Folder in the layout ``[SITE/][train|test/]images/NAME.*`` and ``masks/NAME.*``.

    Returns:
        Files by site, empty without one, and part, ``train`` or ``test``.

    Raises:
        DataError: If the folder has no images, a folder ``images`` has no folder ``masks`` next to it, a site has training
            images in two folders, or the folder of the training images has another name than ``train``.
    """
    pairs: dict[tuple[str, str], tuple[list[Path], list[Path]]] = {}
    unread: dict[str, list[str]] = defaultdict(list)
    found = sorted(folder for depth in ("", "*/", "*/*/") for folder in path.glob(f"{depth}{IMAGES}"))
    check_parts(path, found)
    for images in found:
        sites = [*images.parent.relative_to(path).parts]
        part = sites.pop() if sites and sites[-1] in PARTS else "train"
        if len(sites) > 1 or any(is_hidden(name) or name.lower() in SPLITS for name in sites):
            other = sites[-1].lower() in SPLITS and sites[-1] not in PARTS
            reason = "neither train nor test" if other else f"neither SITE/{IMAGES} nor SITE/train/{IMAGES}"
            unread[reason].append(str(images.relative_to(path)))
            continue
        folders = (images, images.with_name(MASKS))
        if not folders[1].is_dir():
            raise DataError(f"{images.parent} has a folder {IMAGES}, but no folder {MASKS}. Expected {LAYOUT}.")
        first, second = ([file for file in visible_files(folder) if is_image_file(file)] for folder in folders)
        site = "".join(sites)
        if (site, part) in pairs:
            raise DataError(
                f"{path / site / IMAGES} and {images} both have training images. Move them, with their masks, into one of "
                "these folders."
            )
        pairs[site, part] = first, second
    for reason, names in unread.items():
        LOG.warning("%s: not read, because %s: %s", path, reason, abbreviate(names))
    if not any(files[0] for files in pairs.values()):
        raise DataError(f"{path} has no images. Expected {LAYOUT}.")
    return pairs


def check_parts(path: Path, found: Sequence[Path]) -> None:
    """Validate that folders such as ``Train`` and ``val`` are next to training images.

    Args:
        path: Folder of the data set.
        found: Its folders ``images``.

    Raises:
        DataError: If they are not.
    """
    names: dict[Path, dict[str, None]] = defaultdict(dict)
    for images in found:
        for folder in (images.parent, *images.parent.parents):
            if folder == path:
                break
            names[folder.parent][folder.name] = None
    for parent, parts in names.items():
        alone = parent / IMAGES not in found and all(name.lower() in SPLITS for name in parts)
        if alone and not {*parts} <= {*PARTS}:
            check_split_names(parent, [*parts])


def has_masks(path: Path) -> bool:
    """Return whether a folder has folders ``masks`` next to folders ``images``, as in ``image_mask_folders``."""
    found = (folder for depth in ("", "*/", "*/*/") for folder in path.glob(f"{depth}{MASKS}"))
    return any(folder.is_dir() and folder.with_name(IMAGES).is_dir() for folder in found)


def mask_tables(path: Path) -> tuple[Any, Any | None]:
    """Return tables with the columns ``image``, ``mask``, ``name`` and, if there are sites, ``site``.

    Masks are paired with images by the name without its suffix. If the names of a folder end in the same text, such as
    ``_manual1`` or ``_training``, pairs are formed without it.

    Args:
        path: Folder with images and masks, see ``image_mask_folders``.

    Raises:
        DataError: If an image has no mask, or a mask no image.
    """
    pairs = image_mask_folders(path)
    stems = [[file.stem for files in pairs.values() for file in files[side]] for side in (0, 1)]
    everywhere = [common_ending(names) for names in stems]
    rows: dict[str, list[tuple[Path, Path, str, str]]] = defaultdict(list)
    alone: list[str] = []
    left_out: dict[tuple[str, str], None] = {}
    for (site, part), sides in pairs.items():
        images, masks = ([file.stem for file in files] for files in sides)
        ends = best_endings(images, masks, everywhere)
        left_out |= {(what, end): None for what, end in zip((IMAGES, MASKS), ends, strict=True) if end}
        first, second = (
            {file.stem.removesuffix(end): file for file in files} for files, end in zip(sides, ends, strict=True)
        )
        for files, known in zip(sides, (first, second), strict=True):
            if twice := next((file for file in files if file not in known.values()), None):
                raise DataError(f"{twice.parent} has several files with the name of {twice.name}. Remove all but one.")
        alone += [
            str(file.relative_to(path))
            for name, file in (*first.items(), *second.items())
            if name not in first or name not in second
        ]
        rows[part] += [(first[name], second[name], name, site) for name in sorted(first.keys() & second.keys())]
    if alone:
        raise DataError(
            f"{path}: {len(alone)} images without a mask or masks without an image: {abbreviate(alone, FEW)}."
        )
    for what, end in left_out:
        LOG.warning("%s: the names of %s end in %s, which is left out to pair them", path, what, end)

    def table(own: list[tuple[Path, Path, str, str]]) -> Any:
        columns = {"image": path_column(row[0] for row in own), "mask": path_column(row[1] for row in own)}
        names = {"name": [row[2] for row in own], "site": [row[3] for row in own]}
        return pa.table({**columns, **{column: path_column(values) for column, values in names.items() if any(values)}})

    if not rows["train"]:
        return table(rows["test"]), None
    return table(rows["train"]), table(rows["test"]) if rows["test"] else None


def best_endings(images: Sequence[str], masks: Sequence[str], everywhere: Sequence[str]) -> list[str]:
    """Return the ends of names of images and of masks without which most of a folder's names are equal.

    Args:
        images: Names of the images of a folder.
        masks: Names of the masks.
        everywhere: Common ends of the images and of the masks of all folders, for folders with a single file.
    """
    possible = [
        dict.fromkeys(("", end, common_ending(names))) for names, end in zip((images, masks), everywhere, strict=True)
    ]
    return max(
        ([first, second] for first in possible[0] for second in possible[1]),
        key=lambda ends: len({s.removesuffix(ends[0]) for s in images} & {s.removesuffix(ends[1]) for s in masks}),
    )


def common_ending(names: Sequence[str]) -> str:
    """Return the longest common end of several names that begins with a separator.

    >>> common_ending(["01_manual1", "02_manual1"]), common_ending(["a1", "b1"])
    ('_manual1', '')
    """
    if len(names) < 2:
        return ""
    first = names[0]
    starts = (index for index, letter in enumerate(first) if letter in "_-. ")
    return next((end for end in (first[start:] for start in starts) if all(name.endswith(end) for name in names)), "")


def decode_masks(
    masks: Any, images: Any, who: str, folder: Path | None = None, size: int | None = None
) -> tuple[Tensor, list[str]]:
    """Decode a column of masks to gray values, uint8 ``[n, H, W]``, and return the name of each.

    Args:
        masks: pyarrow column of encoded masks, as in ``decode_column``.
        images: Column of their images, whose sizes must be the same.
        who: Name of the data, for errors.
        folder: Folder of relative paths; None means the current folder.
        size: Side length to which masks are resized, with the nearest pixel.

    Raises:
        DataError: If a mask cannot be decoded, is in color, or has another size than its image.
    """
    out: list[Tensor] = []
    names = []
    encoded = zip(image_bytes(masks, who, folder), image_bytes(images, who, folder), strict=True)
    for (name, data), (image_name, image_data) in encoded:
        try:
            mask = decode_mask(data)
            with open_image(io.BytesIO(image_data)) as image:
                width, height = upright_size(image)
        except (OSError, ValueError, SyntaxError, EOFError) as error:  # pillow raises all of them on corrupted files
            raise DataError(f"Mask {name} cannot be used ({error}). Repair or remove it.") from error
        if mask.shape != (height, width):
            raise DataError(
                f"Mask {name} has {mask.shape[0]} x {mask.shape[1]} pixels, but its image {image_name} has {height} x "
                f"{width} (height x width)."
            )
        if not out:
            check_expansion(who, len(masks) * mask.nbytes, len(masks) * len(data))
        out.append(resize_masks(torch.from_numpy(mask)[None], (size, size) if size else mask.shape)[0])
        names.append(name)
    different = next((name for name, mask in zip(names, out, strict=True) if mask.shape != out[0].shape), None)
    if different is not None:
        raise DataError(f"Masks differ in size: mask {different} and mask {names[0]}. Set image_size to resize them.")
    return torch.stack(out), names


def decode_mask(data: bytes) -> np.ndarray:
    """Decode one mask to gray values, uint8 ``[H, W]``.

    Args:
        data: Content of an image file. Palettes in color stand for their indices, as in Pascal VOC. The palette decides,
            not its colors that occur, so that all masks with the same palette are decoded alike.

    Raises:
        ValueError: If the mask has several values per pixel, values above 255 or that are not whole numbers, or more than
            8 bits per channel next to other channels.
    """
    with open_image(io.BytesIO(data)) as image:
        if mode := reduced_mode(image):
            raise ValueError(f"it has more than 8 bits per channel, pillow mode {mode}: save it as gray without alpha")
        pixels = np.asarray(image)
        if image.mode == "P":
            colors = np.array(image.getpalette(), np.uint8).reshape(-1, 3)
            pixels = np.asarray(image.convert("RGB"))[..., 0] if _is_gray(colors) and colors.any() else pixels
        elif image.mode == "1":
            pixels = pixels.astype(np.uint8) * OUTSIDE
        elif image.mode in ("RGB", "RGBA", "LA"):
            if image.mode != "LA" and not _is_gray(pixels):
                raise ValueError("it is in color, but a mask has one gray value per class")
            pixels = pixels[..., 0]
        if pixels.dtype.kind == "f" and not (pixels == np.floor(pixels)).all():
            raise ValueError(
                "it has values that are missing or not whole numbers, but a mask has one gray value per class"
            )
        if pixels.ndim != 2 or pixels.dtype == bool or pixels.min() < 0 or pixels.max() > OUTSIDE:
            raise ValueError(f"it has more than 8 bits per pixel, pillow mode {image.mode}")
        return np.ascontiguousarray(turn_upright(pixels[..., None], orientation(image))[..., 0].astype(np.uint8))


def _is_gray(pixels: np.ndarray) -> bool:
    return bool((pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all())


def resize_masks(y: Tensor, sides: Sequence[int]) -> Tensor:
    """Resize masks with the nearest pixel.

    Args:
        y: Masks, uint8 ``[n, H, W]``.
        sides: New height and width in pixels.
    """
    if tuple(y.shape[1:]) == tuple(sides):
        return y
    return F.interpolate(y[:, None].float(), tuple(sides), mode="nearest-exact")[:, 0].to(y.dtype)


def gray_values(values: object, who: str) -> Tensor:
    """Return masks in an array as gray values, uint8 ``[n, *sides]``.

    Args:
        values: Array or tensor of whole numbers from 0 to 255.
        who: Name of the data, for errors.

    Raises:
        DataError: If a value is not such a number.
    """
    y = as_tensor(values, f"The masks of {who} are not numeric")
    if y.numel() and not bool(((y >= 0) & (y <= OUTSIDE) & (y == y.to(torch.int64))).all()):
        raise DataError(f"The masks of {who} must be whole numbers from 0 to {OUTSIDE}, one gray value per class.")
    return y.to(torch.uint8)


def classes_of_masks(
    parts: Mapping[str, Tensor], task: Segmentation, name_of: Callable[[str, int], str], several: bool = True
) -> tuple[list[Tensor], Segmentation]:
    """Replace the gray values of masks by classes.

    Args:
        parts: Gray values of the masks of each part, uint8 ``[n, *sides]``, by the name of the part.
        task: Task with the configured classes and values; what is not configured comes from the masks.
        name_of: Returns the name of a mask, given the name of its part and its row.
        several: Whether at least two classes must occur if the configuration does not determine classes and values.

    Returns:
        Classes of the pixels of each part, ``OUTSIDE`` for ignored pixels, and the task with its classes and values.

    Raises:
        DataError: If a mask has a value that is not listed, or all pixels have the same class, which is not configured.
    """
    levels = {level for y in parts.values() for level in torch.unique(y).tolist()}
    # Masks of value 0 alone do not tell whether two classes are 0 and 1, or 0 and 255.
    known = bool(task.values) or len(task.class_names) > (2 if levels - {task.ignore} == {0} else 1)
    task = task.described(levels)
    table = torch.full((OUTSIDE + 1,), -1, dtype=torch.int16)
    table[list(task.values)] = torch.arange(len(task.values), dtype=torch.int16)
    if task.ignore is not None:
        table[task.ignore] = OUTSIDE
    found = []
    for part, y in parts.items():
        classes = table[y.long()]
        unlisted = torch.nonzero((classes < 0).flatten(1).any(1))[:, 0].tolist()
        if unlisted:
            value = int(y[unlisted[0]][classes[unlisted[0]] < 0][0])
            raise DataError(
                f"The mask {name_of(part, unlisted[0])} has pixels with the gray value {value}, but the classes have "
                f"{', '.join(map(str, task.values))}. Add it to segmentation.values or segmentation.ignore, or repair the "
                "mask; JPEG files change gray values."
            )
        classes = classes.to(torch.uint8)
        empty = torch.nonzero((classes == OUTSIDE).flatten(1).all(1))[:, 0].tolist()
        if empty:
            raise DataError(f"The mask {name_of(part, empty[0])} has only ignored pixels. Remove it and its image.")
        found.append(classes)
    if several and not known and len({c for y in found for c in torch.unique(y).tolist()} - {OUTSIDE}) < 2:
        raise DataError(
            f"All pixels of the masks of {next(iter(parts))} have the same class; there is nothing to learn. If other "
            "sites have more classes, set segmentation.classes and segmentation.values."
        )
    return found, task


def mask_columns(y: Tensor, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return columns by which masks can be partitioned: ``main_class`` and ``foreground``.

    The main class of an image is the foreground class with most of its pixels, or the background if there is none; the
    foreground is the share of all foreground classes in the pixels with truth.

    Args:
        y: Class of each pixel, ``[n, *sides]``.
        names: Names of the classes.
    """
    shares = pixel_shares(y, len(names)).numpy()
    foreground = shares[:, 1:].sum(1)
    main = np.where(foreground > 0, 1 + shares[:, 1:].argmax(1), 0)
    return {"main_class": np.array(names)[main], "foreground": foreground}
