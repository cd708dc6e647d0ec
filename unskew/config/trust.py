"""Trust in files: code to import is named on the command line, in Python, or in a file that the user trusts.

A field that can name code, or a place outside the run folder, is annotated with ``NamesCode``. ``check_trusted`` validates
the values of an untrusted file when the file is read; what it accepts names only what is registered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from pydantic import BaseModel

from unskew.config.metrics import is_custom_metric
from unskew.config_fields import inner_section
from unskew.errors import ConfigError
from unskew.expressions import parse_names
from unskew.methods.registry import check_expression
from unskew.models.names import HUB, split_models
from unskew.protocol.search_space import parse_range

TRUST = "add --trust-code (in Python trust_code=True)"
"""Advice how to trust a file."""
NOT_OF_MODEL = ("engine", "metrics", "objective", "ray", "trackers")
"""Fields on which the model of a run does not depend: if only the model is loaded, code that they name is not imported."""


@dataclass(frozen=True)
class NamesCode:
    """Annotation of a field whose text can name code to import, or a place outside the run folder.

    Attributes:
        what: Phrase for a rejected text in error messages, with ``{text}``.
        is_safe: Returns whether a text names only what is registered.
    """

    what: str
    is_safe: Callable[[str], bool]


def no_import_path(text: str) -> bool:
    """Return whether no part of a text is an import path ``package.module:name``: only numbers follow a colon."""
    return re.search(r":(?!\s*[-+.]?[0-9])", text) is None


def is_registered_method(expression: str) -> bool:
    """Return whether a method expression names no class by import path, and no option has an import path."""
    try:
        parts = check_expression(expression)
    except ConfigError:  # such a method is never created
        return True
    return all("." not in name and no_import_path(rest) for name, _, rest in (part.partition(":") for part in parts))


def is_registered_model(name: str) -> bool:
    """Return whether each of one or several models is registered, belongs to a plugin, or is on the Hugging Face Hub."""
    return all(":" not in each or each.startswith(HUB) for each in split_models(name))


def is_built_in_metric(names: str) -> bool:
    """Return whether none of the metrics in a comma-separated list is a custom metric."""
    return not any(map(is_custom_metric, parse_names(names)))


def is_on_this_machine(address: str) -> bool:
    """Return whether a cluster is on this machine; a cluster on another machine can run programs here."""
    host = address.rpartition(":")[0].strip("[]")
    if address in ("local", "auto") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


METHOD = NamesCode("code to import, the method {text!r}", is_registered_method)
MODEL = NamesCode("code to import, the model {text!r}", is_registered_model)
METRIC = NamesCode("code to import, the metric {text!r}", is_built_in_metric)
ENGINE = NamesCode("options of an engine, {text!r}", lambda text: not {":", ","} & {*text})
CLUSTER = NamesCode("a Ray cluster, {text}, which can run programs on this machine", is_on_this_machine)
TRACKER = NamesCode(
    "the tracker {text!r}, which can write outside the run folder or send metrics to a server",
    lambda text: text == "tensorboard",
)
SPACE = NamesCode("code to import, the option {text!r}", no_import_path)


def texts_in(value: object) -> Iterator[str]:
    """Find all texts in a value, at any depth.

    Args:
        value: Value from a file; a model may be a mapping such as ``{"hf": "facebook/opt-125m"}``.

    Yields:
        Each text.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from (HUB + text if key == "hf" else text for text in texts_in(entry))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_in(entry)


def check_trusted(values: Mapping[str, Any], model: type[BaseModel], source: object, remedy: str) -> None:
    """Validate that values from an untrusted file name only what is registered.

    Args:
        values: Fields by name, as they were read.
        model: Section of the configuration.
        source: The file, for error messages.
        remedy: Advice how to trust the file.

    Raises:
        ConfigError: If a field names code to import, or a place outside the run folder.
    """
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None:  # an unknown field is an error later
            continue
        section = inner_section(field)
        if isinstance(value, Mapping) and section is not None:
            check_trusted(value, section, source, remedy)
        for rule in field.metadata:
            if isinstance(rule, NamesCode):
                check_texts(rule, name, value, source, remedy)


def check_texts(rule: NamesCode, name: str, value: object, source: object, remedy: str) -> None:
    """Validate a value of an untrusted file.

    Args:
        rule: Annotation of the value's field.
        name: Name of the field.
        value: The value.
        source: The file, for error messages.
        remedy: Advice how to trust the file.

    Raises:
        ConfigError: If the value names code to import, or a place outside the run folder.
    """
    for text in texts_in(value):
        if not rule.is_safe(text):
            what = rule.what.format(text=text)
            raise ConfigError(
                f"{name} in {source} names {what}. To use it, set {name} yourself, or trust the file: {remedy}."
            )


def check_spaces(spaces: Mapping[str, Any], source: object, remedy: str) -> None:
    """Validate that search spaces from an untrusted file contain no import path.

    Args:
        spaces: Search spaces by option, as they were read.
        source: The file, for error messages.
        remedy: Advice how to trust the file.

    Raises:
        ConfigError: If a value of an option is an import path.
    """
    for name, space in spaces.items():
        if not (isinstance(space, str) and parse_range(space)):
            check_texts(SPACE, name, space, source, remedy)
