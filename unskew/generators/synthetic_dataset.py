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
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from unskew.data.readers.images import decode_column
from unskew.errors import ConfigError, DataError, explain_missing
from unskew.filesystem import check_regular, disk_errors, write_atomic
from unskew.generators.trained.dp_sgd import PrivacyOptions
from unskew.json_models import JsonModel, read_model

PARQUET = "data/train-00000-of-00001.parquet"
ABOUT = "synthetic.json"
SYNTHETIC = "synthetic"
"""Name of the folder with generated data, in a run folder or in the folder of several runs."""
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


Amount = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, le=1 << 31)]
Text = Annotated[str, Field(max_length=10_000)]


class RecipeRecord(JsonModel):
    """Options with which a set was generated, and hashes of the data."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rho: Annotated[float, Field(gt=0, le=1)]
    generator: Text
    epochs: Count | None
    refuse: Text
    count: Count
    keep: Text | None
    privacy: PrivacyOptions | None
    data: tuple[Text, Text, tuple[Count, ...], Count]
    sizes: Text


class SetRecord(JsonModel):
    """Content of ``synthetic.json``."""

    recipe: RecipeRecord
    classes: Count
    shape: tuple[Count, ...]
    clients: Count
    counts: Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Count], Field(min_length=1)]
    seconds: Amount
    epsilon: Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Amount], Field(min_length=1)] | None = None
    digest: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


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
    with explain_missing("Storing synthetic images needs pyarrow and pillow: pip install 'unskew[hub]'."):
        import PIL.Image  # noqa: F401
        import pyarrow.parquet  # noqa: F401


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


def find(path: Path) -> Path:
    """Return the folder of a set, from its own path or the folder of the run that generated it.

    Args:
        path: Folder of the set, or run folder.

    Raises:
        ConfigError: If there is no synthetic set.
    """
    for folder in (path, path / SYNTHETIC):
        if (folder / ABOUT).is_file():
            return folder
    shared = shared_set(path, stored_name(path))
    if shared is None:
        raise ConfigError(f"synthetic={str(path)!r} is neither a finished synthetic set nor a run folder with one.")
    return shared


def stored_name(run: Path) -> str:
    """Return the name of the set that a finished run has used; empty without one.

    The summary has a path, but a run folder may come from others: only the name is used, in folders near the run.

    Args:
        run: Run folder.

    Raises:
        CheckpointError: If the summary of the run is corrupted.
    """
    summary = run / "summary.json"
    content = read_model(summary, dict[str, Any], "Remove it and resume the run.") if summary.is_file() else {}
    return Path(str(content.get("synthetic") or "")).name


def shared_set(run: Path, name: str) -> Path | None:
    """Return a finished set that several runs share, in ``synthetic`` one or two folders above a run, or None.

    It is only for reading, and no part of its path below these folders may be a link.

    Args:
        run: Run folder.
        name: Name of the set's folder.
    """
    if not re.fullmatch("[0-9a-f]{16}", name):
        return None
    for base in run.resolve().parents[:2]:
        folder = base / SYNTHETIC / name
        parts = (folder.parent, folder, folder / ABOUT, folder / "data", folder / PARQUET)
        if (folder / ABOUT).is_file() and not any(part.is_symlink() for part in parts):
            return folder
    return None


def load(folder: Path) -> SyntheticSet:
    """Load a set that ``save`` wrote.

    Args:
        folder: Folder of the set.

    Raises:
        CheckpointError: If ``synthetic.json`` is missing or corrupted.
        DataError: If the images are missing or corrupted.
    """
    import pyarrow.parquet as pq

    about = read_model(folder / ABOUT, SetRecord).model_dump(mode="json", exclude_unset=True)
    try:
        check_regular(folder / PARQUET)
        table = pq.read_table(folder / PARQUET)
        y, source = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("label", "client"))
        x = decode_column(table["image"], f"the synthetic set in {folder}")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"The synthetic set in {folder} cannot be read ({error}).") from error
    images = SyntheticSet(x, y.to(torch.int64), source.to(torch.int64), about)
    if images.digest != about["digest"]:
        raise DataError(
            f"The synthetic set in {folder} is corrupted: its content does not match the digest in {ABOUT}."
        )
    return images


def load_matching(folder: Path, recipe: Any) -> SyntheticSet:
    """Load a set and validate that it was generated with the options ``recipe``.

    Args:
        folder: Folder of the set.
        recipe: Options of the generation.

    Raises:
        ConfigError: If the options differ.
    """
    images = load(folder)
    if images.about["recipe"] != recipe:
        raise ConfigError(
            f"{folder} contains a synthetic set that was generated with other options. Remove it, or use it with synthetic."
        )
    return images


def remove_work_folder(folder: Path) -> None:
    """Remove the intermediate files of a set."""
    shutil.rmtree(folder / "work", ignore_errors=True)
