"""Layers and grouping of a model, for ``unskew models MODEL``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unskew.config.loader import experiment, set_field
from unskew.errors import ConfigError
from unskew.models.execution import Batch, FunctionalModel
from unskew.models.grouped.context import MappedModel, group_form, grouped_form_or_reason, use_grouped
from unskew.models.layer_groups import layer_groups, split_at_depth
from unskew.models.names import HUB, split_models
from unskew.models.registry import MODELS, resolve_model
from unskew.models.spec import ModelSpec
from unskew.models.user_modules import describe_error

LARGEST = 1 << 24
"""Maximum side length of an input and number of classes, to avoid running out of memory."""


def grouping_note(spec: ModelSpec) -> str:
    """Return a message on how several clients with this model are trained on a CPU."""
    grouped, why = grouped_form_or_reason(spec)
    if grouped is not None:
        return "Several clients are trained as one network."
    form = group_form(spec)
    unmapped = "" if form is None else mapping_error(spec, form)
    if form is None or unmapped:
        return f"Clients are trained one after another: {unmapped or why}."
    return f"Several clients are trained at once, but not as one network: {why}."


def mapping_error(spec: ModelSpec, form: MappedModel) -> str:
    """Return why PyTorch cannot map a gradient of the model over clients, or an empty text if it can.

    Args:
        spec: Layout of the model.
        form: Form in which several clients are trained.
    """

    def step(v: Tensor, b: Tensor, x: Tensor, key: Tensor) -> Tensor:
        model = FunctionalModel(spec, b)
        slope = model.gradient(lambda v, batch: model(v, batch.x).logits.square().mean())
        return slope(v, Batch(x, x, key, torch.tensor(0)))

    x = torch.zeros(2, 2, *spec.shape, dtype=spec.input_dtype or spec.dtype)
    v, b = (t.expand(2, -1) for t in (spec.flatten(), spec.flatten_buffers()))
    try:
        with use_grouped(spec, form):
            torch.func.vmap(step)(v, b, x, torch.arange(2))
    except Exception as error:  # a layer may raise any error
        return describe_error(error)
    return ""


def model_spec(model: str, shape: str | None, classes: int | None, sets: Sequence[str]) -> ModelSpec:
    """Build the model that ``unskew models MODEL`` shows.

    Args:
        model: Name or import path of the model.
        shape: Shape of one input; None means ``3,32,32``, or ``8`` (tokens) for ``hf:NAME``.
        classes: Number of classes; None means 10, or a language model for ``hf:NAME``.
        sets: Assignments ``model_options.NAME=VALUE`` and ``head=NAME``.

    Raises:
        ConfigError: If the model does not exist, or does not support such inputs.
    """
    values: dict[str, Any] = {"model": model}
    for assignment in sets:
        set_field(values, assignment)
    if not {"model", "model_options", "head"} >= set(values):
        raise ConfigError("unskew models supports only --set model_options.NAME=VALUE and --set head=NAME.")
    config = experiment(values)
    options = config.model_options
    if not isinstance(options, dict) or len(split_models(config.model)) > 1:
        raise ConfigError(f"unskew models shows one model, not {config.model}. Name one of them.")
    own = config.model in MODELS and MODELS[config.model].texts
    texts = own or (config.model.startswith(HUB) and (shape is None or "," not in shape))
    shape = ("8" if texts else "3,32,32") if shape is None else shape
    try:
        sides = tuple(int(side) for side in shape.split(","))
    except ValueError:
        raise ConfigError(f"--shape {shape!r} is not a shape such as 3,32,32.") from None
    if not all(1 <= side <= LARGEST for side in sides) or not 1 <= (classes or 1) <= LARGEST:
        raise ConfigError(f"--shape {shape} and --classes must be numbers from 1 to {LARGEST:,}.")
    per_token = texts and classes is None and not own
    count = classes or (1 if per_token else 10)
    task = "language" if per_token else "classification"
    module = resolve_model(config.model, sides, count, options, task)
    ids = torch.int64 if texts else None
    spec = ModelSpec(module, sides, count, config.head, input_dtype=ids, per_token=per_token)
    spec.inspect_training(torch.zeros(2, *sides, dtype=spec.input_dtype))
    return spec


def layer_rows(spec: ModelSpec, split: int | None) -> list[dict[str, Any]]:
    """Return one row per layer, in order of depth; embeddings are layer 0.

    Args:
        spec: Specification of the model.
        split: Number of layers in the body; None means all before the head.
    """
    groups = layer_groups(spec)
    body, _ = split_at_depth(groups, -1 if split is None else split)
    first = 1 - sum(group.leading for group in groups)
    return [
        {
            "layer": number,
            "name": group.name,
            "with": list(group.layers if group.name not in group.layers else group.layers[1:]),
            "parameters": group.size,
            "buffers": sum(s.stop - s.start for s in group.buffers),
            "part": "body" if number - first < len(body) else "head",
        }
        for number, group in enumerate(groups, start=first)
    ]
