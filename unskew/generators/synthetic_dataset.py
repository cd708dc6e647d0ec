"""A set of images that clients made: kept in a folder, read back, and checked against a federation.

The folder is a data set as the Hugging Face hub has them: ``data/train-00000-of-00001.parquet`` with the columns ``image``
(PNG, so nothing is lost), ``label`` and ``client`` (who made it), and a README.md that names the file. So
``datasets.load_dataset(folder)`` reads it, and ``unskew`` itself. ``synthetic.json`` says how it was made. The cache of that
library tells folders apart by their own name and the configuration's alone, so the configuration is named by the images.
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
Images that the clients of a federation made with generators trained on their own data: {total} images of {clients} clients.
How they were made is in {about}.
"""


@dataclass(frozen=True)
class SyntheticSet:
    """Labeled images and who made them.

    Attributes:
        x: ``[M, C, H, W]``, uint8 over channels-last memory; ``y``: classes ``[M]``; ``source``: clients ``[M]``, ascending.
        about: How it was made; JSON.
    """

    x: Tensor
    y: Tensor
    source: Tensor
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def makers(self) -> list[int]:
        """The clients that made something, ascending."""
        return sorted(set(self.source.tolist()))

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with any pixel, label or source."""
        digest = hashlib.sha256()
        for t in (self.x.permute(0, 2, 3, 1), self.y, self.source):
            digest.update(t.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def check_can_store() -> None:
    """Refuse, before anything is trained, to make what cannot be kept.

    Raises:
        ConfigError: A library is missing.
    """
    try:
        import PIL.Image  # noqa: F401
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Keeping the synthetic images needs pyarrow and pillow: pip install 'unskew[hub]'."
        ) from error


def save(folder: Path, images: SyntheticSet, classes: int, class_names: Sequence[str]) -> None:
    """Write ``images`` into ``folder``; ``synthetic.json`` comes last, so a folder that has it is whole.

    Args:
        folder: Folder to write.
        images: Generated images of all clients.
        classes: Number of classes.
        class_names: Names of the classes.

    Raises:
        CheckpointError: The disk is full.
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
    # What the library datasets writes into a parquet file, so that it knows images and class names.
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
    """The folder of a set, from itself or from the run that made it.

    Raises:
        ConfigError: There is no synthetic data set.
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
    raise ConfigError(f"synthetic={str(place)!r}: neither this folder nor its run holds a finished synthetic set.")


def load(folder: Path) -> SyntheticSet:
    """Read what ``save`` wrote.

    Raises:
        DataError: A file is missing or damaged.
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
        raise DataError(f"The synthetic set in {folder} is corrupted: it is not what {ABOUT} says.")
    return images


def remove_work_folder(folder: Path, name: str) -> None:
    """Remove a folder of work that is done.

    Args:
        folder: Folder of the data set.
        name: Name of the folder to remove.
    """
    shutil.rmtree(folder / name, ignore_errors=True)
