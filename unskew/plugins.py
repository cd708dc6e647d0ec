"""Plugins of installed packages, found by entry points, such as methods, models and data sources.

A package declares a plugin in its ``pyproject.toml``::

    [project.entry-points."unskew.methods"]
    humble = "my_package.rules:Humble"

Installed packages are searched only for unknown names and for lists of names, because a search takes time.
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
SAMPLERS = "unskew.samplers"
TRACKERS = "unskew.trackers"
GROUPS = (METHODS, MODELS, DATA, PARTITIONS, SAMPLERS, ENGINES, TRACKERS)


@dataclass(frozen=True)
class Plugin:
    """A plugin of an installed package.

    Attributes:
        group: One of ``GROUPS``.
        name: Name of the plugin, lowercase.
        package: Name and version of the package.
        entry: The entry point.
    """

    group: str
    name: str
    package: str
    entry: importlib.metadata.EntryPoint

    def load(self) -> Any:
        """Import the object of the plugin.

        Raises:
            ConfigError: If the package cannot be imported, or has no such object.
        """
        try:
            return self.entry.load()
        except Exception as error:  # importing another package may raise any error
            raise ConfigError(
                f"The package {self.package} provides {self.name!r} ({self.group}), but it cannot be loaded "
                f"({type(error).__name__}: {error}). Repair or remove the package."
            ) from error

    def load_callable(self) -> Callable[..., Any]:
        """Import the function or class of the plugin.

        Raises:
            ConfigError: If the plugin cannot be loaded, or is not callable.
        """
        target: Callable[..., Any] = self.load()
        if callable(target):
            return target
        raise ConfigError(
            f"The package {self.package} provides {self.name!r} ({self.group}), which is not a function or class."
        )


def list_plugins(group: str) -> dict[str, Plugin]:
    """Return the plugins of installed packages by lowercase name; the first one with a name is used."""
    return _plugins(group, tuple(sys.path), os.getcwd())


@functools.lru_cache(maxsize=8)
def _plugins(group: str, path: tuple[str, ...], here: str) -> dict[str, Plugin]:
    """Search ``path`` for plugins. A package in the working directory is ignored, unless it is unskew itself."""
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
    """Return the plugin with a name.

    Args:
        group: One of ``GROUPS``.
        kind: Kind of the plugin in error messages, such as ``method``.
        name: Name of the plugin; case does not matter.
        existing: Names that unskew itself provides, for the error message.

    Raises:
        ConfigError: If no installed package provides the name.
    """
    others = list_plugins(group)
    if name.lower() in others:
        return others[name.lower()]
    raise ConfigError(unknown_name(kind, name, [*existing, *others]))
