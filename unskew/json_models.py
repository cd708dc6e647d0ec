"""JSON files that may come from others: a pydantic model validates each one before any of its values is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter

from unskew.errors import CheckpointError, first_problem
from unskew.filesystem import parse_json, read_file, write_atomic

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always")
"""Configuration of the models: unknown fields, other types and numbers that are not finite are errors."""
Content = TypeVar("Content")


def _check_inner(path: str) -> str:
    if not path.strip() or "\0" in path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError("it must be a path below the folder that the user names, without '..'")
    return path


InnerPath = Annotated[str, AfterValidator(_check_inner)]
"""Path in a file that may come from others."""


class JsonModel(BaseModel):
    """Base class of strict models, which are immutable."""

    model_config = ConfigDict(frozen=True, **STRICT)


def read_model(path: Path, kind: type[Content], remedy: str = "") -> Content:
    """Read a JSON file and validate it.

    Args:
        path: File to read.
        kind: Type of its content: a model, a pydantic dataclass, or any other type that pydantic validates.
        remedy: Advice for a corrupted file, as a sentence.

    Raises:
        CheckpointError: If the file cannot be read, or its content is not valid.
    """
    try:
        data = read_file(path)
        parse_json(data)  # rejects numbers that no model expects, also in open fields
        return TypeAdapter(kind).validate_json(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupted: {first_problem(error)}. {remedy}".rstrip()) from error


def write_model(path: Path, content: Any) -> None:
    """Write a model or a pydantic dataclass to a JSON file.

    Args:
        path: File to write or replace.
        content: Model to write.
    """
    write_atomic(path, TypeAdapter(type(content)).dump_json(content, indent=2) + b"\n")
