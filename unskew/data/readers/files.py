"""Loading of pyarrow tables from files, folders of files, and Hugging Face Hub data sets."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from unskew.data.csv_format import DETECTED, CsvSpec
from unskew.data.readers.arrow import pa, parquet
from unskew.data.readers.arrow_io import read_tables
from unskew.data.readers.cell_types import NO_USES, ColumnUses
from unskew.data.readers.class_names import check_same_class_names, with_common_class_names
from unskew.data.readers.column_roles import FILE
from unskew.data.readers.hub import UNREACHABLE, hub_or_cache
from unskew.data.readers.image_folders import LOG, SPLITS, is_hidden, visible_files
from unskew.data.spec import TABLES
from unskew.errors import ConfigError, DataError, abbreviate, explain_missing


class HubDataset(NamedTuple):
    """Data set on the Hugging Face Hub: its name, configuration, columns, and test split (None if it has none)."""

    name: str
    config: str | None
    image: str
    label: str
    test: str | None = "test"


def absolute_path(path: str | Path | None) -> Path | None:
    """Return the absolute path of an existing file or folder; None stays None.

    Args:
        path: Path to check, or None.

    Raises:
        DataError: If the path does not exist.
    """
    if path is None:
        return None
    where = Path(path).expanduser().absolute()
    if not where.exists():
        raise DataError(f"There is no file or folder at {where}.")
    return where


def files_stamp(path: Path | None) -> tuple[int, int, int]:
    """Return number, newest modification time and total size of the files below a path, to detect changes."""
    if path is None:
        return (0, 0, 0)
    # A single file includes the tables in its folder, because a test.csv next to a train.csv is read as well.
    files = visible_files(path) if path.is_dir() else [path, *files_with_suffix(path.parent.iterdir(), *TABLES)]
    stats = [file.stat() for file in files if file.is_file()]
    return len(stats), max((s.st_mtime_ns for s in stats), default=0), sum(s.st_size for s in stats)


def files_with_suffix(files: Iterable[Path], *suffixes: str) -> list[Path]:
    """Return the files with one of some suffixes, ignoring case, sorted; hidden files are skipped.

    Args:
        files: Files to choose from.
        *suffixes: Suffixes in lower case, including the dot.
    """
    return sorted(file for file in files if file.suffix.lower() in suffixes and not is_hidden(file.name))


def hub_tables(hub: HubDataset) -> tuple[Any, Any | None]:
    """Load training and test rows from the Hub, or from the cache of an earlier download."""
    with quiet_datasets() as datasets, hub_or_cache() as reached:
        try:
            loaded = datasets.load_dataset(hub.name, hub.config)
        except Exception as error:  # the network stack raises many types
            reason = f"{type(error).__name__}: {error}. You can also" if reached else UNREACHABLE
            raise DataError(
                f"{hub.name} could not be loaded: {reason} put its parquet files in a folder and set data_path "
                "(--data-path) to it, or server_data_path (--server-data-path) if they are the server's."
            ) from error
    return loaded["train"].data.table, loaded[hub.test].data.table if hub.test else None


def local_tables(kind: str, hub: HubDataset, path: Path) -> tuple[Any, Any | None]:
    """Load training and test rows from a local folder with the Hub's layout; ``datasets`` copies them to its cache.

    Args:
        kind: Name of the data set.
        hub: The data set on the Hub.
        path: Folder of the files.
    """
    paths = local_files(kind, hub, path)
    files = {split: [glob.escape(str(file)) for file in some] for split, some in paths.items()}
    with quiet_datasets() as datasets:
        try:
            loaded = datasets.load_dataset("parquet", data_files=files)
        except Exception as error:  # corrupted files raise several types
            raise DataError(f"The files {files} cannot be read: {error.__cause__ or error}") from error
    every = [file for some in paths.values() for file in some]
    check_same_class_names([parquet.read_schema(file) for file in every], every)  # datasets keeps only the first ones
    return loaded["train"].data.table, loaded["test"].data.table if "test" in loaded else None


def local_files(kind: str, hub: HubDataset, path: Path) -> dict[str, list[Path]]:
    """Return the parquet files of each split in a folder with the Hub's layout or in one of its subfolders.

    Args:
        kind: Name of the data set.
        hub: The data set on the Hub.
        path: Folder of the files.

    Returns:
        The files under the keys ``train`` and, if the data set has a test split, ``test``.

    Raises:
        DataError: If no folder contains the files of all splits.
    """
    parts = {"train": "train"} | ({} if hub.test is None else {"test": hub.test})
    inside = [path / hub.config] if hub.config else []
    for folder in [*inside, path, *sorted(entry for entry in path.glob("*") if entry.is_dir())]:
        files = {split: split_files(folder, name, ".parquet") for split, name in parts.items()}
        if all(files.values()):
            return files
    raise DataError(
        f"{path} does not contain {kind}. It must contain "
        f"{' and '.join(f'{name}*.parquet' for name in parts.values())}, in "
        f"the folder or one level down, as {hub.name} on the Hub."
    )


def split_files(folder: Path, split: str, *suffixes: str) -> list[Path]:
    """Return the files of one split: ``train*.parquet``, or all files of a folder ``train``.

    Args:
        folder: Folder to search.
        split: Name of the split, such as ``train`` or ``test``.
        *suffixes: Suffixes in lower case, including the dot.
    """
    named = [file for file in folder.iterdir() if file.name.lower().startswith(split)]
    return files_with_suffix(named, *suffixes) or files_with_suffix((folder / split).glob("*"), *suffixes)


def file_tables(path: Path, csv: CsvSpec = DETECTED, uses: ColumnUses = NO_USES) -> tuple[Any, Any | None]:
    """Load training and test rows from a table file or a folder of such files; test rows may be None.

    Args:
        path: File or folder.
        csv: Format of CSV files; its ``missing`` and ``dates`` also apply to other files.
        uses: Uses of the columns.

    Raises:
        ConfigError: If the format of CSV files is configured, but there is none.
        DataError: If a file cannot be read, or exists in several formats.
    """
    train, test = table_files(path)
    check_one_format([*train, *test])
    for_all = CsvSpec(missing=csv.missing, dates=csv.dates)
    if csv != for_all and not any(file.suffix.lower() == ".csv" for file in (*train, *test)):
        raise ConfigError(
            f"csv describes the format of CSV files, but {train[0]} is none. Remove all of its options except csv.missing "
            "and csv.dates."
        )
    if unread := unread_tables(path, [*train, *test]):
        LOG.warning("%s: not read, because neither train nor test: %s", path, abbreviate(unread))
    if unread := tables_in_subfolders(path, [*train, *test]):
        LOG.warning("%s: not read, because in a subfolder: %s", path, abbreviate(unread))
    tables = read_tables([*train, *test], csv, uses, len(train))
    rows, test_rows = concatenate_parts(tables, [*train, *test], len(train))
    if len(train) > 1 and FILE not in rows.column_names:
        names = [file.stem for file, table in zip(train, tables, strict=False) for _ in range(table.num_rows)]
        rows = rows.append_column(FILE, pa.array(names, pa.string()))
    return rows, test_rows


def table_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training files and the test files of a table; there may be no test files.

    Args:
        path: File, or folder of files, which may have different formats. If no name begins with train, all files that do
            not begin with test are training files, as if each came from one site.

    Raises:
        DataError: If there is no file in a supported format.
    """
    if path.is_dir():
        train, test = (split_files(path, split, *TABLES) for split in ("train", "test"))
        train = train or [file for file in files_with_suffix(path.iterdir(), *TABLES) if file not in test]
        if not train:
            raise DataError(f"{path} contains no .parquet, .csv or .jsonl file with training rows.")
        return train, test
    if path.suffix.lower() not in TABLES:
        raise DataError(f"{path} is neither a .csv nor a .jsonl nor a .parquet file.")
    if path.stem != "train":
        return [path], []
    tests = list(path.parent.glob("test.*"))
    return [path], files_with_suffix(tests, path.suffix.lower())[:1] or files_with_suffix(tests, *TABLES)


def check_one_format(files: Sequence[Path]) -> None:
    """Validate that no table exists in several formats, whose rows would be read twice.

    Args:
        files: Files to read.

    Raises:
        DataError: If two files differ only in their suffixes.
    """
    first: dict[Path, Path] = {}
    for file in files:
        other = first.setdefault(file.with_suffix(""), file)
        if other != file:
            raise DataError(
                f"{file.parent} contains {other.name} and {file.name}, which may have the same rows. Remove one of them, or "
                "rename it if it has other rows."
            )


def unread_tables(path: Path, read: list[Path]) -> list[str]:
    """Return the names of tables that are probably another part of the data set, such as ``validation.csv``.

    Args:
        path: File, or folder of files.
        read: Files that are read.
    """
    folder = path if path.is_dir() else path.parent
    stems = {file.stem for file in read}
    others = [file for file in files_with_suffix(folder.iterdir(), *TABLES) if file not in read]
    parts = {*SPLITS} - stems if path.stem == "train" else ()
    return [file.name for file in others if path.is_dir() or file.stem.lower() in parts]


def tables_in_subfolders(path: Path, read: list[Path]) -> list[str]:
    """Return the tables in subfolders that are not read, as paths below the folder.

    Args:
        path: File, or folder of files.
        read: Files that are read.
    """
    if not path.is_dir():
        return []
    others = [file for file in files_with_suffix(visible_files(path), *TABLES) if file not in read]
    return [file.relative_to(path).as_posix() for file in others if file.parent != path]


def concatenate_parts(tables: Sequence[Any], files: Sequence[Path], training: int) -> tuple[Any, Any | None]:
    """Concatenate the rows of the training files and those of the test files, with the same classes.

    Args:
        tables: Table of each file.
        files: Paths of the files, for errors.
        training: Number of training files, which come first.

    Returns:
        Training rows, and test rows or None.
    """
    tables = with_common_class_names(tables, files)
    train = concatenate_tables(tables[:training], files[:training])
    return train, concatenate_tables(tables[training:], files[training:]) if tables[training:] else None


def concatenate_tables(tables: Sequence[Any], files: Sequence[Path]) -> Any:
    """Concatenate the rows of several files.

    Args:
        tables: Table of each file, with the same columns.
        files: Paths of the files, for errors.

    Raises:
        DataError: If a column has types that cannot be combined.
    """
    names = tables[0].column_names
    for file, table in zip(files, tables, strict=True):
        if sorted(table.column_names) != sorted(names):
            raise DataError(f"{file} has the columns {table.column_names}, but {files[0]} has {names}.")
    try:
        return pa.concat_tables([table.select(names) for table in tables], promote_options="permissive")
    except pa.ArrowException:
        for name in names:
            for file, table in zip(files, tables, strict=True):
                kinds = [part.schema.field(name).type for part in (tables[0], table)]
                try:
                    pa.concat_tables([tables[0].select([name]), table.select([name])], promote_options="permissive")
                except pa.ArrowException as error:
                    raise DataError(
                        f"The column {name!r} contains {kinds[0]} in {files[0]}, but {kinds[1]} in {file}, such as "
                        f"{table.column(name).drop_null()[0].as_py()!r}. Write it in the same way in all files."
                    ) from error
        raise


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """Context manager that yields the ``datasets`` package with progress bars and warnings turned off."""
    with explain_missing("This data set requires the package datasets: pip install 'unskew[hub]'.", DataError):
        datasets: Any = import_module("datasets")
        hub: Any = import_module("huggingface_hub.utils")
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
