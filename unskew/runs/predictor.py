"""Predictor: a trained model with its preprocessing, for new inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unskew.data.frames import is_frame, select_columns
from unskew.data.readers.images import convert_channels, resize_images
from unskew.data.validation import as_inputs, as_tensor
from unskew.engines.batches import InputNormalizer
from unskew.errors import ConfigError, DataError, abbreviate
from unskew.models.spec import ModelSpec
from unskew.progress import report_progress
from unskew.protocol.rules import Method
from unskew.records.notebook import NotebookTable
from unskew.runs.input_spec import InputSpec

BATCH = 256
PIXEL_BATCH = 16
"""Number of images at once for models of pixels, whose layers keep the sides of the image."""
PADDING = -1
NAMES_SHOWN = 10


class Predictor(NotebookTable):
    """Model in eval mode with the preprocessing of its inputs.

    Args:
        module: Model, such as ``Result.model``; its forward pass takes normalized inputs.
        inputs: Input specification of the model.
        dtype: Data type of the model.
    """

    def __init__(self, module: nn.Module, inputs: InputSpec, dtype: torch.dtype):
        self.module, self.inputs = module.eval(), inputs
        self.normalize = InputNormalizer(inputs.known, inputs.shape, dtype, torch.device("cpu"))

    def _sentences(self) -> list[str]:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return [
            f"Model with {count:,} parameters, task {self.inputs.task}, outputs: {abbreviate(self.class_names, NAMES_SHOWN)}."
        ]

    def _shown(self) -> list[dict[str, object]]:
        """Return a row for each input column, or one for inputs that are not columns."""
        columns = {column.name: column for column in self.inputs.columns}
        rows: list[dict[str, object]] = []
        for name in columns or self.inputs.features:
            column = columns.get(name)
            row: dict[str, object] = {"input": name, "kind": column.kind if column else "number"}
            if column and column.values:
                row["values"] = abbreviate(column.values, NAMES_SHOWN)
            rows.append(row)
        return rows or [{"input": shape_text(self.inputs.shape), "kind": self.inputs.kind}]

    @property
    def class_names(self) -> list[str]:
        """Names of the outputs, in order."""
        return self.inputs.names

    def predict_proba(self, x: object) -> np.ndarray:
        """Predict probabilities ``[n, C]`` of inputs ``[n, *shape]``; for multi-label tasks, one probability per label.

        Args:
            x: Array, tensor or lists: uint8 images of any size, channels first or last; features in the order of
                ``inputs.features``; or rows of token ids, padded with -1. Columns of a data frame are matched by name if
                the model was trained on named columns; further ones are ignored.

        Raises:
            ConfigError: If the model predicts no probabilities, as for regression.
            DataError: If the inputs have the wrong shape or type, or contain NaN.
        """
        if self.inputs.objective.output_kind != "probabilities":
            raise ConfigError(f"A {self.inputs.task} model has no probabilities. Use predict instead of predict_proba.")
        return self.outputs(x)

    def outputs(self, x: object) -> np.ndarray:
        """Predict probabilities ``[n, C]``, of each pixel ``[n, C, *sides]``, or numbers ``[n, T]`` in original units.

        Args:
            x: Inputs, ``[n, ...]``, in the form of the training data.

        Raises:
            DataError: If the inputs have the wrong shape or type or contain NaN, or the outputs are not finite.
        """
        if not len(x):  # type: ignore[arg-type]
            return np.zeros((0, self.inputs.classes))
        ready, transform = self.prepared(x), self.inputs.objective.outputs
        with torch.no_grad():
            parts: list[Tensor] = []
            size = PIXEL_BATCH if self.inputs.objective.pixels else BATCH
            for part in torch.split(ready, size):
                report_progress("predicted", size * len(parts), len(ready))
                parts.append(transform(self.module(self.normalize(part))))
        outputs = torch.cat(parts).double()
        bad = torch.isfinite(outputs).logical_not().flatten(1).any(1).nonzero()
        if len(bad):
            raise DataError(
                f"The outputs of the model are not finite for {len(bad)} of {len(outputs)} inputs (first: input "
                f"{int(bad[0])}). Either training diverged, or these inputs are extreme. Train with a smaller "
                "learning rate, or remove these inputs."
            )
        return outputs.numpy()

    def predict(self, x: object) -> list[Any]:
        """Predict the name of the class with the largest output of each input.

        This is the most probable class; after training with ``class_weights``, rare classes are predicted more often.
        Multi-label tasks return the list of labels with a probability above 0.5. Regression returns the number in its
        original unit, or a list of numbers if there are several targets. Segmentation returns masks with the gray values of
        the classes.
        """
        return self.labels(self.outputs(x))

    def labels(self, outputs: np.ndarray, threshold: float | None = None) -> list[Any]:
        """Convert outputs ``[n, C]`` to predictions: class names, lists of labels, or numbers.

        Args:
            outputs: Outputs of the model.
            threshold: Smallest probability for which the positive one of two classes, or a label, is predicted.

        Raises:
            ConfigError: If ``threshold`` is given and the model has more than two classes or predicts numbers.
        """
        return self.inputs.objective.decisions(outputs, self.inputs.metrics, threshold)

    def prepared(self, x: object) -> Tensor:
        """Convert inputs to a tensor of the model's shape and type, before normalization."""
        shape, kind = self.inputs.shape, self.inputs.kind
        expectation = f"The model expects {'token ids' if kind == 'tokens' else 'inputs'} of shape {shape_text(shape)}"
        if is_frame(x) and self.inputs.columns:
            raise DataError(
                "The model encodes the columns of its table, which it does not do for a data frame. Write the rows to a file "
                "and use predict_file, or pass an array of encoded values."
            )
        if is_frame(x) and self.inputs.features:
            x = select_columns(x, self.inputs.features)
        tensor = as_tensor(x, f"{expectation}, but the inputs cannot be converted to numbers")
        if kind == "tokens":
            return self._tokens(tensor, expectation)
        if tensor.dim() == len(shape) + 1 and tensor.dim() == 4 and kind == "uint8":
            tensor = self._images(tensor, expectation)
        if tuple(tensor.shape[1:]) != tuple(shape):
            raise DataError(f"{expectation}, not {shape_text(tuple(tensor.shape[1:]))}.")
        if kind == "uint8" and tensor.dtype != torch.uint8:
            raise DataError(f"{expectation} with values from 0 to 255 in uint8, not {tensor.dtype}.")
        return tensor if kind == "uint8" else as_inputs(tensor.to(torch.float32).numpy(), "the inputs")

    def _images(self, tensor: Tensor, told: str) -> Tensor:
        """Convert images to channels first, with the model's number of channels and size."""
        channels, height, width = self.inputs.shape
        if tensor.shape[1] not in (1, 3, channels) and tensor.shape[3] in (1, 3, channels):
            tensor = tensor.permute(0, 3, 1, 2)
        if tensor.dtype != torch.uint8:
            raise DataError(f"{told} with values from 0 to 255 in uint8, not {tensor.dtype}.")
        if tensor.shape[1] not in (1, 3, channels):
            raise DataError(f"{told}, not {shape_text(tuple(tensor.shape[1:]))}.")
        return convert_channels(resize_images(tensor, height, width), channels)

    def _tokens(self, tensor: Tensor, told: str) -> Tensor:
        """Pad or truncate rows of token ids to the model's length."""
        (length,) = self.inputs.shape
        if tensor.dim() != 2 or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
            raise DataError(f"{told}: integers, one row per text.")
        rows = tensor.to(torch.int64)[:, :length]
        return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=PADDING)


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape, such as ``3 x 32 x 32``."""
    return " x ".join(map(str, shape)) if shape else "one number"


def initial_values_note(method: Method, spec: ModelSpec) -> str:
    """Return a note on the parameters of the global model that no client sends; empty if all are sent.

    Args:
        method: Method of the run.
        spec: Layout of the model.
    """
    slices = method.sync.local_slices(spec) if method.sync is not None else ()
    if method.sync is None or not slices:
        return ""
    share = sum(part.stop - part.start for part in slices) / spec.size
    return (
        f"With {method.sync.name}, {100 * share:.3g} % of the parameters stay at the clients; in the global model they have "
        "their initial values."
    )


def check_global_model(method: Method, spelling: str) -> None:
    """Validate that a method trains a global model.

    Args:
        method: Method of the run.
        spelling: Its name for the message.

    Raises:
        ConfigError: If it trains only models of the clients.
    """
    if not all(rule.trains_global_model for rule in method.rules):
        raise ConfigError(
            f"{spelling} trains no global model, only one model for each client. Choose a client with --client or "
            "--client-number (client= or client_number= of load_predictor)."
        )


def final_predictor(
    method: Method, spelling: str, module: nn.Module, inputs: InputSpec, spec: ModelSpec
) -> Callable[[], Predictor]:
    """Return the function that creates the predictor of the final global model.

    It raises ``ConfigError`` if the method trains no global model, and warns of parameters that no client sent.

    Args:
        method: Method of the run.
        spelling: Its name for the message.
        module: Final global model.
        inputs: Input specification of the model.
        spec: Layout of the model.
    """
    try:
        check_global_model(method, spelling)
    except ConfigError as error:
        return partial(_raise, error)
    return partial(_with_note, initial_values_note(method, spec), module, inputs, spec.dtype)


def _raise(error: ConfigError) -> Predictor:
    raise error


def _with_note(note: str, module: nn.Module, inputs: InputSpec, dtype: torch.dtype) -> Predictor:
    if note:
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    return Predictor(module, inputs, dtype)
