"""Input specification of a trained model (``inputs.json``), so that the model can be used without its training data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from unskew.config.experiment import Experiment
from unskew.data.csv_format import CsvConfig, csv_spec
from unskew.data.federation import Federation
from unskew.data.harmonize import Harmonization
from unskew.data.normalization import Normalization
from unskew.data.readers.column_roles import INPUT
from unskew.data.readers.encoders import Encoder
from unskew.data.readers.text import is_text
from unskew.data.spec import parse_split
from unskew.errors import CheckpointError, DataError
from unskew.expressions import parse_names
from unskew.filesystem import write_atomic
from unskew.json_models import read_model
from unskew.tasks.base import Task
from unskew.tasks.metrics import MetricSet
from unskew.tasks.registry import TASKS

NAME = "inputs.json"
Finite = Annotated[float, Field(allow_inf_nan=False)]


Kind = Literal["uint8", "float", "tokens"]


class StandardizedTask(BaseModel):
    """Standardization ``(x * scale - mean) / std``, per channel, feature or target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: tuple[Finite, ...]
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    scale: Finite = 1.0


class InputColumn(BaseModel):
    """Encoding of a table column, with the fields of ``unskew.data.readers.encoders.Encoder``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["number", "category", "date"]
    values: tuple[str, ...] = ()
    mean: Finite = 0.0
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    fills: bool = False
    marks: bool = False
    form: str = ""


class InputSpec(BaseModel):
    """Specification of a trained model's inputs and outputs.

    Attributes:
        model_config: Configuration of pydantic: unknown keys are rejected, and the specification is immutable.
        task: Name of the task.
        shape: Shape of one input, channels first.
        kind: ``uint8`` images from 0 to 255, ``float`` values, or ``tokens``.
        classes: Number of outputs.
        class_names: Names of the outputs; may be empty.
        normalization: Normalization of inputs, or None.
        columns: Encoding of each column of a table with mixed column types.
        features: Input columns of a table, in order.
        image: Column with image paths, or None.
        text: Columns with texts.
        tokenizer: Tokenizer of texts.
        block: Maximum length of a text in tokens.
        harmonization: Harmonization of the columns of each site, before they are encoded; None without it.
        csv: Format of CSV files, for properties that are not detected automatically.
        label: Column of the labels.
        label_separator: Separator of several labels in the label column, or None.
        positive: Name of the positive one of two classes, if it is configured.
        constants: Constants of the task, such as mean and standard deviation of each target, or class weights.
        split_group: Column whose values the run kept together, or None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    shape: tuple[Annotated[int, Field(ge=1, le=1 << 30)], ...]
    kind: Kind
    classes: Annotated[int, Field(ge=1, le=1 << 30)]
    class_names: tuple[str, ...] = ()
    normalization: StandardizedTask | None = None
    columns: tuple[InputColumn, ...] = ()
    features: tuple[str, ...] = ()
    image: str | None = None
    text: tuple[str, ...] = ()
    tokenizer: str | None = None
    block: Annotated[int, Field(ge=2, le=1_000_000)] = 128
    harmonization: Harmonization | None = None
    csv: CsvConfig = CsvConfig()
    label: str | None = None
    label_separator: str | None = None
    positive: str | None = None
    constants: dict[str, tuple[Finite, ...]] = {}
    split_group: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the outputs: the class names, or their numbers."""
        return list(self.class_names) or [str(number) for number in range(self.classes)]

    @property
    def label_columns(self) -> tuple[str | None, ...]:
        """Columns of labels in a table; None if the run does not name them."""
        task = self.objective
        if task.numeric_labels and not task.names:
            return self.class_names
        return parse_names(self.label) if task.numeric_labels and self.label is not None else (self.label,)

    @property
    def image_size(self) -> int | None:
        """Side length of square images; None for other shapes."""
        return self.shape[1] if len(self.shape) == 3 and self.shape[1] == self.shape[2] else None

    def with_csv(self, values: Mapping[str, Any]) -> InputSpec:
        """Return the specification with other fields of the format of CSV files.

        Args:
            values: Fields of ``CsvConfig`` by name.

        Raises:
            ConfigError: If a field or its value is not valid.
        """
        spec = csv_spec({**self.csv.model_dump(), **values})
        return self.model_copy(update={"csv": CsvConfig(**asdict(spec))}) if values else self

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """Column encodings as ``Encoder`` objects."""
        return tuple(Encoder(**column.model_dump()) for column in self.columns)

    @property
    def objective(self) -> Task:
        """Task for which the model was trained."""
        return TASKS[self.task].with_constants(self.constants, self.classes).named(self.names)

    @property
    def class_weights(self) -> tuple[float, ...]:
        """Class weights of the training; empty if there were none."""
        return self.constants.get("class_weights", ())

    @property
    def positive_class(self) -> str | None:
        """Name of the positive one of two classes; None with more classes and other tasks."""
        return (
            self.names[self.metrics.positive]
            if self.classes == 2 and "one_class" in TASKS[self.task].provides
            else None
        )

    @property
    def metrics(self) -> MetricSet:
        """Options of the metrics of a classifier: class names, positive class and class weights of the training."""
        positive = 1 if self.positive is None else self.names.index(self.positive)
        return MetricSet(class_names=tuple(self.names), positive=positive, trained_with=self.class_weights)

    @property
    def known(self) -> Normalization | None:
        """Normalization of inputs as a ``Normalization`` object, or None."""
        known = self.normalization
        return None if known is None else Normalization(known.mean, known.std, known.scale)


def input_spec_of(federation: Federation, config: Experiment) -> InputSpec:
    """Return the input specification of a model trained on these data.

    Args:
        federation: Data of all clients.
        config: Configuration of the run.
    """
    x = federation.test[0]
    known = federation.normalization
    spec = config.data_spec
    kinds: dict[torch.dtype, Kind] = {torch.uint8: "uint8", torch.int64: "tokens"}
    numbers = [column for column, done in federation.columns.items() if done.startswith(INPUT)]
    texts, objective = is_text(config.data), federation.objective
    return InputSpec(
        task=federation.task,
        shape=federation.shape,
        kind=kinds.get(x.dtype, "float"),
        classes=federation.classes,
        # Unlabeled texts have no classes; the federation's class names are then names of text groups.
        class_names=() if objective.tokens else federation.class_names,
        normalization=None if known is None else StandardizedTask(mean=known.mean, std=known.std, scale=known.scale),
        columns=tuple(InputColumn(**asdict(encoder)) for encoder in federation.encoders),
        features=() if x.dim() == 4 or texts else (config.features or tuple(numbers)),
        image=config.image if x.dim() == 4 else None,
        text=(spec.text.used_columns or ("text",)) if texts else (),
        tokenizer=spec.text.tokenizer if texts else None,
        block=spec.text.block,
        harmonization=federation.harmonization,
        csv=config.csv,
        label=config.label,
        label_separator=config.label_separator,
        positive=config.positive,
        constants=objective.constants,
        split_group=None if config.split_by is None else parse_split(config.split_by).group,
    )


def write_inputs(folder: Path, federation: Federation, config: Experiment) -> str:
    """Write ``inputs.json`` and return its SHA-256.

    Args:
        folder: Run folder.
        federation: Data of all clients.
        config: Configuration of the run.
    """
    data = input_spec_of(federation, config).model_dump_json(indent=1).encode()
    write_atomic(folder / NAME, data)
    return hashlib.sha256(data).hexdigest()


def read_inputs(folder: Path) -> InputSpec:
    """Read the input specification of a run folder.

    Args:
        folder: Run folder.

    Raises:
        CheckpointError: If the file is missing or corrupted.
    """
    path = folder / NAME
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {NAME}: it is not a finished run folder, or it was written by an older version. Repeat the run."
        )
    inputs = read_model(path, InputSpec)
    try:
        if inputs.task not in TASKS:
            raise ValueError("this version does not support the task")
        if inputs.class_names and len(inputs.class_names) != inputs.classes:
            raise ValueError("the number of class names differs from the number of classes")
        if math.prod(inputs.shape) > 1 << 30:
            raise ValueError("the input shape is too large")
        known = inputs.known
        if known is not None and not len(known.mean) == len(known.std) == inputs.shape[0]:
            raise ValueError("the number of means or standard deviations differs from the number of channels")
        TASKS[inputs.task].with_constants(inputs.constants, inputs.classes)
        if inputs.positive is not None and (inputs.positive not in inputs.names or inputs.classes != 2):
            raise ValueError("the positive class is not one of two classes")
    except (ValueError, DataError) as error:
        raise CheckpointError(f"{path} is corrupted: {error}.") from error
    return inputs
