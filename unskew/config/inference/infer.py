"""Inference of a first configuration from the user's data, for ``unskew init``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew.config.inference.client_columns import MOST_CATEGORIES, kind_of_client
from unskew.config.inference.holdout_share import report_untested, set_holdout
from unskew.config.inference.image_fields import set_image_size, set_mask_fields
from unskew.config.inference.inferred_config import InferredConfig
from unskew.config.inference.table_fields import set_table_fields
from unskew.config.loader import experiment
from unskew.data.federation import Federation
from unskew.data.leaks import find_leaks
from unskew.data.load import federation_of
from unskew.data.readers.files import table_files
from unskew.data.readers.image_folders import SUBFOLDER, class_folders, is_image_file, visible_files, visible_folders
from unskew.data.readers.masks import has_masks
from unskew.data.sources.registry import SOURCES
from unskew.data.spec import TABLES
from unskew.errors import ConfigError, DataError, unknown_name
from unskew.expressions import quote, unquote
from unskew.tasks.few_samples import FEWEST
from unskew.tasks.metrics import missing_classes

RARE = 0.4
"""A class is rare if it has less than this share of the samples that it would have with balanced classes."""
UNEQUAL = 0.4
"""Two classes are unequal if one of them has less than this share of the samples."""


def infer_config(
    data: str | None,
    label: str | None = None,
    seed: int = 0,
    *,
    clients: str | None = None,
    image: str | None = None,
    csv: Mapping[str, Any] | None = None,
) -> InferredConfig:
    """Infer a configuration that runs without changes.

    Args:
        data: A table (.csv, .jsonl, .parquet), arrays (.npz), a folder of images, of images and masks, or of tables, or the
            name of a data source; None means the digits.
        label: Label column of a table; None means that it is inferred.
        seed: Random seed of the partition that is described.
        clients: Column of a table, or array, that names the clients; None means that it is inferred.
        image: Column of a table with images or paths of image files; None means that it is inferred.
        csv: Format of CSV files, as in a configuration; None means that it is detected.

    Raises:
        ConfigError: If the data do not exist, or the label cannot be inferred.
        DataError: If the data are not valid.
    """
    inferred = InferredConfig()
    if csv:
        inferred.set("csv", dict(csv), "format of the CSV files")
    data = data if data is None else data.removeprefix("table:")
    masks = data is not None and data.startswith("masks:")
    data = data if data is None else data.removeprefix("masks:")
    path = Path(data).expanduser() if data else Path("digits")
    if data and path.exists() and (masks or (path.is_dir() and has_masks(path))):
        set_mask_fields(inferred, path, data, clients)
    elif data is not None and path.exists():
        _look(inferred, path, data, (label, clients, image))
    elif data is None or data.partition(":")[0] in SOURCES:
        inferred.set("data", data or "digits", "a built-in data source")
        _images(inferred)
    else:
        raise ConfigError(
            f"There is no file or folder at {data}, and it is not a data source: "
            f"{unknown_name('data set', data, SOURCES)}"
        )
    for option, value in (("label", label), ("image", image)):
        if value is not None and option not in inferred.values:
            raise ConfigError(f"--{option} requires a table, but {data or 'digits'} is not a table.")
    if clients is not None and not inferred.values["partition"].startswith("natural:"):
        raise ConfigError(f"--clients requires a table or arrays (.npz), but {data or 'digits'} is neither.")
    _budget(inferred)
    spec = experiment(inferred.values).data_spec
    fed = federation_of(spec, seed)  # validates the configuration and the data
    if "one_class" in fed.objective.provides:
        _imbalance(inferred, fed)
    if set_holdout(inferred, fed):
        spec = experiment(inferred.values).data_spec
        fed = federation_of(spec, seed)
    sizes, names = fed.sizes, fed.label_distribution()[1]
    classes = f", of {len(names)} classes: {', '.join(map(str, names[:8]))}{', ...' if len(names) > 8 else ''}"
    inferred.seen.append(
        f"{len(fed.clients)} clients with {_from_to(int(sizes.min()), int(sizes.max()))} training samples each"
        f"{classes if 'counts' in fed.objective.provides else ''}"
    )
    report_untested(inferred, fed)
    inferred.seen += find_leaks(spec)
    return inferred


def _imbalance(inferred: InferredConfig, fed: Federation) -> None:
    """Set metrics if two classes are unequal; if a class is rare, also objective and class weights."""
    counts = np.asarray(fed.label_distribution()[0]).sum(0)
    least = int(counts.argmin())
    share = counts[least] / counts.sum()
    rare = share * len(counts) < RARE and len(counts) <= MOST_CATEGORIES
    if not rare and (len(counts) != 2 or share >= UNEQUAL):
        return
    test, held_out = fed.test[1], [client.y_test for client in fed.clients if len(client.y_test)]
    parts = [test, *([torch.cat(held_out)] if held_out else [])]
    missing = {name: 0 for y in parts for name in missing_classes("auprc", y.numpy(), fed.names)}
    metrics = ["balanced_accuracy"] if missing else ["auroc", "auprc", "balanced_accuracy"]
    name = fed.label_distribution()[1][least]
    if not rare:
        inferred.set("metrics", metrics, f"a constant prediction has an accuracy of {1 - share:.0%}")
        why = f"compares methods by it; a test at a client needs {FEWEST} held-out samples of {name}"
        inferred.commented["metrics"] = {"objective": metrics[0]}, why
        inferred.set("positive", fed.names[least], "the rarer class")
        inferred.seen.append(f"the class {name} has {share:.0%} of the samples, so metrics are set for unequal classes")
        return
    if missing:
        why = f"AUPRC is undefined: no test or held-out sample of {', '.join(missing)}"
        inferred.set("objective", "balanced_accuracy", why)
    else:
        inferred.set(
            "objective", "auprc", "for tuning, stopping and comparison; accuracy is misleading for rare classes"
        )
    inferred.set("metrics", metrics, "additional metrics")
    if len(counts) == 2:
        inferred.set("positive", fed.names[least], "the rare class; AUPRC is that of this class")
    inferred.set("class_weights", "balanced", "rare classes count more in the loss; probabilities are corrected for it")
    inferred.seen.append(
        f"the class {name} has {share:.0%} of the samples, so objective, metrics and "
        "class_weights are set for rare classes"
    )


def _look(inferred: InferredConfig, path: Path, data: str, chosen: tuple[str | None, str | None, str | None]) -> None:
    """Set fields for data in a file or folder, with the chosen columns for label, clients and image."""
    if path.is_file() and path.suffix.lower() == ".npz":
        inferred.set("data", f"npz:{data}", "arrays x and y, and optionally x_test and y_test")
        _arrays(inferred, path, chosen[1])
    elif path.is_file() and path.suffix.lower() in TABLES:
        set_table_fields(inferred, path, data, *chosen)
    elif path.is_dir() and _is_table_folder(path):
        set_table_fields(inferred, path, f"table:{data}", *chosen)
    elif path.is_dir():
        folders, *test = class_folders(path)  # raises an error that describes the required layout
        images = {file: folder for folder in folders for file in visible_files(folder) if is_image_file(file)}
        inferred.set("data", f"folder:{data}", "one folder of images per class")
        set_image_size(inferred, [file for file in images if file.is_file()])
        if not test and len({file.parent.relative_to(folder) for file, folder in images.items()}) > 1:
            inferred.seen.append(f"classes contain folders; if these are patients, set split_by: {SUBFOLDER}")
        _images(inferred, len(images))
    else:
        raise DataError(
            f"{data} is neither a table (.csv, .jsonl, .parquet), nor arrays (.npz), nor a folder of images."
        )


def _is_table_folder(path: Path) -> bool:
    """Return whether a folder contains tables, and no folders of images next to them."""
    try:
        files = table_files(path)[0]
    except DataError:
        return False
    return not visible_folders(path) or any(file.stem.startswith("train") for file in files)


def _images(inferred: InferredConfig, images: int = 1000) -> None:
    """Set partition and model for images without client information."""
    if inferred.values["data"] == "shape-masks":
        inferred.set("partition", "natural:site", "one client per site")
        inferred.set("model", "unet", "for segmentation")
        inferred.set("optimizer", "adam")
        return
    inferred.set("partition", "dirichlet:0.3,min=2", "label skew; others are iid, classes:2 or natural:COLUMN")
    inferred.set("clients", max(2, min(10, images // 20)))
    texts = inferred.values["data"] in ("sentences", "multi_nli") or str(inferred.values["data"]).startswith("text")
    if texts:
        raise ConfigError(
            "init does not support built-in text data sets. Write data, text, label and model (text-mlp or hf:NAME) "
            "yourself."
        )
    flat = inferred.values["data"] == "gaussians"
    inferred.set("model", "mlp" if flat else "cnn", "unskew models lists all models")


def _arrays(inferred: InferredConfig, path: Path, clients: str | None) -> None:
    """Set fields for a file of arrays."""
    from unskew.data.sources.npz import load_arrays

    arrays = load_arrays(path)
    n = len(arrays["y"])
    inferred.seen.append(f"x {arrays['x'].shape}, y {arrays['y'].shape}")
    owner = next((k for k in arrays if kind_of_client(k) is not None and len(arrays[k]) == n), None)
    if clients is not None or owner is not None:
        owner = unquote(clients or str(owner))
        inferred.set("partition", f"natural:{quote(owner)}", f"one client per value of {owner}")
    else:
        several = arrays["y"].ndim == 2 and arrays["y"].shape[1] > 1
        scheme, reason = ("iid", "several labels per sample") if several else ("dirichlet:0.3,min=2", "label skew")
        inferred.set("partition", scheme, f"{reason}; no array with client names was found")
        inferred.set("clients", max(2, min(10, n // 20)))
    inferred.set("model", "cnn" if arrays["x"].ndim > 2 else "mlp", "unskew models lists all models")


def _from_to(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _budget(inferred: InferredConfig) -> None:
    """Set the fields of training."""
    inferred.set(
        "method", "fedavg", "unskew methods lists all; compositions such as fedprox:mu=0.1+scaffold are allowed"
    )
    inferred.set("rounds", 20)
    inferred.set("local_epochs", 1, "passes over a client's data in each round; or local_steps")
    inferred.set("batch_size", 16)
    inferred.set(
        "lr",
        0.003 if "optimizer" in inferred.values else 0.05,
        "decrease it if the loss grows, increase it if it stagnates",
    )
    inferred.set("seed", 0, "random seed")
