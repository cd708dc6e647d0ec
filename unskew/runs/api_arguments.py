"""Conversion of Python API arguments (data, model and method objects) to a configuration that stores their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from unskew.data.federation import Federation
from unskew.data.spec import DataSpec
from unskew.errors import ConfigError, short_repr
from unskew.methods.registry import MethodLike
from unskew.methods.registry import method as method_of
from unskew.runs.build_model import ModelLike


def config_from_arguments(
    options: Mapping[str, Any], federation: Federation | None, model: ModelLike | Mapping[str, Any] | None
) -> dict[str, Any]:
    """Build the configuration values of a run started from Python.

    Objects are recorded by name: a federation by its source and partition, a model by its class or function name.

    Args:
        options: Fields of the experiment by name.
        federation: Data that were passed as objects, or None.
        model: Model that was passed, or None.

    Raises:
        ConfigError: If ``federation`` is not a ``Federation``, or an option contradicts it.
    """
    check_federation(federation)
    values = dict(options)
    if federation is not None:
        names = {"data": federation.name, "partition": federation.partition, "clients": len(federation.clients)}
        for field in DataSpec.model_fields:
            value, known = values.get(field), names.get(field)
            same = value is known or (isinstance(value, str | Integral) and value == known)
            if field in values and not same and field != "unseen":  # splits the federation in the run
                raise ConfigError(
                    f"{field}={short_repr(value)} has no effect when a federation is passed; remove the option."
                )
        values = {**names, **values}
    if federation is not None and model is None and "model" not in options and len(federation.shape) == 1:
        texts = federation.test[0].dtype == torch.int64 and "one_class" in federation.objective.provides
        values["model"] = "text-mlp" if texts else "table-mlp"
    if model is not None:
        values["model"] = model if model_object(model) is None else model_label(model)
    return values


def model_label(model: ModelLike | Mapping[str, Any]) -> str:
    """Return the names of a model or several ones; those of objects are the names of their functions or classes."""
    entries = model if isinstance(model, list | tuple) else [model]
    names = [entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__) for entry in entries]
    return ",".join(map(str, names))


def check_federation(federation: object) -> None:
    """Validate that ``federation`` is a ``Federation`` or None (raises ``ConfigError`` otherwise)."""
    if federation is not None and not isinstance(federation, Federation):
        raise ConfigError(
            f"The data must be a Federation, not {type(federation).__name__}. Create one with unskew.load_federation or "
            "unskew.Federation.from_arrays."
        )


def check_callbacks(callbacks: object) -> None:
    """Validate that the callbacks are a list of ``unskew.records.recorder.Callback`` (raises ``ConfigError`` otherwise)."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str | bytes):
        raise ConfigError(f"callbacks must be a list of callback objects, not {short_repr(callbacks)}.")
    for callback in callbacks:
        missing = [name for name in ("start", "round", "end") if not callable(getattr(callback, name, None))]
        if missing or isinstance(callback, type):
            raise ConfigError(
                f"{short_repr(callback)} is not a callback: it needs the methods start(config, rounds_done), "
                "round(row) and end(summary)."
            )


def model_object(model: ModelLike | Mapping[str, Any] | None) -> ModelLike | None:
    """Return the model, or the list of several, if it was passed as an object, or None if it was passed by name.

    Args:
        model: Model that was passed, or None.

    Raises:
        ConfigError: If a list has objects and mappings.
    """
    entries = model if isinstance(model, list | tuple) else [model]
    if all(isinstance(entry, str | Mapping) for entry in entries):
        return None
    if len(entries) > 1 and any(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(
            "A list of models that has objects has no mappings. Pass functions that build the models instead."
        )
    return None if isinstance(model, Mapping) else model


def method_expression(method: MethodLike) -> str:
    """Return the expression that identifies a method in configurations, tables and folder names."""
    if isinstance(method, str):
        return method
    built = method_of(method)
    return built.expression or built.name
