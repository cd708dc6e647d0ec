"""Absolute paths in configurations, so that a run folder can be used from any working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unskew.config.experiment import Experiment
from unskew.data.sources.registry import PATHS
from unskew.data.spec import TABLES
from unskew.models.names import HUB, split_models

PREFIXES = (*PATHS, "text", "trace", HUB.rstrip(":"))
"""Prefixes of names that continue with a path, as in ``table:PATH``."""


def absolute_if_exists(path: str | None) -> str | None:
    """Return an existing path as an absolute path; others are returned unchanged."""
    if path is None:
        return None
    try:
        full_path = Path(path).expanduser()
        return str(full_path.absolute()) if full_path.exists() else path
    except (OSError, RuntimeError):  # the name is too long, or the home directory of an unknown user
        return path


def absolute_source_name(name: Any) -> Any:
    """Return a name such as ``table:PATH`` or ``patients.csv`` with an absolute path; other names unchanged."""
    if not isinstance(name, str):
        return name
    prefix, colon, path = name.partition(":")
    if colon and prefix in PREFIXES:
        return f"{prefix}:{absolute_if_exists(path)}"
    return absolute_if_exists(name) if name.lower().endswith(TABLES) else name


def with_absolute_paths(config: Experiment) -> Experiment:
    """Return the configuration with all existing paths made absolute."""
    paths = {
        name: absolute_if_exists(getattr(config, name))
        for name in ("data_path", "server_data_path", "synthetic", "start_from")
    }
    names = {
        name: absolute_source_name(getattr(config, name))
        for name in ("data", "server_data")
        if config.data_path is None or name != "data"
    }
    names["model"] = ",".join(str(absolute_source_name(name)) for name in split_models(config.model))
    tokenizer = config.text.tokenizer
    if tokenizer is not None and Path(tokenizer).expanduser().is_dir():
        tokenizer = absolute_if_exists(tokenizer)
    text = config.text.model_copy(update={"tokenizer": tokenizer})
    files = {"delay": absolute_source_name(config.network.delay), "trace": absolute_if_exists(config.network.trace)}
    network = config.network.model_copy(update=files)
    return config.model_copy(update={**paths, **names, "text": text, "network": network})


def without_data_locations(values: dict[str, Any]) -> dict[str, Any]:
    """Return configuration values without the locations of data, which may change before a run is resumed."""
    prefixes = {name: str(values.get(name)).partition(":")[0] for name in ("data", "server_data")}
    moved = {name: prefix for name, prefix in prefixes.items() if prefix in PREFIXES}
    files = {name: "table" for name in ("data", "server_data") if str(values.get(name)).lower().endswith(TABLES)}
    return {**values, **files, **moved, "data_path": None, "server_data_path": None}
