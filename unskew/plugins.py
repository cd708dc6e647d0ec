"""Plugins of installed packages, found by entry points: methods, models, data sources, partitions and engines, by name.

A package says in its ``pyproject.toml``::

    [project.entry-points."unskew.methods"]
    humble = "my_package.rules:Humble"

Nothing is looked up unless a name is not known here, or names are listed: to look costs time at every start.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.errors import ConfigError, unknown_name

METHODS = "unskew.methods"
MODELS = "unskew.models"
DATA = "unskew.data"
PARTITIONS = "unskew.partitions"
ENGINES = "unskew.engines"
GROUPS = (METHODS, MODELS, DATA, PARTITIONS, ENGINES)


@dataclass(frozen=True)
class Plugin:
    """One thing that a package offers.

    Attributes:
        group: One of ``GROUPS``.
        name: How it is written.
        package: The package's name and version.
        entry: The entry point.
    """

    group: str
    name: str
    package: str
    entry: importlib.metadata.EntryPoint

    def load(self) -> Any:
        """The object itself.

        Raises:
            ConfigError: The package cannot be imported, or has no such object.
        """
        try:
            return self.entry.load()
        except Exception as error:  # a package of somebody else's may fail in any way
            raise ConfigError(
                f"The package {self.package} offers {self.name!r} ({self.group}), but it cannot be loaded "
                f"({type(error).__name__}: {error}). Repair or remove the package."
            ) from error

    def load_callable(self) -> Callable[..., Any]:
        """The object, which is a function or a class.

        Raises:
            ConfigError: The plugin cannot be loaded, or is not callable.
        """
        target: Callable[..., Any] = self.load()
        if callable(target):
            return target
        raise ConfigError(
            f"The package {self.package} offers {self.name!r} ({self.group}), which is not a function and no class."
        )


def list_plugins(group: str) -> dict[str, Plugin]:
    """Return the plugins of installed packages by lowercase name; the first of a name wins."""
    return _plugins(group, tuple(sys.path), os.getcwd())


@functools.lru_cache(maxsize=8)
def _plugins(group: str, path: tuple[str, ...], here: str) -> dict[str, Plugin]:
    """Search ``path``. A package in the working directory counts as not installed, unless it is unskew itself."""
    found_plugins: dict[str, Plugin] = {}
    for entry in importlib.metadata.entry_points(group=group):
        dist = entry.dist
        if (
            dist is not None
            and dist.name != "unskew"
            and Path(str(dist.locate_file(""))).resolve() == Path(here).resolve()
        ):
            continue
        package = "an unnamed package" if dist is None else f"{dist.name} {dist.version}"
        found_plugins.setdefault(entry.name.lower(), Plugin(group, entry.name.lower(), package, entry))
    return found_plugins


def find_plugin(group: str, kind: str, name: str, existing: Iterable[str]) -> Plugin:
    """The plug-in of this name.

    Args:
        group: One of ``GROUPS``.
        kind: What it is called in an error.
        name: As it was written.
        existing: Names that unskew itself knows, for the error.

    Raises:
        ConfigError: No installed package offers the name.
    """
    others = list_plugins(group)
    if name.lower() in others:
        return others[name.lower()]
    raise ConfigError(unknown_name(kind, name, [*existing, *others]))
