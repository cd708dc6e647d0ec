"""Downloads of data named by a URL, such as ``s3://``, ``gs://``, ``https://`` or ``file://``.

Downloaded files are stored in the user's cache under a key of their sizes and versions. So files are downloaded again
only if they changed at their source, or if their source reports neither.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

from unskew.data.spec import DataSpec
from unskew.errors import ConfigError, DataError, explain_missing
from unskew.filesystem import make_folder, user_cache
from unskew.folder_locks import file_lock

SCHEME = "://"
VERSIONS = (
    *("size", "ETag", "etag", "mtime", "created", "LastModified", "md5Hash", "generation"),
    *("Last-Modified", "Content-MD5", "Digest"),  # of HTTP, with size and ETag
)
"""Attributes by which file systems report that a file has changed."""


def with_local_files(spec: DataSpec) -> DataSpec:
    """Return the specification with URLs replaced by downloaded local files.

    Args:
        spec: Specification of the data.

    Raises:
        ConfigError: If the package that reads the URL is not installed.
        DataError: If the file does not exist or cannot be reached.
    """
    local_values: dict[str, Any] = {}
    for name in ("data", "data_path", "server_data", "server_data_path"):
        value = getattr(spec, name)
        if isinstance(value, str) and SCHEME in value:
            prefix, _, rest = value.partition(":")
            url = value if rest.startswith("//") else rest
            local_file = fetch(url)
            local_values[name] = f"{prefix}:{local_file}" if url is rest else str(local_file)
    return spec.model_copy(update=local_values) if local_values else spec


def fetch(url: str) -> Path:
    """Download the file or folder at ``url`` unless it is cached, and return its local path.

    Args:
        url: Address that fsspec can open.

    Raises:
        ConfigError: If the package that reads the URL is not installed.
        DataError: If the file does not exist or cannot be reached.
    """
    with explain_missing(f"Reading {url!r} requires fsspec: pip install 'unskew[cloud]'."):
        from fsspec.core import url_to_fs
    try:
        system, path = url_to_fs(url)
        if "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
            return Path(path)
        listed = system.find(path, detail=True)
        files = {name: about for name, about in listed.items() if name == path or not is_sort_link(name)}
        stripped = path if path in files else path.rstrip("/")
        local = without_query(stripped)
        if list(files) == [stripped] and Path(local).stem == "train":
            # A test.csv next to train.csv belongs to the same data set.
            query = stripped.removeprefix(local)
            neighbor = f"{local.rpartition('/')[0]}/test{Path(local).suffix}{query}"
            files |= system.find(neighbor, detail=True) if system.exists(neighbor) else {}
        if not files:
            raise DataError(f"There is no file or folder at {url}.")
        return _kept(url, system, stripped, files)
    except (ImportError, ValueError) as error:  # fsspec's message names the missing package or the unknown scheme
        raise ConfigError(f"Data at {url!r} cannot be read: {error}") from error
    except DataError:
        raise
    except Exception as error:  # each file system raises its own exceptions
        raise DataError(
            f"{url} cannot be reached: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _kept(url: str, system: Any, path: str, files: dict[str, dict[str, Any]]) -> Path:
    """Download files into the cache unless they are already there."""
    versions = {name: versions_of(about) or versions_of(system.info(name)) for name, about in files.items()}
    key = hash_json([url, versions])
    base = user_cache() / "data"
    local = Path(without_query(path))
    # A single file is stored in a folder with the name of its original folder, because a table is named after it.
    folder, top = base / key, Path(local.parent.name if path in files else "")
    make_folder(base)
    with file_lock(base / f".{key}.lock", math.inf):
        if not folder.exists() or not all(versions.values()):
            fresh = base / f".{key}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            for name in files:
                inside = Path(without_query(name)).name
                if path not in files:
                    inside = f"{local.name}/{without_query(name).removeprefix(path).lstrip('/')}"
                target = fresh / top / inside
                if fresh.resolve() not in target.resolve().parents:
                    raise DataError(f"{url} contains a file named {name!r}, which points outside its folder.")
                make_folder(target.parent)
                system.get_file(name, str(target))
                if not versions[name]:
                    with target.open("rb") as content:
                        versions[name] = {"sha256": hashlib.file_digest(content, "sha256").hexdigest()}
            folder = base / hash_json([url, versions])
            if folder.exists():
                shutil.rmtree(fresh)
            else:
                os.replace(fresh, folder)
    return folder / top / local.name


def without_query(path: str) -> str:
    """Return the address of a file on a web server without its query, such as ``?download=true``; other paths unchanged.

    >>> without_query("https://host/a.csv?token=1/2"), without_query("bucket/a?.csv")
    ('https://host/a.csv', 'bucket/a?.csv')
    """
    return re.split("[?#]", path, maxsplit=1)[0] if path.startswith(("http://", "https://")) else path


def is_sort_link(name: str) -> bool:
    """Return whether an address in the listing of a folder is the folder itself in another order, as in Apache's."""
    return without_query(name) != name and without_query(name).endswith("/")


def versions_of(about: dict[str, Any]) -> dict[str, str]:
    """Return the size and the versions that a file system reports of a file; empty if it reports none."""
    return {key: str(about[key]) for key in VERSIONS if about.get(key) is not None}


def hash_json(value: object) -> str:
    """Return a short hash of a value in JSON format, as a name of a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
