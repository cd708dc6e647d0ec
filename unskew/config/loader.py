"""From plain values, files and ``--set`` to a checked experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import yaml
from pydantic import BaseModel

from unskew.config.experiment import Experiment
from unskew.config.renamed import FORMER_FIELDS, OF_OTHERS
from unskew.config.sections import CsvConfig, NetworkConfig, TextConfig
from unskew.errors import ConfigError, plain_message, short_repr, unknown_name
from unskew.filesystem import read_file
from unskew.provenance import TRUST, UntrustedText

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
        first = max(
            (detail for detail in errors if detail["loc"][:1] == errors[0]["loc"][:1]),
            key=lambda detail: len(detail["loc"]),
        )
        fields = {
            *Experiment.model_fields,
            *NetworkConfig.model_fields,
            *TextConfig.model_fields,
            *CsvConfig.model_fields,
        }
        where = ".".join(str(part) for part in first["loc"] if part in fields)
        reason = plain_message(first["msg"])
        if where == "device":
            from unskew.engines.registry import available_devices

            reason = f"the devices of this machine are {', '.join(available_devices())}"
        elif where == "loss":
            reason = "losses are auto, mse, mae, huber and huber:DELTA"
        raise ConfigError(
            f"{where}={short_repr(first['input'])} is not valid: {reason}." if where else f"{reason}."
        ) from error


def check_keys(values: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """Unknown keys are refused with the nearest known ones, also inside sections.

    Args:
        values: Fields by name.
        model: Section of the configuration.
        prefix: Name of the section with a dot, for the error.
    """
    for key, value in values.items():
        if key not in model.model_fields:
            known = [f"{prefix}{name}" for name in model.model_fields]
            sentence = unknown_name(
                "option", f"{prefix}{key}", known, meant=OF_OTHERS.get(key) if model is Experiment else None
            )
            raise ConfigError(f"{key.source}: {sentence}" if isinstance(key, UntrustedText) else sentence)
        section = model.model_fields[key].annotation
        if isinstance(value, dict) and isinstance(section, type) and issubclass(section, BaseModel):
            check_keys(value, section, f"{prefix}{key}.")


class Loader(yaml.SafeLoader):
    """Plain values only, each key once, and nothing that YAML reads otherwise than people do.

    PyYAML's part in C would crash on a text that is nested deeply.
    """

    origin: tuple[str, str] | None = None
    """Source and remedy of ``UntrustedText``; None: the text is trusted."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Reject aliases and tags: a few bytes of aliases mean gigabytes, and a tag names a type to construct.

        Args:
            parent: Node that contains the next one.
            index: Position in the parent.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _wrong(f"the alias *{event.anchor} is not supported; write the value out", event)
        tag = getattr(event, "tag", None)
        if tag is not None:
            written = tag.replace("tag:yaml.org,2002:", "!!")
            raise _wrong(f"the tag {written} is not supported; remove it", event)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Reject merge keys, and keys that stand twice, of which YAML itself would silently keep the last."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == "tag:yaml.org,2002:merge":
                raise _wrong("the merge key << is not supported; write the values out", key)
            if key.value in seen:
                raise _wrong(f"the key {key.value!r} is there twice; keep one of the two", key)
            seen.add(key.value)
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Reject numbers to base 60, which YAML 1.1 reads in times of the day; mark text of an untrusted file."""
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and ":" in node.value:
            raise _wrong(f"{node.value} would be a number to base 60; write it in quotes, or as a plain number", node)
        value = super().construct_scalar(node)
        return UntrustedText(value, *self.origin) if kind == "str" and self.origin is not None else value

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Name the line of a value that cannot be read, such as the date 2020-13-45.

        Args:
            node: Node of a value.
            deep: Whether nested values are constructed at once.
        """
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise _wrong(str(error), node) from error


yaml.add_representer(
    UntrustedText, yaml.SafeDumper.represent_str, Dumper=yaml.SafeDumper
)  # what was read can be written


def _wrong(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def read_yaml(text: str, origin: tuple[str, str] | None = None) -> Any:
    """Read the value that a text means.

    Args:
        text: The text.
        origin: Source and remedy of ``UntrustedText``, for the text of a file that is not trusted.

    Raises:
        ValueError: If it is not YAML; the message names the line, if there are several.
    """
    try:
        loader = Loader(text)
        loader.origin = origin
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark is not None and "\n" in text.strip() else ""
        raise ValueError(where + " ".join(str(error.problem).split())) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def load_yaml(path: Path, remedy: str | None = TRUST) -> dict[str, Any]:
    """Read a configuration file.

    Args:
        path: The file.
        remedy: How the file can be trusted, for the error message if it names code to import; None: it is trusted.

    Raises:
        ConfigError: If the file is missing, is not YAML, has a key twice, or is not a mapping.
    """
    try:
        values = read_yaml(read_file(path).decode(), None if remedy is None else (str(path), remedy))
    except OSError as error:
        hint = "" if path.suffix or path.exists() else f" For data of that name take --data {path}."
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.{hint}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a valid YAML file: {error}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        hint = ""
        from unskew.data.spec import TABLES

        if path.suffix.lower() in (*TABLES, ".npz"):
            hint = f" For data, take unskew init {path}, or --data {path}."
        raise ConfigError(f"{path} must hold a mapping of options, not a {type(values).__name__}.{hint}")
    if path.name == "config.yaml" and values.keys() >= FORMER_FIELDS:  # a run folder's file names every field
        raise ConfigError(
            f"{path} was written by an earlier version of unskew, whose run folders this version does not read: repeat the "
            "run, or use that version."
        )
    return values


def set_field(values: dict[str, Any], assignment: str) -> None:
    """Apply ``any.field=value``; the value is read as YAML.

    Args:
        values: Fields by name, which are changed in place.
        assignment: Text such as ``network.drop=0.1``.

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
    except ValueError as error:
        raise ConfigError(f"--set {assignment!r}: the value is not YAML: {error}.") from error
