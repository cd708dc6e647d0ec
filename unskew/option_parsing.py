"""Objects named by an import path, and objects built from checked options.

Methods, generators, models and studies are named in a configuration. Their options are the fields of a dataclass, whose types
say which values are allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, cast

import pydantic
from pydantic import Field

from unskew.errors import ConfigError, plain_message, short_repr, unknown_name
from unskew.provenance import check_trusted, on_behalf_of

Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

LARGEST = 3.4e38
"""Largest number of an option; float32 holds no larger one."""

Built = TypeVar("Built")


def import_from_path(path: str, what: str) -> Any:
    """The object at ``package.module:name``; the folder one works in is where its module is looked for last.

    Args:
        path: The module, and a name in it that may have dots.
        what: What the path stands for, as an error says it: ``the model 'package.module:name'``.

    Raises:
        ConfigError: If there is none, or if a file that is not trusted names it.
    """
    module_name, _, attribute = path.partition(":")
    if not all(module_name.split(".")) or not attribute or {"/", "\\"} & set(path):
        raise ConfigError(
            f"{what[0].upper()}{what[1:]} is not an import path; write names with dots between, such as "
            "my_package.my_module, and not the path of a file."
        )
    check_trusted(path, what)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    # The module may be the user's, and importing it may fail in any way.
    except Exception as error:
        raise ConfigError(
            f"The module {module_name!r} of {what} cannot be imported "
            f"({type(error).__name__}: {error}). Check its spelling, and that its folder is on PYTHONPATH."
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ConfigError(f"The module {module_name!r} has no {attribute!r}, named by {what}.") from error


def import_own(path: str) -> Any:
    """Import ``package.module:name`` from one of unskew's own catalogues; nothing from outside may be passed here."""
    module_name, _, name = path.partition(":")
    return getattr(importlib.import_module(module_name), name)


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """Import a function or class; see ``import_from_path``.

    Args:
        path: ``package.module:name``.
        what: What the path stands for, for the error.

    Raises:
        ConfigError: The object does not exist, or cannot be called.
    """
    target = import_from_path(path, what)
    if not callable(target):
        raise ConfigError(f"{what} is not a function or a class.")
    return cast(Callable[..., Any], target)


def option_defaults(cls: type) -> dict[str, object]:
    """Names and defaults of the options of a class; none, if it is not a dataclass."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {field.name: field.default for field in dataclasses.fields(cls) if field.init}


@functools.lru_cache(maxsize=128)
def _readers(cls: type[Any]) -> dict[str, pydantic.TypeAdapter[Any]]:
    """Return the parsers of a class's options; cached, as building them takes longer than parsing."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: _reader(hints[name], default) for name, default in option_defaults(cls).items()}


def _reader(hint: Any, default: object) -> pydantic.TypeAdapter[Any]:
    """Numbers are finite, unless the type says ``Field(allow_inf_nan=True)`` or the default is none either."""
    if isinstance(default, float) and not math.isfinite(default):
        return pydantic.TypeAdapter(hint)
    try:
        return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(allow_inf_nan=False))
    except pydantic.PydanticUserError:  # a class with a configuration of its own
        return pydantic.TypeAdapter(hint)


def check_finite(rule: object, owner: str) -> None:
    """Refuse numbers that are not finite in an instance that was made in Python.

    Args:
        rule: Instance of a rule.
        owner: Name of the rule, for the error.

    Raises:
        ConfigError: A number is not finite, and its type does not allow that.
    """
    for key in option_defaults(type(rule)):
        value = getattr(rule, key)
        if isinstance(value, float) and not math.isfinite(value):
            build_from_options(type(rule), {key: value}, owner, f"{owner}:")


def all_finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values, if every number in them is finite and every name text, however deep: a file would hold others otherwise.

    Raises:
        ValueError: A number is not finite, or a key is not text.
    """
    entries = [(str(key), value) for key, value in values.items()]
    while entries:
        name, value = entries.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: {value} is not a number to build with")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name}: names must be text, and in a file in quotes where they would be something else")
        if isinstance(value, dict | list | tuple):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            entries += [(f"{name}.{key}", entry) for key, entry in inner]
    return values


def build_from_options(
    cls: type[Built], options: Mapping[str, object], owner: str, prefix: str, kind: str = "option"
) -> Built:
    """An instance of a dataclass with checked options.

    Args:
        cls: The class.
        options: Values by name; text is read as the field's type.
        owner: Whose options they are, as an error says it.
        prefix: What stands before an option where it was written, such as ``fedprox:``.
        kind: What an option is called.

    Raises:
        ConfigError: An option is unknown, of the wrong type, or out of range.
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
                f"{prefix}{key}={short_repr(value, str)} is not valid: at most {LARGEST:g} can be computed with."
            )
    with on_behalf_of(*options.values()):
        return cls(**checked)
