"""Warnings that are logged while data are loaded: collected for the run folder, and repeated if the data are cached."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Generic, ParamSpec, TypeVar

from unskew.data.files_read import FileVersion, collect_files, file_version

LOG = logging.getLogger("unskew")
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def collect_warnings(shown: bool = True) -> Iterator[list[str]]:
    """Context manager that collects the warnings that this thread logs.

    Args:
        shown: Whether they are also shown now.

    Yields:
        The warnings so far, each once.
    """
    texts: list[str] = []
    thread = threading.get_ident()

    def collect(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.thread != thread:
            return True
        if record.getMessage() not in texts:
            texts.append(record.getMessage())
        return shown

    LOG.addFilter(collect)
    try:
        yield texts
    finally:
        LOG.removeFilter(collect)


class CachedLoader(Generic[P, T]):
    """Cache of the most recent results of a function; a cached result logs the warnings of its computation again.

    Results are computed again if a file changed that the function reads and records with ``record_file``.

    Args:
        load: Function of hashable arguments.
        size: Number of results.
    """

    def __init__(self, load: Callable[P, T], size: int):
        def compute(*args: P.args, **kwargs: P.kwargs) -> tuple[T, list[str], dict[str, FileVersion]]:
            with collect_warnings(shown=False) as texts, collect_files() as files:
                return load(*args, **kwargs), texts, files

        self._cached = lru_cache(size)(compute)
        self.cache_clear = self._cached.cache_clear

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result, computed or cached."""
        # The annotation of lru_cache has no ParamSpec: its arguments are any hashable values.
        result, texts, files = self._cached(*args, **kwargs)  # type: ignore[arg-type]
        if any(file_version(file) != version for file, version in files.items()):
            self.cache_clear()  # lru_cache cannot remove a single result
            result, texts, _ = self._cached(*args, **kwargs)  # type: ignore[arg-type]
        for text in texts:
            LOG.warning("%s", text)
        return result
