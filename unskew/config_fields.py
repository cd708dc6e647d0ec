"""Fields of configurations: sections, their flags on the command line, and errors about values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from unskew.errors import ConfigError, plain_message, short_repr, unknown_name


@dataclass(frozen=True)
class Flag:
    """Annotation of a field that has its own command-line flag; its docstring is the help text.

    Attributes:
        panel: Section of the flag in the help of a command.
        name: Name of the flag; None is the name of the field, without its section.
    """

    panel: Literal["Data", "Training", "Machine", "Evaluation"]
    name: str | None = None


DATA = Flag("Data")
TRAINING = Flag("Training")
MACHINE = Flag("Machine")
EVALUATION = Flag("Evaluation")


class Section(BaseModel):
    """Base class of configuration sections: unknown keys are errors, and booleans are not accepted as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def allowed_values(cls, field: str) -> str | None:
        """Return what is allowed for a field, for errors, if its annotation does not explain it."""
        return None

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("must not be a boolean")
        return value


Model = TypeVar("Model", bound=Section)


def inner_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that is the value of a field, or None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


@contextmanager
def as_value_error() -> Iterator[None]:
    """Context manager for a validator: a ``ConfigError`` becomes a ``ValueError``, which is reported with the field."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error).rstrip(".")) from error


def check_keys(
    values: Mapping[str, Any], model: type[BaseModel], prefix: str = "", meant: Mapping[str, str] | None = None
) -> None:
    """Validate that all keys are known, including those of sections; the error suggests similar names.

    Args:
        values: Fields by name.
        model: Section of the configuration.
        prefix: Name of the section with a dot, for the error.
        meant: Names of fields by names that users may expect instead, for suggestions.

    Raises:
        ConfigError: If a key is unknown.
    """
    for key, value in values.items():
        if key not in model.model_fields:
            known = [f"{prefix}{name}" for name in model.model_fields]
            raise ConfigError(unknown_name("option", f"{prefix}{key}", known, meant=(meant or {}).get(key)))
        section = inner_section(model.model_fields[key])
        if isinstance(value, dict) and section is not None:
            check_keys(value, section, f"{prefix}{key}.")


def field_names(model: type[BaseModel]) -> Iterator[str]:
    """Return the names of all fields of a section, and of those of its inner sections."""
    for name, field in model.model_fields.items():
        yield name
        if (section := inner_section(field)) is not None:
            yield from field_names(section)


def validate_fields(
    model: type[Model],
    values: Mapping[str, Any],
    context: dict[str, Any] | None = None,
    meant: Mapping[str, str] | None = None,
    inner: Collection[str] = (),
) -> Model:
    """Build a validated section from plain values.

    Args:
        model: Section of the configuration.
        values: Fields by name.
        context: Context of the validators.
        meant: Names of fields by names that users may expect instead, for suggestions.
        inner: Names inside values of fields, which errors also name.

    Raises:
        ConfigError: If a key is unknown, or a value has the wrong type or is out of range.
    """
    check_keys(values, model, meant=meant)
    try:
        return model.model_validate(dict(values), context=context)
    except pydantic.ValidationError as error:
        errors = error.errors()
        # If a field allows several types, report the type that was validated deepest, which fits the value best.
        first = max(
            (detail for detail in errors if detail["loc"][:1] == errors[0]["loc"][:1]),
            key=lambda detail: len(detail["loc"]),
        )
        names = {*field_names(model), *inner}
        where = ".".join(str(part) for part in first["loc"] if part in names)
        reason = model.allowed_values(where) or plain_message(first["msg"])
        raise ConfigError(
            f"{where}={short_repr(first['input'])} is not valid: {reason}." if where else f"{reason}."
        ) from error
