"""Import of objects by import path, and construction of objects from validated options.

Methods, generators, models and studies are named in a configuration. Their options are the fields of a dataclass, whose type
annotations define the allowed values.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, cast

import pydantic
from pydantic import Field

from unskew.errors import ConfigError, plain_message, short_repr, unknown_name

Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

LARGEST = 3.4e38
"""Largest magnitude of a numeric option; float32 cannot represent larger numbers."""

Built = TypeVar("Built")


def import_from_path(path: str, what: str) -> Any:
    """Import the object at ``package.module:name``; the working directory is searched last.

    Args:
        path: The module, and a name in it that may contain dots.
        what: Description of the path for error messages: ``the model 'package.module:name'``.

    Raises:
        ConfigError: If the object does not exist.
    """
    module_name, _, attribute = path.partition(":")
    named = all(module_name.split(".")) and all(map(str.isidentifier, attribute.split(".")))
    if not named or {"/", "\\"} & set(path):
        raise ConfigError(
            f"{what[0].upper()}{what[1:]} is not an import path. Use dotted names such as my_package.my_module, not the "
            "path of a file."
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    # The module may be custom code, and importing it may raise any error.
    except Exception as error:
        raise ConfigError(
            f"The module {module_name!r} of {what} cannot be imported "
            f"({type(error).__name__}: {error}). Check the name, and that its folder is on PYTHONPATH."
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ConfigError(f"The module {module_name!r} has no {attribute!r}, which {what} refers to.") from error


def import_own(path: str) -> Any:
    """Import ``package.module:name`` from unskew's own registries; never pass text from elsewhere."""
    module_name, _, name = path.partition(":")
    return getattr(importlib.import_module(module_name), name)


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """Import a function or class; see ``import_from_path``.

    Args:
        path: ``package.module:name``.
        what: Description of the path for error messages.

    Raises:
        ConfigError: If the object does not exist, or is not callable.
    """
    target = import_from_path(path, what)
    if not callable(target):
        raise ConfigError(f"{what} is not a function or a class.")
    return cast(Callable[..., Any], target)


def option_defaults(cls: type) -> dict[str, object]:
    """Return names and defaults of the options of a class; an empty dictionary if it is not a dataclass."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {field.name: field.default for field in dataclasses.fields(cls) if field.init}


def option_meanings(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's options, from the section ``Attributes`` of its docstring and of its base classes.

    >>> from unskew.methods.fedbuff import FedBuff
    >>> list(option_meanings(FedBuff))
    ['buffer_size', 'eta']
    """
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        described |= docstring_entries(base.__doc__ or "", "Attributes")
    return {name: described.get(name, "") for name in option_defaults(cls)}


def docstring_entries(docstring: str, section: str) -> dict[str, str]:
    """Return the descriptions in a section of a docstring, each as one line, by name.

    Args:
        docstring: Docstring in Google style.
        section: Title of the section.
    """
    entries = inspect.cleandoc(docstring).partition(f"\n{section}:\n")[2]
    named = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", entries, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in named}


def options_without_effect(rule: Any) -> dict[str, str]:
    """Return the options that have no effect with the values of others, and these values, as in ``beta=0``.

    Args:
        rule: Instance of a rule, whose ``idle_options`` declare them.

    >>> from unskew.methods.fedntd import FedNTD
    >>> options_without_effect(FedNTD(beta=0))
    {'tau': 'beta=0'}
    """
    idle: dict[str, str] = {}
    for values, options in rule.idle_options:
        if all(getattr(rule, name) == value for name, value in values.items()):
            written = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
            idle |= dict.fromkeys(options, " and ".join(f"{name}={value}" for name, value in written.items()))
    return idle


def check_options_have_effect(rule: Any) -> None:
    """Validate that options which have no effect have their defaults.

    Args:
        rule: Instance of a rule.

    Raises:
        ConfigError: If an option without an effect has another value than its default.
    """
    defaults = option_defaults(type(rule))
    for option, cause in options_without_effect(rule).items():
        if getattr(rule, option) != defaults[option]:
            raise ConfigError(f"{rule.name}:{option} has no effect with {cause}. Remove one of the two.")


@functools.lru_cache(maxsize=128)
def _readers(cls: type[Any]) -> dict[str, pydantic.TypeAdapter[Any]]:
    """Return the parsers of a class's options; cached, as building them takes longer than parsing."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: _reader(hints[name], default) for name, default in option_defaults(cls).items()}


def _reader(hint: Any, default: object) -> pydantic.TypeAdapter[Any]:
    """Create a parser. Numbers must be finite, unless the type allows ``allow_inf_nan`` or the default is not finite."""
    if isinstance(default, float) and not math.isfinite(default):
        return pydantic.TypeAdapter(hint)
    try:
        return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(allow_inf_nan=False))
    except pydantic.PydanticUserError:  # a class with its own configuration
        return pydantic.TypeAdapter(hint)


def check_finite(rule: object, owner: str) -> None:
    """Validate that the options of an instance created in Python are finite.

    Args:
        rule: Instance of a rule.
        owner: Name of the rule, for error messages.

    Raises:
        ConfigError: If a number is not finite and its type does not allow this.
    """
    for key in option_defaults(type(rule)):
        value = getattr(rule, key)
        if isinstance(value, float) and not math.isfinite(value):
            build_from_options(type(rule), {key: value}, owner, f"{owner}:")


def all_finite(values: Any) -> Any:
    """Validate that nested values contain only finite numbers and string keys, as files cannot store others.

    Args:
        values: Values to check: numbers, texts, lists and dictionaries, in a dictionary or several.

    Raises:
        ValueError: If a number is not finite, or a key is not a string.
    """
    options = values if isinstance(values, tuple) else (values,)
    entries = [(str(key), value) for each in options for key, value in each.items()]
    while entries:
        name, value = entries.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: {value} is not a finite number")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name}: keys must be strings; quote keys in a file that would be read as another type")
        if isinstance(value, dict | list | tuple):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            entries += [(f"{name}.{key}", entry) for key, entry in inner]
    return values


def build_from_options(
    cls: type[Built], options: Mapping[str, object], owner: str, prefix: str, kind: str = "option"
) -> Built:
    """Build an instance of a dataclass from validated options.

    Args:
        cls: The dataclass.
        options: Values by name; text is parsed as the field's type.
        owner: Owner of the options in error messages.
        prefix: Text before an option in messages, such as ``fedprox:``.
        kind: Word for an option in messages.

    Raises:
        ConfigError: If an option is unknown, has the wrong type, or is out of range.
    """
    names, readers = option_defaults(cls), _readers(cast(Any, cls))
    checked: dict[str, object] = {}
    for key, value in options.items():
        if key not in names:
            raise ConfigError(unknown_name(kind, str(key), names, owner) if names else f"{owner} has no {kind}s.")
        try:
            number = checked[key] = readers[key].validate_python(value)
        except pydantic.ValidationError as error:
            reason = plain_message(error.errors()[0]["msg"])
            raise ConfigError(f"{prefix}{key}={short_repr(value, str)} is not valid: {reason}.") from error
        if isinstance(number, float) and LARGEST < abs(number) < math.inf:
            raise ConfigError(
                f"{prefix}{key}={short_repr(value, str)} is not valid: its magnitude must be at most {LARGEST:g}."
            )
    return cls(**checked)
