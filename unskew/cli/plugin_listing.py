"""Plugins of other packages for the listing commands. A broken plugin is reported, and the others are listed."""

from __future__ import annotations

import sys
from typing import Any

from unskew import plugins
from unskew.errors import ConfigError


def plugin_methods() -> list[dict[str, Any]]:
    """The methods of other packages, as ``unskew.methods.registry.describe_all`` has them, with their ``package``."""
    rows: list[dict[str, Any]] = []
    for name, plugin in sorted(plugins.list_plugins(plugins.METHODS).items()):
        from unskew.methods.registry import METHODS, describe_method

        if name in METHODS:
            _warn(f"The package {plugin.package} offers a method {name!r}; unskew's own of that name is taken.")
            continue
        try:
            rows.append({**describe_method(name), "package": plugin.package})
        except ConfigError as error:
            _warn(str(error))
    return rows


def plugin_models() -> list[dict[str, Any]]:
    """The models of other packages as rows of ``unskew models``."""
    rows = []
    for name, plugin in sorted(plugins.list_plugins(plugins.MODELS).items()):
        try:
            text = (getattr(plugin.load_callable(), "__doc__", None) or "").strip().partition("\n")[0]
        except ConfigError as error:
            _warn(str(error))
            continue
        rows.append({"name": name, "description": text, "reference": plugin.package, "groupable": None})
    return rows


def plugin_data_and_partitions() -> list[str]:
    """Return one line per kind of plugin: models, data and partitions."""
    lines = []
    for group, what in ((plugins.MODELS, "models"), (plugins.DATA, "data"), (plugins.PARTITIONS, "partitions")):
        names = [f"{name} [{plugin.package}]" for name, plugin in sorted(plugins.list_plugins(group).items())]
        if names:
            lines.append(f"Other packages' {what}: {', '.join(names)}")
    return lines


def _warn(text: str) -> None:
    print(f"unskew: {text}", file=sys.stderr)
