"""Loading of validated experiments from plain values, YAML files and ``--set`` assignments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unskew.attacks.registry import OPTIONS
from unskew.config.experiment import Experiment
from unskew.config.other_names import OF_OTHERS
from unskew.config.trust import check_trusted
from unskew.config_fields import check_keys, validate_fields
from unskew.errors import ConfigError
from unskew.filesystem import read_file

if TYPE_CHECKING:
    from unskew.protocol.rules import Method


def experiment(values: dict[str, Any], method: Method | None = None) -> Experiment:
    """Build a validated experiment from plain values.

    Args:
        values: Fields by name.
        method: Method object of a run started from Python, if any; its name in ``values`` need then not be registered.

    Raises:
        ConfigError: If a key is unknown, or a value has the wrong type or is out of range.
    """
    return validate_fields(Experiment, values, {"method_given": method is not None}, OF_OTHERS, OPTIONS)


class Loader(yaml.SafeLoader):
    """YAML loader for plain values that rejects aliases, tags, duplicate keys and base-60 numbers.

    It does not use PyYAML's C parser, which crashes on deeply nested text.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Reject aliases, which can expand a few bytes to gigabytes, and tags, which construct arbitrary types.

        Args:
            parent: Parent of the node.
            index: Position in the parent.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _wrong(f"the alias *{event.anchor} is not supported; repeat the value instead", event)
        tag = getattr(event, "tag", None)
        if tag is not None:
            written = tag.replace("tag:yaml.org,2002:", "!!")
            raise _wrong(f"the tag {written} is not supported; remove it", event)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Reject merge keys, and duplicate keys, of which PyYAML would silently use the last."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == "tag:yaml.org,2002:merge":
                raise _wrong("the merge key << is not supported; repeat the values instead", key)
            if key.value in seen:
                raise _wrong(f"the key {key.value!r} occurs twice; remove one of them", key)
            seen.add(key.value)
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Reject base-60 numbers, which YAML 1.1 reads from times such as 12:30."""
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and ":" in node.value:
            raise _wrong(f"YAML reads {node.value} as a base-60 number; write it in quotes, or as a plain number", node)
        return super().construct_scalar(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Add the line number to the error for a value that cannot be read, such as the date 2020-13-45.

        Args:
            node: Node of a value.
            deep: Whether nested values are constructed immediately.
        """
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise _wrong(str(error), node) from error

    def construct_int(self, node: Any) -> int:
        """Read digits after a leading zero as a decimal number, as YAML 1.2 does; YAML 1.1 reads 010 as 8."""
        digits = self.construct_scalar(node).replace("_", "")
        return int(digits) if digits.lstrip("+-").isdigit() else int(digits, 0)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)


def _wrong(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


SHORT_FORMS = ("attack", "harmonize", "network", "text")
"""Sections that may be written as a single value."""
LISTS = ("features", "exclude", "categories", "dates", "text", "columns", "covariates", "split_by")
"""Fields with a list of column names, in which double quotes enclose a name with commas."""
COLUMNS = (*LISTS, "label", "image", "partition")
"""Fields that are names of columns, or contain some."""


def _read_as_names(node: Any, name: str = "", inner: bool = False) -> None:
    """Read names of columns as they are written, so that 3 and 2020-01-01 are not a number and a date there.

    True and false are rejected, because they may also be meant as an answer: ``split_by: no``.

    Args:
        node: Node of a value; changed in place.
        name: Field of the value, or empty for the whole configuration.
        inner: Whether the node is an item of a list.
    """
    if isinstance(node, yaml.MappingNode) and name in ("", "data", "harmonize", "text"):
        for key, value in node.value:
            if key.value and (key.value != "columns" or name in ("harmonize", "text")):
                _read_as_names(value, str(key.value))
    elif isinstance(node, yaml.MappingNode) and name in ("categories", "category_values"):
        for key, value in node.value:
            _read_as_names(key, "categories", True)
            _read_as_names(value, "categories")
    elif isinstance(node, yaml.SequenceNode) and name in COLUMNS:
        for item in node.value:
            _read_as_names(item, name, True)
    elif isinstance(node, yaml.ScalarNode) and name in COLUMNS and (inner or not node.tag.endswith(":null")):
        if node.tag.endswith(":bool"):
            remedy = f'write it in quotes if it is the name of a column: "{node.value}"'
            raise _wrong(f"YAML reads {node.value} as true or false; {remedy}", node)
        node.tag = "tag:yaml.org,2002:str"


def read_yaml(text: str, name: str = "") -> Any:
    """Parse a YAML document.

    Args:
        text: YAML text.
        name: Field whose value the text is, or empty for a whole configuration.

    Raises:
        ValueError: If the text is not valid YAML; the message contains the line number if there are several lines.
    """
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        _read_as_names(node, name)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark is not None and "\n" in text.strip() else ""
        raise ValueError(where + " ".join(str(error.problem).split())) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def load_config(
    path: Path, remedy: str | None, replaced: Mapping[str, Any] | None = None, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Read the fields of an experiment from a file that is not necessarily trusted.

    Args:
        path: Path of the file.
        remedy: Advice how to trust the file, for errors if it names code to import; None if the user trusts the file.
        replaced: Fields that the caller replaces; the file's values of these are neither validated nor returned.
        ignored: Fields that the caller does not use; they are not returned if they name code to import.

    Raises:
        ConfigError: If the file cannot be read, has an unknown field, or names code to import without being trusted.
    """
    values = without_fields(load_yaml(path), replaced or {})
    try:
        check_keys(values, Experiment, meant=OF_OTHERS)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if remedy is None:
        return values
    for name, value in tuple(values.items()):
        try:
            check_trusted({name: value}, Experiment, path, remedy)
        except ConfigError:
            if name not in ignored:
                raise
            del values[name]
            if name == "objective":
                values.pop("target", None)  # which is in the unit of the objective
    return values


def without_fields(values: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without those that are replaced; a section loses only its replaced fields, its short form none.

    Args:
        values: Fields by name.
        replaced: New values of fields.

    >>> without_fields({"seed": 1, "ray": {"address": "auto", "retries": 2}}, {"seed": 2, "ray": {"address": "local"}})
    {'ray': {'retries': 2}}
    """
    remaining = {}
    for name, value in values.items():
        section = isinstance(replaced.get(name), dict)
        if name not in replaced or (section and name in SHORT_FORMS and not isinstance(value, dict)):
            remaining[name] = value
        elif section and isinstance(value, dict):
            remaining[name] = without_fields(value, replaced[name])
    return remaining


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file without validating its fields; ``load_config`` reads the configuration of a run to create.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: If the file does not exist, is not valid YAML, has a duplicate key, or is not a mapping.
    """
    try:
        values = read_yaml(read_file(path).decode())
    except OSError as error:
        hint = "" if path.suffix or path.exists() else f" For data with this name, use --data {path}."
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.{hint}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a valid YAML file: {error}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        hint = ""
        from unskew.data.spec import TABLES

        if path.suffix.lower() in (*TABLES, ".npz"):
            hint = f" For data, use unskew init {path}, or --data {path}."
        raise ConfigError(f"{path} must contain a mapping of options, not a {type(values).__name__}.{hint}")
    return values


def set_field(values: dict[str, Any], assignment: str) -> None:
    """Apply an assignment ``any.field=value``, whose value is parsed as YAML.

    Args:
        values: Fields by name; changed in place.
        assignment: Assignment such as ``network.drop=0.1``.

    >>> values = {}
    >>> set_field(values, "network.drop=0.1")
    >>> values
    {'network': {'drop': 0.1}}
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {assignment!r} is not of the form any.field=value.")
    *sections, name = path.strip().split(".")
    field = "columns" if path.strip() == "text.columns" else "-" if sections else name
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {assignment!r}: {section!r} is a single value, not a section.")
        values = inner
    if text.lstrip().startswith("%") or (field in LISTS and text.lstrip().startswith('"')):
        # YAML would reject the format of a date and a list of names in quotes, or drop the quotes
        values[name] = text.strip()
        return
    try:
        values[name] = read_yaml(text, name=field)
    except ValueError as error:
        raise ConfigError(f"--set {assignment!r}: the value is not YAML: {error}.") from error
