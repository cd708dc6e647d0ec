"""Trained model with its preprocessing as one module, and export to files that need no unskew: torch, ONNX, TorchScript."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unskew.data.packing import SEPARATOR
from unskew.engines.batches import InputNormalizer
from unskew.errors import ConfigError, UnskewError
from unskew.filesystem import write_atomic
from unskew.runs.input_spec import InputColumn, InputSpec
from unskew.runs.predictor import PADDING
from unskew.seeding import generator
from unskew.serving.load import OpenedRun

MISSING = "Exporting to ONNX needs more packages. Install them with: pip install 'unskew[export]'."
TOLERANCE = 1e-5
"""Largest accepted difference between the outputs of the exported and the original model."""
FEWEST = 2
"""Number of token ids that every text model knows."""
TERMINAL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colors and other control sequences of terminals."""
SIZES = (1, 2, 5)
"""Batch sizes for which both models are compared, because the batch dimension is dynamic."""


class PortableModel(nn.Module):
    """Module that maps raw inputs (pixels from 0 to 255, columns, token ids) to probabilities ``[B, C]``, or of each pixel.

    For tables of mixed columns, a category is the index of its value in ``file_metadata``, from 1, and 0 for unknown
    values; a missing number is NaN. The inputs are float64 if float32 would lose digits of a column. Regression models return
    numbers ``[B, T]`` in their original units.

    Args:
        opened: Run with its model.
    """

    factor: Tensor | None
    offset: Tensor | None
    means: Tensor | None
    column_offsets: Tensor | None

    def __init__(self, opened: OpenedRun):
        super().__init__()
        inputs, shape = opened.inputs, opened.inputs.shape
        self.module, self.dtype = opened.module.eval(), opened.spec.dtype
        task = inputs.objective  # probabilities keep the precision of the model, as other programs expect
        self.said = task.probabilities if task.output_kind == "probabilities" else task.outputs
        self.tokens = inputs.kind == "tokens"
        normalize = InputNormalizer(inputs.known, shape, opened.spec.dtype, torch.device("cpu"))
        factor, offset = (None, None) if normalize.factor is None else (normalize.factor, normalize.offset)
        if factor is not None and offset is not None:  # for images, one number per channel
            sides = (shape[0], *(1,) * (len(shape) - 1)) if len(shape) > 2 else shape
            factor, offset = (part[: int(np.prod(sides))].reshape(sides) for part in (factor, offset))
        self.register_buffer("factor", factor)
        self.register_buffer("offset", offset)
        columns = inputs.columns
        kind = column_dtype(inputs)
        means, offsets = (
            torch.tensor([getattr(encoder, name) for encoder in inputs.encoders], dtype=kind) if columns else None
            for name in ("mean", "offset")
        )
        self.register_buffer("means", means)
        self.register_buffer("column_offsets", offsets if kind == torch.float64 else None)
        self.marked = [index for index, column in enumerate(columns) if column.marks]

    def forward(self, x: Tensor) -> Tensor:
        """Return the probabilities of the classes, or the predicted numbers."""
        if not self.tokens:
            if self.means is not None:
                missing = torch.isnan(x)
                x = torch.where(missing, self.means, x)
                if self.column_offsets is not None:
                    x = x - self.column_offsets
                if self.marked:
                    x = torch.cat([x, missing[:, self.marked].to(x.dtype)], 1)
            x = x.to(self.dtype)
            if self.factor is not None and self.offset is not None:
                x = x * self.factor + self.offset
        return self.said(self.module(x))


def example_inputs(opened: OpenedRun, count: int) -> Tensor:
    """Generate random inputs that resemble real ones.

    Args:
        opened: Run with its model.
        count: Number of samples.
    """
    inputs = opened.inputs
    draws, shape = generator(0, "export", count), (count, *inputs.shape)
    if inputs.kind == "uint8":
        return torch.randint(0, 256, shape, generator=draws, dtype=torch.uint8)
    if inputs.kind == "tokens":
        ids = torch.randint(0, getattr(opened.module, "tokens", None) or FEWEST, shape, generator=draws)
        ends = torch.randint(1, shape[1] + 1, (count, 1), generator=draws)
        if getattr(opened.module, "packed", False):  # a row may be longer than the model has positions
            net: Any = opened.module.net
            longest: int = getattr(net.config, "max_position_embeddings", shape[1])
            ids[:, longest :: longest + 1] = SEPARATOR
        return ids.masked_fill(torch.arange(shape[1]) >= ends, PADDING)
    if inputs.columns:
        return torch.stack([_column(column, count, draws) for column in inputs.columns], 1).to(column_dtype(inputs))
    x, known = torch.randn(shape, generator=draws), inputs.normalization
    if known is None:
        return x
    sides = (-1, *(1,) * (len(shape) - 2))
    mean, std = (torch.tensor(values).reshape(sides) / known.scale for values in (known.mean, known.std))
    return x * std + mean


def _column(one: InputColumn, count: int, draws: torch.Generator) -> Tensor:
    if one.kind == "category":
        return torch.randint(0, len(one.values) + 1, (count,), generator=draws).float()
    x = torch.randn(count, generator=draws).double() * one.std + one.mean
    return x.masked_fill(torch.rand(count, generator=draws) < 0.3, torch.nan) if one.fills else x


def column_dtype(inputs: InputSpec) -> torch.dtype:
    """Return the type of the values of a table: float64 if float32 would lose digits of a column, otherwise float32."""
    return torch.float64 if any(encoder.offset for encoder in inputs.encoders) else torch.float32


def input_dtype(inputs: InputSpec) -> str:
    """Return the name of the data type of the inputs, such as ``float32``."""
    kinds = {"uint8": torch.uint8, "tokens": torch.int64, "float": column_dtype(inputs)}
    return str(kinds[inputs.kind]).removeprefix("torch.")


def input_shape(inputs: InputSpec) -> tuple[int, ...]:
    """Return the shape of one input; for tables without the indicators of missing values."""
    return (len(inputs.columns),) if inputs.columns else inputs.shape


def file_metadata(opened: OpenedRun) -> dict[str, str]:
    """Return the metadata that the exported file contains next to the weights."""
    inputs = opened.inputs
    about: dict[str, Any] = {"shape": list(input_shape(inputs)), "kind": inputs.kind, "task": inputs.task}
    about["dtype"] = input_dtype(inputs)
    about["outputs"] = inputs.objective.output_kind
    about |= {} if inputs.objective.tokens else {"class_names": inputs.names}
    about |= {} if inputs.positive_class is None else {"positive": inputs.positive_class}
    about |= {"class_weights": list(inputs.class_weights)} if inputs.class_weights else {}
    about |= {"values": list(inputs.constants["values"])} if "values" in inputs.constants else {}
    about |= {"features": list(inputs.features)} if inputs.features else {}
    columns = [{"name": column.name, "kind": column.kind, "values": list(column.values)} for column in inputs.columns]
    about |= {"columns": columns} if columns else {}
    about |= {"text": list(inputs.text), "tokenizer": inputs.tokenizer, "padding": PADDING} if inputs.text else {}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}


def write_model(opened: OpenedRun, kind: str, file: Path) -> float:
    """Export the model as ``torch``, ``onnx`` or ``torchscript``, and compare its outputs with the original's.

    Args:
        opened: Run with its model.
        kind: ``torch``, ``onnx`` or ``torchscript``.
        file: File to write.

    Returns:
        The largest difference of a probability, or of a number in standard deviations.

    Raises:
        ConfigError: If the export fails, the outputs differ, or a package is missing.
    """
    if kind == "onnx" and not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        raise ConfigError(MISSING)
    portable = PortableModel(opened).eval()
    with torch.no_grad(), _quiet(), _as_sentence(kind):
        ask = WRITERS[kind](portable, example_inputs(opened, 2), file_metadata(opened), file)
        if not bool(torch.isfinite(portable(example_inputs(opened, max(SIZES)))).all()):
            raise ConfigError(
                "The outputs of the model are not finite: the run diverged. Train with a smaller learning rate."
            )
        difference = max(_apart(portable(x), ask(x)) for x in (example_inputs(opened, size) for size in SIZES))
    task = opened.inputs.objective
    difference /= max(task.std, default=1.0)
    if not difference <= TOLERANCE:
        file.unlink(missing_ok=True)
        raise ConfigError(
            f"The exported {kind} model's {task.output_kind} differ from the original's by up to {difference:.2g}, "
            "so the file was deleted. Try another format."
        )
    return difference


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.shape == other.shape else float("inf")


Ask = Callable[[Tensor], Tensor]


def _torch(portable: PortableModel, x: Tensor, about: dict[str, str], file: Path) -> Ask:
    program = torch.export.export(portable, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    data = io.BytesIO()
    torch.export.save(program, data, extra_files={"about.json": json.dumps(about)})
    write_atomic(file, data.getvalue())
    module: Any = torch.export.load(file).module()
    return lambda y: module(y)


def _torchscript(portable: PortableModel, x: Tensor, about: dict[str, str], file: Path) -> Ask:
    jit: Any = torch.jit
    data = io.BytesIO()  # if torch wrote to a file directly, a full disk would abort the process
    jit.save(jit.trace(portable, x), data, _extra_files={"about.json": json.dumps(about)})
    write_atomic(file, data.getvalue())
    module = jit.load(file)
    return lambda y: module(y)


def _onnx(portable: PortableModel, x: Tensor, about: dict[str, str], file: Path) -> Ask:
    import onnx
    import onnxruntime

    program: Any = torch.onnx.export(
        portable,
        (x,),
        dynamo=True,
        verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        input_names=["inputs"],
        output_names=[about["outputs"]],
    )
    model = program.model_proto
    onnx.helper.set_model_props(model, about)
    write_atomic(file, model.SerializeToString())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda y: torch.from_numpy(session.run(None, {"inputs": y.numpy()})[0])


WRITERS: dict[str, Callable[[PortableModel, Tensor, dict[str, str], Path], Ask]] = {
    "torch": _torch,
    "onnx": _onnx,
    "torchscript": _torchscript,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that silences PyTorch's export messages."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _as_sentence(kind: str) -> Iterator[None]:
    """Context manager that converts errors of the export, which may come from the user's model, to ``ConfigError``."""
    try:
        yield
    except (UnskewError, MemoryError, OSError):
        raise
    except Exception as error:
        lines = TERMINAL_CODES.sub("", str(error)).strip().splitlines()
        reason = next(iter(lines), type(error).__name__).rstrip(".")
        raise ConfigError(f"The model cannot be exported as {kind}: {reason[:200]}. Try another format.") from error
