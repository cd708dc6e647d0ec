"""Rows from elsewhere as pyarrow tables: files, folders of them, folders of images, and data sets of the hub."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from unskew.data.readers.arrow_io import read_file
from unskew.data.readers.hub import hub_or_cache, unreachable
from unskew.data.spec import DETECTED, TABLES, CsvSpec
from unskew.errors import DataError
from unskew.progress import report_progress


class HubDataset(NamedTuple):
    """A data set of the Hugging Face hub: its name there, its configuration, its columns, and its test part if it has one."""

    name: str
    config: str | None
    image: str
    label: str
    test: str | None = "test"


def absolute_path(path: str | Path | None) -> Path | None:
    """The absolute path; None stays None.

    Raises:
        DataError: Nothing is there.
    """
    if path is None:
        return None
    where = Path(path).expanduser().absolute()
    if not where.exists():
        raise DataError(f"There is no file or folder {where}.")
    return where


def files_stamp(path: Path | None) -> tuple[int, int, int]:
    """Return a stamp of the files below a path (count, newest time, total size), which changes when they change."""
    if path is None:
        return (0, 0, 0)
    # A single file is stamped with its folder: train.csv reads the test.csv next to it.
    files = path.rglob("*") if path.is_dir() else files_with_suffix(path.parent.iterdir(), path.suffix)
    stats = [file.stat() for file in files if file.is_file()]
    return len(stats), max((s.st_mtime_ns for s in stats), default=0), sum(s.st_size for s in stats)


def files_with_suffix(files: Iterable[Path], suffix: str) -> list[Path]:
    """Return the files with this suffix, ignoring case, sorted.

    Args:
        files: Files to choose from.
        suffix: Suffix with its dot.
    """
    return sorted(file for file in files if file.suffix.lower() == suffix.lower())


def hub_tables(hub: HubDataset) -> tuple[Any, Any | None]:
    """Training and test rows from the hub, or from the local copy that an earlier download left."""
    with quiet_datasets() as datasets, hub_or_cache() as reached:
        try:
            loaded = datasets.load_dataset(hub.name, hub.config)
        except Exception as error:  # whatever the network stack raises
            reason = f"{type(error).__name__}: {error}. You can also" if reached else unreachable("it")
            raise DataError(
                f"{hub.name} could not be loaded: {reason} put its parquet files in a folder and name that folder "
                "(data_path, --data-path)."
            ) from error
    return loaded["train"].data.table, loaded[hub.test].data.table if hub.test else None


def local_tables(kind: str, hub: HubDataset, path: Path) -> tuple[Any, Any | None]:
    """Training and test rows from a folder laid out like the hub's, through ``datasets``.

    Args:
        kind: Name of the data set.
        hub: Its description on the hub.
        path: Folder of the files.
    """
    files = local_files(kind, hub, path)
    return dataset_tables("parquet", {split: [glob.escape(str(f)) for f in some] for split, some in files.items()})


def local_files(kind: str, hub: HubDataset, path: Path) -> dict[str, list[Path]]:
    """The parquet files of each part in a folder laid out like the hub's, or one level down, as ``train`` and ``test``.

    Args:
        kind: Name of the data set.
        hub: Its description on the hub.
        path: Folder of the files.

    Raises:
        DataError: There is no such folder.
    """
    parts = {"train": "train"} | ({} if hub.test is None else {"test": hub.test})
    inside = [path / hub.config] if hub.config else []
    for folder in [*inside, path, *sorted(entry for entry in path.glob("*") if entry.is_dir())]:
        files = {split: split_files(folder, name, ".parquet") for split, name in parts.items()}
        if all(files.values()):
            return files
    raise DataError(
        f"{path} does not hold {kind}: it needs {' and '.join(f'{name}*.parquet' for name in parts.values())}, in the "
        f"folder or one level down, as in the hub's {hub.name}."
    )


def split_files(folder: Path, split: str, suffix: str) -> list[Path]:
    """The files of one split: ``train*.parquet``, or all files of a folder ``train``.

    Args:
        folder: Folder to search.
        split: ``train`` or ``test``.
        suffix: Suffix with its dot.
    """
    return files_with_suffix(folder.glob(f"{split}*"), suffix) or files_with_suffix((folder / split).glob("*"), suffix)


def folder_tables(path: Path) -> tuple[Any, Any | None]:
    """Rows of a folder with one folder of images per class."""
    splits = class_folders(path)
    train, test = dataset_tables("imagefolder", {s: glob.escape(str(f)) + "/**" for s, f in splits.items()})
    if "label" not in train.column_names:
        raise DataError(f"The images of {path} must lie directly in the folders of their classes.")
    return train, test


def class_folders(path: Path) -> dict[str, Path]:
    """The folder of each part, in which there is one folder of images per class.

    Raises:
        DataError: There are no such folders.
    """
    splits = {split: path / split for split in ("train", "test") if (path / split).is_dir()} or {"train": path}
    if not path.is_dir():
        raise DataError(f"{path} is a file; folder: needs a folder, in which there is one folder of images per class.")
    if "train" not in splits:
        raise DataError(f"{path} has a folder 'test' but no folder 'train'.")
    for folder in splits.values():
        classes = sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))
        if len(classes) < 2:
            raise DataError(
                f"{folder} must hold one folder of images per class, at least two; it has {classes or 'none'}."
            )
        strange = next((name for name in classes if "\\" in name), None)
        if strange is not None:  # a separator of paths on Windows, as which ``datasets`` reads it everywhere
            raise DataError(f"The folder {strange!r} in {folder} has a backslash in its name; rename the folder.")
    return splits


def dataset_tables(builder: str, files: dict[str, Any]) -> tuple[Any, Any | None]:
    """Rows of local files through ``datasets``, which copies them to its cache once.

    Args:
        builder: Name of a builder of ``datasets``.
        files: Files of each part.
    """
    with quiet_datasets() as datasets:
        try:
            loaded = datasets.load_dataset(builder, data_files=files)
        except Exception as error:  # a damaged file surfaces as one of several classes
            cause = error.__cause__ or error
            raise DataError(f"The files {files} cannot be read: {cause}") from error
    return loaded["train"].data.table, loaded["test"].data.table if "test" in loaded else None


def file_tables(path: Path, csv: CsvSpec = DETECTED) -> tuple[Any, Any | None]:
    """Rows of a table's file, or of a folder of them; the test part is None where there is none.

    Args:
        path: File or folder.
        csv: Format of CSV files.
    """
    train, test = table_files(path)
    return concatenate_tables(train, csv), concatenate_tables(test, csv) if test else None


def table_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of the training and of the test part of a table; of the latter there may be none.

    Raises:
        DataError: There is no file of a kind that can be read.
    """
    if path.is_dir():
        for suffix in TABLES:
            train, test = (split_files(path, split, suffix) for split in ("train", "test"))
            if train:
                return train, test
        raise DataError(f"{path} holds no train*.parquet, no train*.csv and no train*.jsonl.")
    if path.suffix.lower() not in TABLES:
        raise DataError(f"{path} is neither a .csv nor a .jsonl nor a .parquet file.")
    return [path], files_with_suffix(path.parent.glob("test.*"), path.suffix)[:1] if path.stem == "train" else []


def concatenate_tables(files: list[Path], csv: CsvSpec = DETECTED) -> Any:
    """The rows of several files, one after the other.

    Args:
        files: Files to read.
        csv: Format of CSV files.
    """
    parts = []
    for number, file in enumerate(files):
        report_progress("files read", number, len(files))
        parts.append(read_file(file, csv))
    for file, part in zip(files, parts, strict=True):
        if part.column_names != parts[0].column_names:
            raise DataError(f"{file} has the columns {part.column_names}, {files[0]} has {parts[0].column_names}.")
    import pyarrow as pa

    return pa.concat_tables(parts, promote_options="permissive")


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """The ``datasets`` package with its progress bars and warnings off."""
    try:
        datasets: Any = import_module("datasets")
        hub: Any = import_module("huggingface_hub.utils")
    except ImportError as error:
        raise DataError("This data set needs the package datasets: pip install 'unskew[hub]'.") from error
    levels = datasets.logging.get_verbosity(), hub.logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled(), hub.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    hub.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    hub.disable_progress_bars()
    try:
        yield datasets
    finally:
        datasets.logging.set_verbosity(levels[0])
        hub.logging.set_verbosity(levels[1])
        if not bars[0]:
            datasets.enable_progress_bars()
        if not bars[1]:
            hub.enable_progress_bars()
