"""From plain values, files and ``--set`` to a checked experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import yaml
from pydantic import BaseModel

from unskew.config.experiment import Experiment
from unskew.config.sections import CsvConfig, NetworkConfig, TextConfig
from unskew.errors import ConfigError, plain, shown, unknown

if TYPE_CHECKING:
    from unskew.protocol.rules import Method


def experiment(values: dict[str, Any], method: Method | None = None) -> Experiment:
    """A checked experiment from plain values.

    Args:
        values: Its fields.
        method: The run's method, where ``values`` only say how it is called: one given in Python may have a name that
            nobody else knows.

    Raises:
        ConfigError: An unknown key, a wrong type or a value out of range.
    """
    check_keys(values, Experiment)
    try:
        return Experiment.model_validate(values, context={"method_given": method is not None})
    except pydantic.ValidationError as error:
        errors = error.errors()
        # Of what a field may be, the kind that the value came nearest to: the one that was looked into the deepest.
        first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=lambda one: len(one["loc"]))
        fields = {
            *Experiment.model_fields,
            *NetworkConfig.model_fields,
            *TextConfig.model_fields,
            *CsvConfig.model_fields,
        }
        where = ".".join(str(piece) for piece in first["loc"] if piece in fields)
        reason = plain(first["msg"])
        if where == "device":
            from unskew.engines.catalogue import devices

            reason = f"the devices of this machine are {', '.join(devices())}"
        elif where == "loss":
            reason = "losses are auto, mse, mae, huber and huber:DELTA"
        raise ConfigError(
            f"{where}={shown(first['input'])} is not valid: {reason}." if where else f"{reason}."
        ) from error


def check_keys(values: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """Unknown keys are refused with the nearest known ones, also inside sections."""
    for key, value in values.items():
        if key not in model.model_fields:
            raise ConfigError(unknown("option", f"{prefix}{key}", [f"{prefix}{name}" for name in model.model_fields]))
        section = model.model_fields[key].annotation
        if isinstance(value, dict) and isinstance(section, type) and issubclass(section, BaseModel):
            check_keys(value, section, f"{prefix}{key}.")


class Twice(yaml.YAMLError):
    """A key stands twice in one mapping; YAML itself would silently keep the last."""


class Loader(yaml.SafeLoader):
    """Plain values only, and each key once. PyYAML's part in C would crash on a text that is nested deeply."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As it is written, before anything is merged into it."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise Twice(f"gives {twice!r} twice; keep one of the two")
        return node


def read_yaml(text: str) -> Any:
    """The value that a text means.

    Raises:
        Twice: A key is given twice.
        yaml.YAMLError, ValueError, RecursionError: It is not YAML.
    """
    return yaml.load(text, Loader)  # nosec B506


def load_yaml(path: Path) -> dict[str, Any]:
    """The values of a configuration file.

    Raises:
        ConfigError: The file is missing, is not YAML, gives a key twice, or is not a mapping.
    """
    try:
        values = read_yaml(path.read_text())
    except OSError as error:
        hint = "" if path.suffix or path.exists() else f" For data of that name take --data {path}."
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.{hint}") from error
    except Twice as error:
        raise ConfigError(f"{path} {error}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a YAML file: {' '.join(str(error).split())}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        hint = ""
        from unskew.data.reading.files import TABLES

        if path.suffix.lower() in (*TABLES, ".npz"):
            hint = f" For data, take unskew init {path}, or --data {path}."
        raise ConfigError(f"{path} must hold a mapping of options, not a {type(values).__name__}.{hint}")
    return values


def set_field(values: dict[str, Any], assignment: str) -> None:
    """Apply ``any.field=value``; the value is read as YAML.

    >>> values = {}
    >>> set_field(values, "network.drop=0.1")
    >>> values
    {'network': {'drop': 0.1}}
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {assignment!r} is not of the form any.field=value.")
    *sections, name = path.strip().split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {assignment!r}: {section!r} is a single value, not a section.")
        values = inner
    try:
        values[name] = read_yaml(text)
    except Twice as error:
        raise ConfigError(f"--set {assignment!r} {error}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {assignment!r}: the value is not YAML.") from error
