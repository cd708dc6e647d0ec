"""Registry of data sources: built-in data sets, the Hugging Face Hub, folders of images, tables and arrays.

>>> source = load_source("digits")
>>> source.train.x.shape, source.classes
(torch.Size([1437, 1, 8, 8]), 10)
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unskew import plugins
from unskew.data.csv_format import DETECTED, CsvSpec
from unskew.data.frames import check_same_index, read_classes
from unskew.data.loading_warnings import CachedLoader
from unskew.data.readers.column_roles import ColumnSelection
from unskew.data.readers.files import (
    HubDataset,
    absolute_path,
    file_tables,
    files_stamp,
    hub_tables,
    local_tables,
    table_files,
)
from unskew.data.readers.image_folders import SUBFOLDER, class_folders, folder_tables
from unskew.data.readers.masks import has_masks, image_mask_folders, mask_tables
from unskew.data.readers.tables import SampleTable, Source, source_from_tables
from unskew.data.sources.builtin import digits, gaussians, lung, scikit_learn_table
from unskew.data.sources.dsprites import dsprites
from unskew.data.sources.generated import fcube, parse_synthetic, synthetic
from unskew.data.sources.leaf import leaf_root, leaf_source
from unskew.data.sources.npz import is_array_folder, npz_source
from unskew.data.sources.shape_masks import shape_masks
from unskew.data.sources.shapes import shapes
from unskew.data.spec import TABLES
from unskew.data.validation import as_inputs
from unskew.errors import ConfigError, DataError, UnskewError
from unskew.tasks.segmentation import Segmentation

__all__ = ["SOURCES", "SampleTable", "Source", "load_source"]

SOURCES: dict[str, str] = {
    "digits": "handwritten digits, 8 x 8 gray, 1,797 images; comes with scikit-learn, no download",
    "iris": "flowers, 4 features, 3 classes, 150 rows; comes with scikit-learn, no download",
    "wine": "wines, 13 features, 3 classes, 178 rows; comes with scikit-learn, no download",
    "breast_cancer": "tumors, 30 features, 2 classes, 569 rows; comes with scikit-learn, no download",
    "diabetes": "progression of diabetes, 10 features, a regression, 442 rows; comes with scikit-learn, no download",
    "lung": "survival with lung cancer, 7 features, 227 patients, 18 hospitals in the column institution; comes with the "
    "package lifelines, no download",
    "cifar10": "CIFAR-10, 32 x 32 color, 10 classes (uoft-cs/cifar10)",
    "cifar100": "CIFAR-100, 32 x 32 color, 100 classes (uoft-cs/cifar100)",
    "mnist": "MNIST, 28 x 28 gray, 10 classes (ylecun/mnist)",
    "fashion_mnist": "Fashion-MNIST, 28 x 28 gray, 10 classes (zalando-datasets/fashion_mnist)",
    "svhn": "Street View House Numbers, 32 x 32 color, 10 classes (ufldl-stanford/svhn, cropped_digits)",
    "femnist": "FEMNIST, 28 x 28 gray, 62 classes by writer (flwrlabs/femnist)",
    "celeba": "CelebA, 178 x 218 color, faces with 40 attributes by person (flwrlabs/celeba)",
    "imagenet64": "ImageNet-1k, 64 x 64 color, 1,000 classes (benjamin-paine/imagenet-1k-64x64)",
    "gaussians": "ten overlapping Gaussian classes in 10 dimensions, 20,000 training and 50,000 test samples; no "
    "download",
    "synthetic": "synthetic:ALPHA,BETA, 60 features, 10 classes, 30 clients with own models (ALPHA) and inputs (BETA), "
    "column client; no download",
    "fcube": "points in a cube, 3 features, 2 classes, 4,000 training and 1,000 test points, 4 clients in the column "
    "client; no download",
    "shapes": "textured shapes on cloudy backgrounds, 32 x 32 color, 20 classes, 10,000 training and 2,000 test "
    "images; generated, no download",
    "shape-masks": "a segmentation of circles, squares and triangles, 64 x 64 color, 400 training and 100 test images, four "
    "sites in the column site; generated, no download",
    "leaf": "leaf:PATH, a folder in LEAF's layout: train/*.json and test/*.json with the samples of each user",
    "dsprites": "dSprites, 64 x 64 black and white, 3 shapes, 737,280 images or dsprites:N of them; generated, no "
    "download",
    "npz": "npz:PATH, arrays x and y with one class per sample, optionally x_test and y_test, and columns such as "
    "client; or a file of MedMNIST",
    "npy": "npy:PATH, a folder with the arrays of npz as one file each (x.npy, y.npy, ...), which are memory-mapped",
    "masks": "masks:PATH, a segmentation: [SITE/][train|test/]images/NAME.* and masks/NAME.*, with the columns site and name",
    "folder": "folder:PATH with PATH/train/<class>/*, PATH/test/<class>/*, or PATH/<class>/*",
    "multi_nli": "MultiNLI, 393,000 pairs of sentences in five genres, three classes (nyu-mll/multi_nli)",
    "sentences": "generated sentence pairs in five genres, 4,000 training and 1,000 test pairs, three classes; no "
    "download",
    "text": "text:PATH, texts in a .csv, .jsonl or .parquet file, or a folder with train and test files",
    "table": "table:PATH, a .csv, .jsonl or .parquet file, or a folder with train and test files; requires label",
}
DRAWN: dict[str, Callable[[], Source]] = {
    "digits": digits,
    "gaussians": gaussians,
    "fcube": fcube,
    "shapes": shapes,
    "shape-masks": shape_masks,
    **{name: partial(scikit_learn_table, name) for name in ("iris", "wine", "breast_cancer", "diabetes")},
}
"""Sources that are built in or generated."""
LOG = logging.getLogger("unskew")
PATHS = ("folder", "table", "leaf", "npz", "npy", "masks")
"""Sources that are written with a path."""
OWN_LABELS = {
    "dsprites": "The label of dSprites is the shape",
    "folder": "The classes of a folder of images are its subfolders",
    "masks": "The inputs of masks data are in the folders images and the labels in the folders masks",
    **dict.fromkeys(("npz", "npy"), "The inputs of npz and npy data are x and the labels are y"),
    "leaf": "The labels of data in LEAF's layout are y",
}
"""Why a source has no label column that a user could choose."""

LAYOUTS: dict[str, Callable[[Path], object]] = {
    "leaf": leaf_root,
    "npy": is_array_folder,
    "folder": class_folders,
    "masks": image_mask_folders,
    "table": table_files,
}
"""Checks of the folder layout that run before any file is read."""

ALL = ColumnSelection()
"""Default selection of table columns."""
NO_OPTIONS = Segmentation()
"""Segmentation without options."""

HUB: dict[str, HubDataset] = {
    "cifar10": HubDataset("uoft-cs/cifar10", None, "img", "label"),
    "cifar100": HubDataset("uoft-cs/cifar100", None, "img", "fine_label"),
    "mnist": HubDataset("ylecun/mnist", None, "image", "label"),
    "fashion_mnist": HubDataset("zalando-datasets/fashion_mnist", None, "image", "label"),
    "svhn": HubDataset("ufldl-stanford/svhn", "cropped_digits", "image", "label"),
    "femnist": HubDataset("flwrlabs/femnist", None, "image", "character", test=None),
    "imagenet64": HubDataset("benjamin-paine/imagenet-1k-64x64", None, "image", "label", test="validation"),
    "celeba": HubDataset("flwrlabs/celeba", None, "image", "Smiling"),
}


def load_source(
    name: str,
    *,
    path: str | Path | None = None,
    label: str | None = None,
    image: str | None = None,
    label_separator: str | None = None,
    size: int | None = None,
    classes: int | None = None,
    choice: ColumnSelection = ALL,
    csv: CsvSpec = DETECTED,
    masks: Segmentation = NO_OPTIONS,
) -> Source:
    """Load a data set. The four most recent data sets are cached until their files change.

    Data without a test part are split by ``unskew.data.readers.tables.train_test_tables``.

    Args:
        name: One of :data:`SOURCES`, a full Hub name such as ``uoft-cs/cifar10``, ``folder:PATH``, ``table:PATH``, or a
            file name that ends in .csv, .jsonl or .parquet.
        path: For a Hub data set, a local folder with its parquet files (the network is then not used). For ``folder``,
            ``table`` and other sources with a path, the folder or file.
        label: Label column; required for tables. If it contains lists, the task is multi-label.
        image: Column of encoded images or image file names; without it, a table's numeric columns are the inputs. For
            ``leaf``, the folder of the image files.
        label_separator: Separator between the labels of a row, in a string label column of a table.
        size: Side length to which images are resized.
        classes: Keep only the samples of this many first classes.
        choice: Selection of a table's columns.
        csv: Format of a table's CSV files.
        masks: Segmentation with configured classes, for data with masks.

    Raises:
        ConfigError: If the data set is unknown, or arguments contradict each other.
        DataError: If the files do not exist or are not valid.
    """
    alias = {hub.name: short for short, hub in HUB.items()}
    kind = alias.get(name, name)
    for prefix in PATHS:
        if name.startswith(prefix + ":"):
            if path is not None:
                raise ConfigError(
                    f"{name!r} already contains a path. Remove path={str(path)!r}, or use the name {prefix!r}."
                )
            kind, path = prefix, name.removeprefix(prefix + ":")
    if name.lower().endswith(TABLES) and kind == name:
        kind, path = "table", Path(path or "") / name
    base, colon, number = kind.partition(":")
    count = number if colon and (base == "dsprites" or base in HUB) else None
    if count is not None and not re.fullmatch("[1-9][0-9]{0,11}", count):
        raise ConfigError(f"{name!r}: write {base}:N with a number of images, such as {base}:20000.")
    drawn = kind in DRAWN or base in ("synthetic", "lung")
    if base == "synthetic":
        parse_synthetic(kind)
    elif count is None and kind not in SOURCES:
        choice = choice._replace(divides=None, sorts=False)  # the source has the columns that a partition may use
        options = choice != ALL or csv != DETECTED or any(o is not None for o in (label, image, label_separator))
        return load_plugin_source(kind, path, options, size, classes)
    if kind in PATHS and not path:
        raise ConfigError(f"The data set {kind!r} requires a path: {SOURCES[kind].split(',')[0]}.")
    if drawn and (path is not None or label is not None or image is not None):
        raise ConfigError(f"The data set {kind!r} is built in. Remove path, label and image.")
    if base in OWN_LABELS and (label is not None or (image is not None and base != "leaf")):
        raise ConfigError(f"{OWN_LABELS[base]}. Remove label{'' if base == 'leaf' else ' and image'}.")
    if kind != "table":
        takes_columns = kind == "lung"
        table_options = {
            "label_separator requires": label_separator is not None,
            "features and exclude require": not takes_columns and (choice.features or choice.exclude),
            "csv requires": csv != DETECTED,
        }
        for option in (option for option, is_set in table_options.items() if is_set):
            raise ConfigError(f"{option} a table of your own, but {name!r} is not one.")
        if choice.split and not takes_columns and kind not in ("folder", "masks"):
            raise ConfigError(f"split_by requires a table, texts or a folder of images, but {name!r} is none of them.")
        if choice.mixed and not takes_columns:
            raise ConfigError(
                f"task=regression, categories, dates and missing require a table, but {name!r} is not a table. Save the "
                "data as .csv or .parquet, or in Python use Federation.from_arrays."
            )
        divides = choice.divides if kind == "masks" else None
        choice = choice if takes_columns else ColumnSelection(divides=divides, split=choice.split)
    elif choice.masks and image is None:
        raise ConfigError(
            "Set image to the column with the image files of the table, and label to that with the masks."
        )
    where = absolute_path(path)
    if kind in LAYOUTS and where is not None:
        LAYOUTS[kind](where)
    if kind == "folder" and where is not None and has_masks(where):
        raise DataError(
            f"{where} has folders images and masks, as for a segmentation. Use masks:{path}, or for a classification, move "
            "the masks elsewhere."
        )
    request = SourceRequest(kind, where, label, image, label_separator, size, classes, choice, csv, masks)
    return load_cached(request, files_stamp(where))


def _not_data(path: Path) -> str:
    """Return the error message for a path that does not exist, with similar names, or is not a supported file."""
    if path.exists():
        kinds = f"neither a table ({', '.join(TABLES)}) nor arrays (.npz)"
        return f"{path} is {kinds}. For a folder of images, use folder:{path}."
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=2)
    hint = f" Did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else ""
    return f"There is no file or folder at {path}.{hint}"


def load_plugin_source(name: str, path: str | Path | None, more: bool, size: int | None, classes: int | None) -> Source:
    """Load a data set of another package.

    The plugin is a function that returns a ``Source``, or ``(x, y), (x_test, y_test)`` as arrays. It is called with
    ``path=`` if a path was set, otherwise without arguments.

    Args:
        name: Name of the data set.
        path: Path of its files, or None.
        more: Whether table options are set, which plugins do not support.
        size: Side length of images in pixels; None means unchanged.
        classes: Number of classes to keep; None keeps all.
    """
    try:
        plugin = plugins.find_plugin(plugins.DATA, "data set", name, SOURCES)
    except ConfigError:
        if "/" in name or Path(name).suffix:
            raise ConfigError(_not_data(Path(name))) from None
        raise
    if more:
        raise ConfigError(f"The data set {name!r} of the package {plugin.package} does not support table options.")
    function = plugin.load_callable()
    try:
        result = function() if path is None else function(path=path)
        source = result if isinstance(result, Source) else source_from_arrays(name, *result)
    except UnskewError:
        raise
    except Exception as error:  # a plugin may raise anything
        raise DataError(
            f"The data set {name!r} of the package {plugin.package} cannot be loaded ({type(error).__name__}: {error})."
        ) from error
    return source.sized(size).first(classes)


def source_from_arrays(name: str, train: tuple[object, object], test: tuple[object, object]) -> Source:
    """Build a source from arrays, with inputs as for ``Federation.from_arrays`` and one class per sample.

    Args:
        name: Name of the data set.
        train: Training inputs and labels.
        test: Test inputs and labels.
    """
    for who, (x, y) in (("the training part", train), ("the test part", test)):
        check_same_index(x, y, f"{who} of {name}")
    labels, class_names = read_classes([train[1], test[1]], name)
    first, last = (SampleTable(as_inputs(x, name), y, {}) for x, y in zip((train[0], test[0]), labels, strict=True))
    return Source(name, first, last, class_names, len(class_names))


class SourceRequest(NamedTuple):
    """Validated arguments of ``load_source``."""

    kind: str
    path: Path | None
    label: str | None
    image: str | None
    label_separator: str | None
    size: int | None
    classes: int | None
    choice: ColumnSelection
    csv: CsvSpec
    masks: Segmentation


def load_and_decode(request: SourceRequest, stamp: tuple[int, int, int]) -> Source:
    """Load and decode a source; a function for a cache.

    Args:
        request: Arguments of ``load_source``.
        stamp: Stamp of the files, part of the cache key so that changes are detected.
    """
    return load_uncached(request).sized(request.size).first(request.classes).described()


load_cached = CachedLoader(load_and_decode, size=4)
"""Loads and decodes a source, with a cache; images are decoded again if one of their files changed."""


def draw_rows(table: Any, count: int, name: str) -> Any:
    """Draw rows of a pyarrow table with a fixed seed, so that all methods and seeds of an experiment have the same ones.

    Args:
        table: Table to draw from.
        count: Number of rows.
        name: Name of the data set.

    Raises:
        DataError: If the table has fewer rows.
    """
    if count > table.num_rows:
        raise DataError(f"{name}:{count} is more than the {table.num_rows} training images of {name}.")
    chosen = np.zeros(table.num_rows, bool)
    chosen[np.random.default_rng(0).permutation(table.num_rows)[:count]] = True
    return table.filter(chosen)


def load_uncached(request: SourceRequest) -> Source:
    """Load a source without cache; only encoded images are already resized to the requested size."""
    kind, path, label, image, separator, size, _, choice, csv, masks = request
    if kind in DRAWN:
        return DRAWN[kind]()
    if kind == "lung":
        return lung(choice)
    if kind.startswith("synthetic"):
        return synthetic(*parse_synthetic(kind))
    if kind.startswith("dsprites"):
        return dsprites(path, int(kind.partition(":")[2]) if ":" in kind else None)
    base, _, count = kind.partition(":")
    if base in HUB:
        hub = HUB[base]
        train, test = hub_tables(hub) if path is None else local_tables(base, hub, path)
        if count:
            train = draw_rows(train, int(count), base)
        return source_from_tables(base, train, test, label=label or hub.label, image=image or hub.image, size=size)
    assert path is not None
    if kind == "leaf":
        return leaf_source(path, None if image is None else Path(image).expanduser(), size)
    if kind in ("npz", "npy"):
        return npz_source(path, masks)
    if kind == "masks":
        train, test = mask_tables(path)
        return source_from_tables(
            path.name, train, test, label="mask", image="image", choice=choice, size=size, masks=masks
        )
    if kind == "folder":
        train, test = folder_tables(path)
        selection = choice if choice.split else None
        if selection is None and test is None and SUBFOLDER in train.column_names:
            LOG.warning("classes of %s contain folders; split_by: %s keeps their images together", path, SUBFOLDER)
        return source_from_tables(path.name, train, test, label="label", image="image", choice=selection, size=size)
    train, test = file_tables(path, csv, choice.uses(label, separator is None))
    name = path.stem if path.stem != "train" else path.parent.name
    folder = path if path.is_dir() else path.parent
    return source_from_tables(
        name,
        train,
        test,
        label=label,
        image=image,
        label_separator=separator,
        choice=choice,
        folder=folder,
        size=size,
        masks=masks if choice.masks else None,
    )
