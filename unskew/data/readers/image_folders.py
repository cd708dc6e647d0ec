"""Folders of images: which files are images, and which folders are classes; the same for training and inference."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unskew.data.readers.arrow import pa
from unskew.errors import DataError, abbreviate

IMAGES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""
SYSTEM_FILES = ("__macosx", "__pycache__", "@eadir", "$recycle.bin", "lost+found", "thumbs.db", "desktop.ini")
"""Files and folders that operating systems and programs create between a user's files, in lower case."""
SPLITS = ("train", "test", "training", "testing", "val", "valid", "validation", "dev", "eval")
"""Names of folders that are parts of a data set and not classes; only the first two are read."""
SUBFOLDER = "folder"
"""Name of the column with the path of an image's folder below its class; only if there are such folders."""
LOG = logging.getLogger("unskew")


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden or belongs to the operating system."""
    return name.startswith(".") or name.lower() in SYSTEM_FILES


def visible_files(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted by path. Links to folders are followed, each folder is read once."""
    files: list[Path] = []
    visited = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        where = os.path.realpath(parent)
        folders[:] = [] if where in visited else [name for name in folders if not is_hidden(name)]
        files += [] if where in visited else [Path(parent, name) for name in names if not is_hidden(name)]
        visited.add(where)
    return sorted(files, key=str)


def is_image_file(file: Path) -> bool:
    """Return whether a file has the suffix of an image."""
    return file.suffix.lower() in IMAGES


def class_folders(path: Path) -> list[list[Path]]:
    """Return the folders of the classes: the first level below ``path``, or below its ``train`` and its ``test``.

    Args:
        path: Folder with one folder per class, or with ``train`` and ``test``.

    Returns:
        The folders of the training images, and of the test images if there are any.

    Raises:
        DataError: If the folders are missing or not valid.
    """
    if not path.is_dir():
        raise DataError(f"{path} is a file, but folder: requires a folder with one folder of images per class.")
    names = [folder.name for folder in visible_folders(path)]
    splits = [path / name for name in ("train", "test") if name in names]
    check_split_names(path, names)
    for folder in splits or [path]:
        classes = [own.name for own in visible_folders(folder)]
        if len(classes) < 2:
            raise DataError(
                f"{folder} must contain one folder of images per class, at least two. It has {classes or 'none'}."
            )
        loose = next((file for file in folder.iterdir() if is_image_file(file) and not is_hidden(file.name)), None)
        if loose is not None:
            raise DataError(f"The image {loose} is in no folder of a class. Move it into one.")
    return [visible_folders(folder) for folder in splits or [path]]


def check_split_names(path: Path, names: Sequence[str]) -> None:
    """Validate that one of the folders of a data set's parts is called ``train``.

    Args:
        path: Folder of the data set, for the error.
        names: Names of all folders in it.

    Raises:
        DataError: If none is, but one is called ``test``, or all have names of parts.
    """
    if "train" not in names and ("test" in names or (names and all(name.lower() in SPLITS for name in names))):
        raise DataError(
            f"{path} has no folder 'train', but {', '.join(names)}. Rename the folder with the training images to train, "
            "and the one with the test images to test."
        )


def visible_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not is_hidden(entry.name))


def path_column(files: Iterable[Path | str]) -> Any:
    """Return a pyarrow column with the paths of files."""
    try:
        return pa.chunked_array([pa.array([str(file) for file in files], pa.string())])
    except UnicodeEncodeError as error:
        raise DataError(f"The file name {error.object!r} is not encoded in UTF-8. Rename the file.") from error


def folder_tables(path: Path) -> tuple[Any, Any | None]:
    """Return tables with the columns ``image`` (path) and ``label``, and ``folder`` if classes contain folders.

    Args:
        path: Folder with one folder per class, or with ``train`` and ``test``.

    Raises:
        DataError: If the folders are not valid.
    """
    tables, skipped = [], []
    splits = class_folders(path)
    for folders in splits:
        files = [(file, own) for own in folders for file in visible_files(own)]
        skipped += [str(file.relative_to(path)) for file, _ in files if not is_image_file(file)]
        images = sorted((row for row in files if is_image_file(row[0])), key=lambda row: str(row[0]))
        labels = [own.name for _, own in images]
        below = [file.parent.relative_to(own).as_posix() for file, own in images]
        tables.append(pa.table({"image": path_column(file for file, _ in images), "label": labels, SUBFOLDER: below}))
    classes = {label for table in tables for label in table.column("label").to_pylist()}
    empty = {own.name for folders in splits for own in folders} - classes
    unread = [own.name for own in visible_folders(path) if own not in splits[0] and own.name not in ("train", "test")]
    for names, reason in ((skipped, "no image"), (empty, "without images"), (unread, "neither train nor test")):
        if names:
            LOG.warning("%s: not read, because %s: %s", path, reason, abbreviate(sorted(names)))
    if len({below for table in tables for below in table.column(SUBFOLDER).to_pylist()}) == 1:
        tables = [table.drop_columns(SUBFOLDER) for table in tables]
    return tables[0], tables[1] if len(tables) > 1 else None
