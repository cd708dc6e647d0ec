"""A trained model with its preprocessing: new inputs go in as they are, labels and probabilities come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unskew.data.readers.images import convert_channels, resize_images
from unskew.data.validation import as_inputs
from unskew.engines.batches import InputNormalizer
from unskew.errors import ConfigError, DataError
from unskew.progress import report_progress
from unskew.runs.input_spec import InputSpec
from unskew.tasks.regression import Regression

BATCH = 256
PADDING = -1


class Predictor:
    """A model in eval mode, and what has to be done to inputs before it sees them.

    Args:
        module: The model, as ``Result.model``: it takes normalized inputs.
        inputs: What it expects.
        dtype: Its numbers.
    """

    def __init__(self, module: nn.Module, inputs: InputSpec, dtype: torch.dtype):
        self.module, self.inputs = module.eval(), inputs
        self.normalize = InputNormalizer(inputs.known, inputs.shape, dtype, torch.device("cpu"))

    @property
    def class_names(self) -> list[str]:
        """The names of the outputs, in order."""
        return self.inputs.names

    def predict_proba(self, x: object) -> np.ndarray:
        """Probabilities ``[n, C]`` of inputs ``[n, *shape]``; with several labels a sample, of each label by itself.

        Args:
            x: An array, a tensor or lists: uint8 images of any size, channels first or last; features in the order of
                ``inputs.features``; or token ids, rows filled up with -1.

        Raises:
            DataError: The inputs have another shape or type, or contain NaN.
        """
        if self.numbers:
            raise ConfigError("The model predicts numbers, which have no probabilities; use predict.")
        return self.outputs(x)

    @property
    def numbers(self) -> bool:
        """Return whether numbers are predicted instead of classes."""
        return self.inputs.task == "regression"

    def outputs(self, x: object) -> np.ndarray:
        """Probabilities ``[n, C]``; of regression the numbers ``[n, T]`` in their own units.

        Raises:
            DataError: The inputs have another shape or type, or hold what is not a number.
        """
        if not len(x):  # type: ignore[arg-type]
            return np.zeros((0, self.inputs.classes))
        ready, task = self.prepared(x), self.inputs.objective
        said = task.restored if isinstance(task, Regression) else task.probabilities
        with torch.no_grad():
            parts: list[Tensor] = []
            for part in torch.split(ready, BATCH):
                report_progress("predicted", BATCH * len(parts), len(ready))
                parts.append(said(self.module(self.normalize(part))))
        outputs = torch.cat(parts).double()
        bad = torch.isfinite(outputs).logical_not().any(1).nonzero()
        if len(bad):
            raise DataError(
                f"The outputs of the model are not finite for {len(bad)} of {len(outputs)} inputs, the first is number "
                f"{int(bad[0])}: the run that trained it diverged, or these inputs are extreme. Train with a smaller "
                "learning rate, or leave out those inputs."
            )
        return outputs.numpy()

    def predict(self, x: object) -> list[Any]:
        """The most probable class of each input by its name; with several labels a sample, the list of those above 0.5.

        Of regression, the number in its own unit; the list of them where there are several.
        """
        return self.labels(self.outputs(x))

    def labels(self, probabilities: np.ndarray, threshold: float | None = None) -> list[Any]:
        """Names from probabilities ``[n, C]``; of regression the numbers ``[n, T]`` themselves.

        Args:
            probabilities: Outputs of the model.
            threshold: Predict the second of two classes, or a label of several, from this probability on.

        Raises:
            ConfigError: If there is a threshold, but the model has more than two classes or predicts numbers.
        """
        names = self.class_names
        if threshold is not None:
            if self.inputs.task == "multilabel":
                return [[names[k] for k in np.flatnonzero(row >= threshold)] for row in probabilities]
            if self.numbers or len(names) != 2:
                raise ConfigError("A threshold needs a model of two classes, or of several labels per sample.")
            return [names[int(p >= threshold)] for p in probabilities[:, 1]]
        if self.numbers:
            numbers: list[Any] = (probabilities[:, 0] if probabilities.shape[1] == 1 else probabilities).tolist()
            return numbers
        if self.inputs.task == "multilabel":
            return [[names[k] for k in np.flatnonzero(row > 0.5)] for row in probabilities]
        return [names[k] for k in probabilities.argmax(1)] if len(probabilities) else []

    def prepared(self, x: object) -> Tensor:
        """Inputs as the model's batches are before they are normalized."""
        shape, kind = self.inputs.shape, self.inputs.kind
        expectation = f"The model takes {'token ids' if kind == 'tokens' else 'inputs'} of shape {shape_text(shape)}"
        try:
            tensor = x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{expectation}; these cannot be read as numbers: {error}") from error
        tensor = tensor.detach().cpu()
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
        """Channels first, in the model's number of channels and size."""
        channels, height, width = self.inputs.shape
        if tensor.shape[1] not in (1, 3, channels) and tensor.shape[3] in (1, 3, channels):
            tensor = tensor.permute(0, 3, 1, 2)
        if tensor.dtype != torch.uint8:
            raise DataError(f"{told} with values from 0 to 255 in uint8, not {tensor.dtype}.")
        if tensor.shape[1] not in (1, 3, channels):
            raise DataError(f"{told}, not {shape_text(tuple(tensor.shape[1:]))}.")
        return convert_channels(resize_images(tensor, height, width), channels)

    def _tokens(self, tensor: Tensor, told: str) -> Tensor:
        """Rows of token ids, filled up or cut to the model's length."""
        (length,) = self.inputs.shape
        if tensor.dim() != 2 or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
            raise DataError(f"{told}: integers, a row for each text.")
        rows = tensor.to(torch.int64)[:, :length]
        return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=PADDING)


def shape_text(shape: tuple[int, ...]) -> str:
    """``3 x 32 x 32``."""
    return " x ".join(map(str, shape)) if shape else "one number"
