"""Validation and conversion of the arguments of ``Federation.from_arrays``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.config_fields import validate_fields
from unskew.data.normalization import Normalization
from unskew.data.spec import DataSpec
from unskew.data.validation import (
    as_targets,
    as_tensor,
    check_distinct,
    check_printable,
    mask_padding,
    normalize_inputs_layout,
    to_model_layout,
)
from unskew.errors import ConfigError, DataError, list_items, short_repr
from unskew.tasks.base import Task

LARGEST = 2**63
"""Limit of integer arguments: arrays store 64-bit integers."""


def configured_task(task: Task, options: Mapping[str, Any] | None) -> Task:
    """Return a task with options.

    Args:
        task: Task without options.
        options: Fields of its section of the configuration, or None.

    Raises:
        ConfigError: If the task has no options, or one is unknown or not valid.
    """
    if options and not task.section:
        raise ConfigError(f"options={short_repr(options)}: the task {task.name} has none. Remove them.")
    if not task.section:
        return task
    return task.configured(getattr(validate_fields(DataSpec, {task.section: dict(options or {})}), task.section))


def recode_targets(pairs: Sequence[Any], whose: Sequence[str], task: Task) -> list[Any]:
    """Return pairs of inputs and targets with the values that a task expects.

    Args:
        pairs: ``(x, y)`` or ``(x, y, x_test, y_test)`` of each owner.
        whose: Owners, for errors.
        task: Task with options.
    """

    def recoded(values: Any, who: str) -> Tensor:
        return task.recoded(as_tensor(values, f"The labels of {who} are not numeric"), who)

    return [
        tuple(recoded(part, who) if k % 2 else part for k, part in enumerate(pair))
        for pair, who in zip(pairs, whose, strict=True)
    ]


def check_integer(value: object, name: str, least: int | None = None) -> None:
    """Validate that a value is an integer of at most 63 bits and not too small.

    Args:
        value: Value to check.
        name: Name of the argument, for the error.
        least: Smallest allowed value; None allows any.

    Raises:
        DataError: If the value is not an integer, too small or too large.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DataError(f"{name} must be an integer, not {short_repr(value)}.")
    if least is not None and value < least:
        raise DataError(f"{name} must be at least {least}, not {short_repr(value)}.")
    if not -LARGEST <= int(value) < LARGEST:
        raise DataError(f"{name} has more than 63 bits. Use a smaller number.")


def check_client_list(clients: object) -> None:
    """Validate that the clients are a list and not empty.

    Args:
        clients: Value passed as the clients' data.

    Raises:
        DataError: If the clients are not a list, or the list is empty.
    """
    if isinstance(clients, dict):
        raise DataError(
            "clients must be a list with one (x, y) per client, not a dictionary. Pass its values as a list."
        )
    if not isinstance(clients, Collection) or isinstance(clients, str | np.ndarray | Tensor):
        raise DataError(f"clients must be a list with one (x, y) per client, not {type(clients).__name__}.")
    if not clients:
        raise DataError("A federation needs at least one client; 'clients' is empty.")


def unpack_pair(pair: object, who: str) -> tuple[object, object]:
    """Return the two entries of a pair ``(x, y)``.

    Args:
        pair: Value that should be ``(x, y)``.
        who: Name of the data, for the error.

    Raises:
        DataError: If the value is not a pair.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{who} must be a pair (x, y), not {type(pair).__name__}.")
    return pair[0], pair[1]


def validate_pair(x: object, y: object, who: str, task: str) -> tuple[Tensor, Tensor]:
    """Return validated inputs, in the memory layout of models, and one target per input.

    Args:
        x: Inputs.
        y: Targets.
        who: Name of the data, for errors.
        task: Name of the task.
    """
    inputs, targets = read_tensors(x, y, who, task)
    return to_model_layout(mask_padding(inputs, task)), targets


def read_tensors(x: object, y: object, who: str, task: str, mapped: bool = False) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as tensors of the same length.

    Args:
        x: Inputs.
        y: Targets.
        who: Name of the data, for errors.
        task: Name of the task.
        mapped: Whether the inputs are memory-mapped; their values are then not read.
    """
    shapes: list[tuple[int, ...]] = [getattr(values, "shape", ()) for values in (x, y)]
    if all(shapes):  # compare lengths before reading any value
        check_lengths(shapes[0][0], shapes[1][0], who)
    inputs, targets = normalize_inputs_layout(x, who, checked=not mapped), as_targets(y, who, task)
    check_lengths(len(inputs), len(targets), who)
    return inputs, targets


def check_lengths(inputs: int, targets: int, who: str) -> None:
    """Validate that there is one target per input.

    Args:
        inputs: Number of inputs.
        targets: Number of targets.
        who: Name of the data, for the error.

    Raises:
        DataError: If the numbers differ.
    """
    if inputs != targets:
        raise DataError(f"{who[0].upper()}{who[1:]} has {inputs} inputs but {targets} labels.")


def num_training_samples(n: int, holdout: object) -> int:
    """Return how many of ``n`` samples are for training.

    With a positive ``holdout`` and two or more samples, at least one is held out and at least one is for training.

    Args:
        n: Number of samples.
        holdout: Share of held-out samples, in [0, 1).
    """
    if isinstance(holdout, bool) or not isinstance(holdout, Real) or holdout < 0 or not holdout < 1:
        raise DataError(f"holdout must be at least 0 and less than 1, not {short_repr(holdout)}.")
    if holdout == 0 or n < 2:
        return n
    return n - min(n - 1, max(1, round(n * float(holdout))))


def fit_normalization(normalize: object, x: Tensor, inputs: Iterable[Tensor]) -> Normalization | None:
    """Return the normalization of the inputs. By default, 8-bit inputs are standardized and other inputs are not.

    Args:
        normalize: A ``Normalization`` to use, a boolean, or None; False disables normalization.
        x: One or more inputs, in the common dtype of all inputs.
        inputs: All inputs.

    Raises:
        DataError: If the value is neither a boolean nor a normalization, or its number of channels does not match.
    """
    if isinstance(normalize, Normalization):
        if len(normalize.mean) != x.shape[1]:
            raise DataError(
                f"The normalization has {len(normalize.mean)} means; the inputs have {x.shape[1]} channels or features."
            )
        return normalize
    if normalize is not None and not isinstance(normalize, bool):
        raise DataError(f"normalize must be True, False, None or a Normalization, not {short_repr(normalize)}.")
    return Normalization.fit(x[:0], inputs) if normalize is not False and x.dtype == torch.uint8 else None


def validate_class_names(class_names: object, classes: int) -> tuple[str, ...]:
    """Return the class names after validation: none, or one name per class.

    Args:
        class_names: List of names; may be empty.
        classes: Number of classes; 0 allows any number of names.

    Raises:
        DataError: If the value is not a list of distinct printable strings, or classes have no name.
    """
    wrong = DataError(f"class_names must be a list with a name for each class, not {short_repr(class_names)}.")
    names = tuple(list_items(class_names, wrong))
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise DataError(f"A class name must be a string, not {short_repr(odd)}.")
    check_printable(names, "class")
    if names and classes and len(names) != classes:
        raise DataError(f"There are {classes} classes but {len(names)} class_names. Name every class, or none.")
    check_distinct(names, "classes", "class_names")
    return names
