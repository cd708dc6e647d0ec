"""Files of predicted masks, in the size of the images."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from unskew.data.readers.images import image_bytes, open_image, upright_size
from unskew.data.readers.masks import resize_masks
from unskew.filesystem import write_atomic
from unskew.serving.input_files import InputRows


def write_masks(masks: Sequence[np.ndarray], rows: InputRows, folder: Path) -> list[str]:
    """Write a PNG file for each mask, and return their paths relative to the parent of the folder.

    Args:
        masks: Gray values, uint8 ``[H, W]`` each; they are resized to the size of their images with the nearest pixel.
        rows: Images of the masks.
        folder: Folder of the files, which is created; files with the same names are replaced.
    """
    from PIL import Image

    names = [PurePosixPath(str(name)) for name in rows.names]
    stems = Counter(name.with_suffix("") for name in names)
    written = []
    for mask, name, (_, data) in zip(masks, names, image_bytes(rows.images, "the images", rows.folder), strict=True):
        with open_image(io.BytesIO(data)) as image:
            width, height = upright_size(image)
        pixels = resize_masks(torch.from_numpy(mask)[None], (height, width))[0].numpy()
        stem = name.with_suffix("")
        file = folder / f"{stem if stems[stem] == 1 else name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG")
        write_atomic(file, png.getvalue())
        written.append(file.relative_to(folder.parent).as_posix())
    return written
