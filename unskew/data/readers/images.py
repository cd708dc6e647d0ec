"""Decoding of images to one uint8 tensor, with simplejpeg for JPEG if installed, otherwise with pillow."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.data.federation import concatenate_inputs
from unskew.data.files_read import record_file
from unskew.data.readers.arrow import pa
from unskew.data.readers.arrow_io import check_expansion
from unskew.data.readers.column_roles import is_string
from unskew.data.validation import as_inputs
from unskew.errors import DataError, explain_missing
from unskew.progress import report_progress

LOG = logging.getLogger("unskew")
JPEG = b"\xff\xd8"
MOST_PIXELS = 2**26
"""Larger JPEGs are decoded with pillow, which rejects images that would exhaust the memory."""
SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Image formats that pillow may read; for others, such as EPS, it would run another program on the file."""


def decode_column(column: Any, who: str, folder: Path | None = None, size: int | None = None) -> Tensor:
    """Decode a column of images to uint8 ``[n, C, H, W]`` in channels-last memory format.

    The result has one channel if every image is gray, otherwise three.

    Args:
        column: pyarrow column of encoded images: binary, the Hub's struct of ``bytes`` and ``path``, or strings with
            paths of image files.
        who: Name of the data, for errors.
        folder: Folder of relative paths; None means the current folder.
        size: Side length to which each image is resized; None requires that all images have the same size.

    Raises:
        DataError: If an image is missing, corrupted, gray with more than 8 bits per channel, or (without ``size``) differs
            in size from the first.
    """
    simplejpeg = optional_simplejpeg()
    out = np.empty((0, 0, 0, 0), np.uint8)
    uniform: list[str] = []
    animated: list[str] = []
    for i, (name, data) in enumerate(image_bytes(column, who, folder)):
        color = out.shape[-1] == 3
        if i % 100 == 0:
            report_progress("images read", i, len(column))
        try:
            image, has_frames = decode(data, color, simplejpeg)
        except (OSError, ValueError, SyntaxError, EOFError) as error:  # pillow raises all of them on corrupted files
            unknown = "its format is not known" if data else "the file is empty"
            reason = unknown if "cannot identify" in str(error) else error
            raise DataError(f"Image {name} cannot be decoded ({reason}). Repair or remove it.") from error
        animated += [name] if has_frames else []
        uniform += [name] if (image[0] == image[0, 0]).all() and (image == image[0, 0]).all() else []
        if size is not None:  # resize one by one: all images in original size may not fit into memory
            x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None]
            image = resize_images(x, size, size)[0].permute(1, 2, 0).numpy()
        if i == 0:
            check_expansion(who, len(column) * image.nbytes, len(column) * len(data))
            out = np.empty((len(column), *image.shape), np.uint8)
        if image.shape != out.shape[1:]:
            if image.shape[:2] != out.shape[1:3]:
                raise DataError(
                    f"Images differ in size: image {name} has {image.shape[0]} x {image.shape[1]} pixels, those before "
                    f"it have {out.shape[1]} x {out.shape[2]} (height x width). Set image_size to resize them."
                )
            out = np.repeat(out, 3, axis=-1)  # the first color image after gray ones
        out[i] = image
    for names, text in ((uniform, "have only one color"), (animated, "have several frames; the first one is read")):
        if names:
            LOG.warning("%d of %d images %s, such as image %s", len(names), len(out), text, names[0])
    if not len(out):
        raise DataError(f"There are no images in {who}.")
    return as_inputs(torch.from_numpy(out).permute(0, 3, 1, 2), who)


def decode(data: bytes, color: bool, simplejpeg: Any | None) -> tuple[np.ndarray, bool]:
    """Decode one image as a viewer shows it: upright, with 8 bits per color, and transparent pixels on white.

    Args:
        data: Content of an image file.
        color: Whether to decode gray images with three channels, too.
        simplejpeg: The simplejpeg module, or None.

    Returns:
        The image, ``[H, W, C]``, with three channels if it is in color or ``color`` is true, otherwise one; and whether
        the file has more frames or pages, which are ignored.

    Raises:
        ValueError: If the image is gray with more than 8 bits per channel.
    """
    if simplejpeg is not None and data[:2] == JPEG:
        try:
            height, width, space = simplejpeg.decode_jpeg_header(data)[:3]
            if space in ("YCbCr", "RGB", "Gray") and height * width <= MOST_PIXELS:
                wanted = "GRAY" if space == "Gray" and not color else "RGB"
                pixels = np.asarray(simplejpeg.decode_jpeg(data, colorspace=wanted))
                if b"Exif" not in data and b"tiff:Orientation" not in data:
                    return pixels, False
                with open_image(io.BytesIO(data)) as image:
                    return turn_upright(pixels, orientation(image)), False
        except ValueError:
            pass  # pillow reads more variants and describes errors in the others
    with open_image(io.BytesIO(data)) as image:
        mode = reduced_mode(image) or image.mode
        if mode.startswith(("I", "F", "LA;16")):
            raise ValueError(f"it has more than 8 bits per channel, pillow mode {mode}: convert it to 8 bits")
        has_frames = image.format != "MPO" and getattr(image, "is_animated", False)
        gray = image.mode in ("1", "L", "LA") and not color
        visible = image
        if image.has_transparency_data:
            transparent = image.convert("RGBA")
            visible = transparent.copy()
            visible.paste("white", (0, 0, *visible.size))
            visible.alpha_composite(transparent)
        pixels = np.asarray(visible.convert("L" if gray else "RGB"))
        return turn_upright(pixels[..., None] if gray else pixels, orientation(image)), has_frames


def reduced_mode(image: Any) -> str:
    """Return the mode of an image that pillow has opened if it will reduce more than 8 bits per channel to 8; else empty."""
    if image.mode.startswith(("I", "F")):
        return ""
    args = image.tile[0][3] if image.tile else ""
    if image.format == "PNG":  # gray with alpha is opened as color with alpha, so its mode is not that of the file
        return str(args) if str(args).endswith(";16B") else ""
    bits = max(image.tag_v2.get(258, (1,))) if image.format == "TIFF" else 8  # the tag BitsPerSample
    highest = args[1] if image.format == "PPM" and isinstance(args, tuple) else 255
    return image.mode if bits > 8 or highest > 255 else ""


def orientation(image: Any) -> int:
    """Return the orientation of a pillow image in its EXIF data, or 1 (upright) if pillow has applied it already."""
    try:
        return 1 if image.format == "TIFF" else int(image.getexif().get(0x0112, 1))
    except Exception:  # damaged EXIF data raise many types, and viewers ignore them
        return 1


def upright_size(image: Any) -> tuple[int, int]:
    """Return width and height of a pillow image as a viewer shows it, without decoding it."""
    # Of a PNG, EXIF data after the pixels would have to be decoded.
    turned = (image.format != "PNG" or "exif" in image.info) and orientation(image) in SIDEWAYS
    width, height = image.size
    return (height, width) if turned else (width, height)


def turn_upright(pixels: np.ndarray, turned: int) -> np.ndarray:
    """Undo the rotation and mirroring of an EXIF orientation.

    Args:
        pixels: Image, ``[H, W, C]``.
        turned: Orientation from 1 to 8.
    """
    if turned in SIDEWAYS:
        pixels = pixels.transpose(1, 0, 2)
    if turned in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels[::-1] if turned in (3, 4, 7, 8) else pixels


@contextmanager
def open_image(file: Path | io.BytesIO) -> Iterator[Any]:
    """Context manager that opens an image with pillow.

    Args:
        file: File, or its content.

    Yields:
        The image.

    Raises:
        DataError: If pillow is missing.
        ValueError: If the image has so many pixels that pillow would warn: a small file can exhaust the memory.
    """
    with explain_missing("Decoding images requires the package pillow: pip install 'unskew[hub]'.", DataError):
        from PIL import Image
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"it has too many pixels, more than {Image.MAX_IMAGE_PIXELS}: make it smaller") from error


def image_bytes(column: Any, who: str, folder: Path | None = None) -> Iterator[tuple[str, bytes]]:
    """Iterate over the encoded bytes of each image, from the column itself or from the files that it names.

    Args:
        column: pyarrow column of encoded images or of file names.
        who: Name of the data, for errors.
        folder: Folder of the files, or None.

    Yields:
        Name of each image (its file, or row and data) and its encoded bytes.
    """
    text = is_string(column.type)
    if not is_image(column.type) and not text:
        raise DataError(
            f"The image column of {who} has type {column.type}. It must contain encoded images (PNG or JPEG) or file "
            "names."
        )
    for row, scalar in enumerate(column):
        value = scalar.as_py()
        fields = value if isinstance(value, dict) else {"path" if text else "bytes": value}
        data, path = fields.get("bytes"), fields.get("path")
        name = f"{row} of {who}" + (f" ({path})" if path else "")
        if data is None:
            file = None if path is None else (folder or Path()) / path
            if file is None or not file.is_file():
                raise DataError(f"An image of {who} is missing: it has no bytes and no file ({file}).")
            record_file(file)
            name, data = str(file), file.read_bytes()
        yield name, data


def is_image(kind: Any) -> bool:
    """Return whether a pyarrow type is that of encoded images: bytes, or the Hub's struct of bytes and path."""
    return is_binary(kind) or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def is_binary(kind: Any) -> bool:
    """Return whether a pyarrow type is binary."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def optional_simplejpeg() -> Any | None:
    """Return the simplejpeg module, or None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def convert_channels(x: Tensor, channels: int) -> Tensor:
    """Convert images to a number of channels: gray is repeated, color becomes luminance.

    Args:
        x: Images, ``[n, C, H, W]``.
        channels: Number of channels of the result, 1 or 3.

    >>> convert_channels(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), 3).shape
    torch.Size([2, 3, 4, 4])
    """
    if x.shape[1] == channels:
        return x
    if channels == 1:
        weights = torch.tensor([0.299, 0.587, 0.114])
        parts = [(part[:, :3].permute(0, 2, 3, 1).float() @ weights).round().to(x.dtype) for part in sample_chunks(x)]
        return torch.cat(parts)[:, None]
    gray = convert_channels(x, 1)
    return gray.permute(0, 2, 3, 1).expand(-1, -1, -1, channels).contiguous().permute(0, 3, 1, 2)


def sample_chunks(x: Tensor, size: int = 2048) -> Iterator[Tensor]:
    """Iterate over samples in chunks, so that a large uint8 array is never converted to float all at once.

    Args:
        x: Samples, ``[n, ...]``.
        size: Maximum number of samples in a chunk.
    """
    return (x[i : i + size] for i in range(0, len(x), size))


def resize_images(x: Tensor, height: int, width: int) -> Tensor:
    """Resize images bilinearly, with antialiasing; uint8 stays uint8.

    Args:
        x: Images, ``[n, C, H, W]``.
        height: New height in pixels.
        width: New width in pixels.
    """
    if x.shape[2:] == (height, width):
        return x

    def resized(part: Tensor) -> Tensor:
        values = F.interpolate(part.float(), (height, width), mode="bilinear", antialias=True, align_corners=False)
        return values.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else values

    return concatenate_inputs([resized(part) for part in sample_chunks(x)])
