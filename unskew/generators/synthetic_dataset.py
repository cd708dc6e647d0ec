"""Synthetic data set: images that clients generated, stored in a folder.

The folder has the format of a Hugging Face data set: ``data/train-00000-of-00001.parquet`` with the columns ``image`` (as
PNG, which is lossless), ``label`` and ``client`` (the client that generated it), and a README.md that names the file. Both
``datasets.load_dataset(folder)`` and ``unskew`` can read it. ``synthetic.json`` describes how the set was generated. The
cache of ``datasets`` identifies a folder only by its name and the name of its configuration, so the configuration is named
after a hash of the images.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.data.readers.images import decode_column
from unskew.errors import ConfigError, DataError
from unskew.filesystem import check_regular, disk_errors, read_json, write_atomic

PARQUET = "data/train-00000-of-00001.parquet"
ABOUT = "synthetic.json"
CARD = """---
configs:
- config_name: "{digest}"
  data_files:
  - split: train
    path: {path}
---
{total} images that {clients} clients of a federation generated, each with a generator trained on its own data.
{about} describes how they were generated.
"""


@dataclass(frozen=True)
class SyntheticSet:
    """Labeled images with the clients that generated them.

    Attributes:
        x: Images, uint8 ``[M, C, H, W]`` with channels-last memory.
        y: Class of each image, ``[M]``.
        source: Client of each image, ``[M]``, ascending.
        about: Metadata of the generation, as JSON values.
    """

    x: Tensor
    y: Tensor
    source: Tensor
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def makers(self) -> list[int]:
        """Clients that generated images, ascending."""
        return sorted(set(self.source.tolist()))

    @property
    def digest(self) -> str:
        """Hash of pixels, labels and sources, 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for t in (self.x.permute(0, 2, 3, 1), self.y, self.source):
            digest.update(t.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def check_can_store() -> None:
    """Validate, before training, that the libraries for storing a set are installed (raises ``ConfigError``)."""
    try:
        import PIL.Image  # noqa: F401
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError("Storing synthetic images needs pyarrow and pillow: pip install 'unskew[hub]'.") from error


def save(folder: Path, images: SyntheticSet, classes: int, class_names: Sequence[str]) -> None:
    """Write a set to a folder; ``synthetic.json`` is written last, so its presence marks a complete set.

    Args:
        folder: Folder to write.
        images: Generated images of all clients.
        classes: Number of classes.
        class_names: Names of the classes.

    Raises:
        CheckpointError: If the disk is full.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    def png(image: np.ndarray) -> bytes:
        out = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(out, "png")
        return out.getvalue()

    pixels = images.x.permute(0, 2, 3, 1).contiguous().numpy()
    names = [str(name) for name in class_names] or [str(number) for number in range(classes)]
    # Metadata by which the library datasets recognizes images and class names.
    features = {
        "image": {"_type": "Image"},
        "label": {"names": names, "_type": "ClassLabel"},
        "client": {"dtype": "int64", "_type": "Value"},
    }
    image = pa.array(
        [{"bytes": png(pixel_image), "path": f"{number}.png"} for number, pixel_image in enumerate(pixels)],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table({"image": image, "label": images.y.numpy(), "client": images.source.numpy()})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    out = io.BytesIO()
    pq.write_table(table, out)
    clients = len(images.makers)
    with disk_errors(folder):
        (folder / "data").mkdir(parents=True, exist_ok=True)
    write_atomic(folder / PARQUET, out.getvalue())
    about = {**images.about, "digest": images.digest}
    card = CARD.format(digest=images.digest, path=PARQUET, total=len(images.y), clients=clients, about=ABOUT)
    write_atomic(folder / "README.md", card.encode())
    write_atomic(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())


def find(place: Path) -> Path:
    """Return the folder of a set, from its own path or the folder of the run that generated it.

    Args:
        place: Folder of the set, or run folder.

    Raises:
        ConfigError: If there is no synthetic set.
    """
    for folder in (place, place / "synthetic"):
        if (folder / ABOUT).is_file():
            return folder
    summary = place / "summary.json"
    if summary.is_file():
        try:
            folder = read_json(summary).get("synthetic")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{summary} is corrupted; remove it and resume the run.") from error
        if folder is not None and (Path(folder) / ABOUT).is_file():
            return Path(folder)
    raise ConfigError(f"synthetic={str(place)!r} is neither a finished synthetic set nor a run folder with one.")


def load(folder: Path) -> SyntheticSet:
    """Load a set that ``save`` wrote.

    Args:
        folder: Folder of the set.

    Raises:
        DataError: If a file is missing or corrupted.
    """
    import pyarrow.parquet as pq

    try:
        about = read_json(folder / ABOUT)
        check_regular(folder / PARQUET)
        table = pq.read_table(folder / PARQUET)
        y, source = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("label", "client"))
        x = decode_column(table["image"], f"the synthetic set in {folder}")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"The synthetic set in {folder} cannot be read ({error}).") from error
    images = SyntheticSet(x, y.to(torch.int64), source.to(torch.int64), about)
    if not isinstance(about, dict) or images.digest != about.get("digest"):
        raise DataError(
            f"The synthetic set in {folder} is corrupted: its content does not match the digest in {ABOUT}."
        )
    return images


def remove_work_folder(folder: Path, name: str) -> None:
    """Remove a folder of intermediate files.

    Args:
        folder: Folder of the data set.
        name: Name of the folder to remove.
    """
    shutil.rmtree(folder / name, ignore_errors=True)
