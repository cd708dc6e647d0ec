"""Plugins of other packages for the listing commands; a broken plugin gives a warning and is skipped."""

from __future__ import annotations

import sys
from typing import Any

from unskew import plugins
from unskew.errors import ConfigError


def plugin_methods() -> list[dict[str, Any]]:
    """Describe the methods of other packages as ``methods.registry.describe_all`` does, with their ``package``."""
    rows: list[dict[str, Any]] = []
    for name, plugin in sorted(plugins.list_plugins(plugins.METHODS).items()):
        from unskew.methods.descriptions import describe_method
        from unskew.methods.registry import METHODS

        if name in METHODS:
            _warn(
                f"The method {name!r} of the package {plugin.package} is ignored, because unskew has a method {name!r}."
            )
            continue
        try:
            rows.append({**describe_method(name), "package": plugin.package})
        except ConfigError as error:
            _warn(str(error))
    return rows


def plugin_models() -> list[dict[str, Any]]:
    """Return the models of other packages as rows of ``unskew models``."""
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
    """Return one line for each kind of plugin: models, data and partitions."""
    lines = []
    for group, what in ((plugins.MODELS, "models"), (plugins.DATA, "data"), (plugins.PARTITIONS, "partitions")):
        names = [f"{name} [{plugin.package}]" for name, plugin in sorted(plugins.list_plugins(group).items())]
        if names:
            lines.append(f"{what.capitalize()} of other packages: {', '.join(names)}")
    return lines


def _warn(text: str) -> None:
    print(f"unskew: {text}", file=sys.stderr)
