"""Schema of the experiment's data, which every site's data must match."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.normalization import Normalization
from unskew.data.partitioned import PartitionedSource
from unskew.data.readers.encoders import Encoder
from unskew.data.task_options import apply_task_options
from unskew.deployment.wire.fields import read_integer, read_text
from unskew.deployment.wire.tensor_codec import DTYPES, NAMES, InvalidMessageError
from unskew.errors import ConfigError, DataError
from unskew.json_models import read_model
from unskew.runs.input_spec import Finite, InputColumn
from unskew.tasks.base import Task
from unskew.tasks.registry import TASKS

CONSTANTS = TypeAdapter(dict[str, tuple[Finite, ...]])
"""Constants of a task in a message."""


@dataclass(frozen=True)
class DataSchema:
    """Schema of the experiment's data at the server, which every site's data must match.

    Attributes:
        shape: Shape of one input.
        classes: Number of classes, labels or tokens.
        class_names: Names of the classes in order, if they have any.
        task: Name of the task.
        dtype: Dtype of stored inputs.
        normalization: Normalization of inputs.
        columns: Encoders of the columns of a mixed table.
        constants: Constants of the task from the data or the configuration, such as the mean of regression targets.
        weights: Class weights of the loss, if any.
        settled: Whether the schema is complete; it is not before the global column statistics are known.
    """

    shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...]
    task: str
    dtype: torch.dtype
    normalization: Normalization | None
    columns: tuple[Encoder, ...] = ()
    constants: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    weights: tuple[float, ...] = ()
    settled: bool = True

    @staticmethod
    def of(federation: Federation) -> DataSchema:
        """Return the schema of a federation."""
        task = federation.objective
        return DataSchema(
            federation.shape,
            federation.classes,
            federation.class_names,
            federation.task,
            federation.test[0].dtype,
            federation.normalization,
            federation.encoders,
            task.unweighted.constants,
            task.weights,
        )

    @property
    def needs_sums(self) -> bool:
        """Return whether the schema depends on statistics over all sites."""
        task = TASKS[self.task]
        return bool(self.columns) or task.standardized or task.fits

    @property
    def open(self) -> DataSchema:
        """The schema before the global column statistics are known."""
        columns = tuple(Encoder(column.name, column.kind, fills=column.fills) for column in self.columns)
        fitted = TASKS[self.task].fits
        opened = replace(self, shape=(), normalization=None, columns=columns, constants={}, weights=(), settled=False)
        return replace(opened, classes=0, class_names=()) if fitted else opened

    @property
    def objective(self) -> Task:
        """Task that the sites train, except for the loss of regression."""
        task = TASKS[self.task]
        return task.with_constants(self.constants, self.classes) if self.constants else task

    @property
    def counted(self) -> int:
        """Number of classes or labels for which a site reports sample counts; 0 if there are none."""
        return self.classes if "counts" in TASKS[self.task].provides else 0

    def config(self) -> dict[str, Any]:
        """Return the schema as fields of a message."""
        normalization = None
        if self.normalization is not None:
            entry = self.normalization
            normalization = [list(entry.mean), list(entry.std), entry.scale]
        return {
            "shape": json.dumps(self.shape),
            "classes": self.classes,
            "class_names": json.dumps(self.class_names),
            "task": self.task,
            "dtype": NAMES[self.dtype],
            "normalization": json.dumps(normalization),
            "columns": json.dumps([asdict(entry) for entry in self.columns]),
            "constants": json.dumps(self.constants),
            "weights": json.dumps(self.weights),
            "settled": self.settled,
        }

    @staticmethod
    def read(config: dict[str, Any]) -> DataSchema:
        """Read a schema from the fields of a message.

        Args:
            config: Fields of the message.

        Raises:
            InvalidMessageError: If the message does not contain a valid schema.
        """
        try:
            shape, names, normalization = (
                json.loads(read_text(config, n)) for n in ("shape", "class_names", "normalization")
            )
            normalization = (
                None
                if normalization is None
                else Normalization(tuple(normalization[0]), tuple(normalization[1]), float(normalization[2]))
            )
            columns, constants, weights = (
                json.loads(read_text(config, n)) for n in ("columns", "constants", "weights")
            )
            constants = CONSTANTS.validate_python(constants)
            if read_text(config, "task") not in TASKS or not all(0 < weight < math.inf for weight in weights):
                raise ValueError
            schema = DataSchema(
                tuple(int(n) for n in shape),
                read_integer(config, "classes"),
                tuple(str(name) for name in names),
                read_text(config, "task"),
                DTYPES[read_text(config, "dtype")],
                normalization,
                tuple(Encoder(**InputColumn.model_validate(column).model_dump()) for column in columns),
                constants,
                tuple(map(float, weights)),
                config.get("settled") is True,
            )
            _ = schema.objective  # validates the constants
            return schema
        except (ValueError, KeyError, TypeError, IndexError, DataError) as error:
            raise InvalidMessageError(f"its data schema cannot be read ({type(error).__name__})") from error

    def is_same(self, other: DataSchema) -> bool:
        """Return whether another schema is equal, except for class weights and for statistics of all sites."""
        if self.needs_sums or not other.settled:
            return self.open == other.open
        return replace(self, weights=()) == replace(other, weights=())

    def check(self, other: DataSchema, who: str) -> None:
        """Validate that the data of a site match this schema.

        Args:
            other: Schema of a site.
            who: Name of the site, for error messages.

        Raises:
            ConfigError: If the data do not match.
        """
        for name in ("task", "shape", "classes", "class_names", "dtype"):
            own_value, other_value = getattr(self, name), getattr(other, name)
            if own_value != other_value:
                raise ConfigError(f"{who} has data with {name} {other_value}, but the server's have {own_value}.")


def reference_schema(partitioned: PartitionedSource, config: Experiment) -> DataSchema:
    """Return the data schema of a rehearsal, in which every site can read all data.

    Args:
        partitioned: Partitioned data.
        config: The experiment.
    """
    return DataSchema.of(
        apply_task_options(partitioned.federation(partitioned.known()), config.loss, config.class_weights)
    )


def read_schema(path: Path) -> DataSchema | None:
    """Read the file with a data schema; None if it does not exist.

    Args:
        path: JSON file, as ``unskew deploy init`` writes it.

    Raises:
        ConfigError: If the file is not valid.
    """
    if not os.path.lexists(path):
        return None
    try:
        return DataSchema.read(read_model(path, dict[str, int | bool | str]))
    except InvalidMessageError as error:
        raise ConfigError(f"The data schema {path} is not valid: {error}.") from error
