"""Surveys: sums of a rule's function over the training or validation samples of a client, in eval mode."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from unskew.data.federation import ClientData, take_rows
from unskew.engines.batches import InputNormalizer
from unskew.errors import ConfigError
from unskew.models.execution import Batch, BoundModel
from unskew.models.spec import ModelOutput
from unskew.protocol.context import Context
from unskew.protocol.messages import Tensors
from unskew.protocol.rules import ClientRule, SurveyTime, survey_times

CHUNK = 500
"""Samples of one forward pass; the order of summation, and so the last bits of a sum, depend on it."""


def forward(model: BoundModel, b: Tensor, v: Tensor, x: Tensor) -> ModelOutput:
    """Compute outputs in eval mode.

    Args:
        model: Model of the engine.
        b: Buffers, ``[m]``.
        v: Parameters, ``[d]``.
        x: Normalized inputs ``[n, ...]``.
    """
    output = model.predict(v, b)(x)
    return ModelOutput(output.logits, output.features.to(v.dtype))


def take_survey(
    rule: ClientRule,
    ctx: Context,
    model: BoundModel,
    normalize: InputNormalizer,
    client: ClientData,
    v: Tensor,
    b: Tensor,
    held: Tensor | None = None,
) -> Tensors:
    """Return the sums of a rule's ``survey`` over all training samples of a client, or its validation samples.

    Args:
        rule: The rule.
        ctx: Its context at the client.
        model: Model of the engine; its parameters, buffers and mode are changed.
        normalize: Converts stored inputs to model inputs.
        client: The client's data.
        v: Surveyed parameters, ``[d]``.
        b: Surveyed buffers, ``[m]``.
        held: Indices of the client's validation samples, if it has any.

    Raises:
        ConfigError: If the rule does not return the same tensors for every chunk.
    """
    total: Tensors = {}
    buffers = b.clone()  # ``b`` may be a view of the model's buffers
    rows = held if held is not None and rule.validation else torch.arange(client.num_samples)
    for index in torch.split(rows.to(client.y.device), CHUNK):
        x, y = normalize(take_rows(client.x, index)), client.y[index].to(v.device)
        batch = Batch(x, y, ctx.key, torch.tensor(0))
        sums = rule.survey(ctx, v, partial(forward, model, buffers), batch)
        if total and {n: t.shape for n, t in total.items()} != {n: t.shape for n, t in sums.items()}:
            raise ConfigError(f"{rule.name}.survey must return tensors of the same names and shapes for every batch.")
        total = {name: total[name] + tensor if total else tensor for name, tensor in sums.items()}
    return total


def take_surveys(
    when: SurveyTime,
    rules: tuple[ClientRule, ...],
    ctxs: list[Context],
    model: BoundModel,
    normalize: InputNormalizer,
    client: ClientData,
    v: Tensor,
    b: Tensor,
    held: Tensor | None = None,
) -> dict[str, Tensors]:
    """Return the sums of all rules that survey a model at this time, by rule.

    Args:
        when: Time of the survey.
        rules: Client rules of the run.
        ctxs: Context of each rule.
        model: Model of the engine; its parameters, buffers and mode are changed.
        normalize: Converts stored inputs to model inputs.
        client: The client's data.
        v: Surveyed parameters, ``[d]``.
        b: Surveyed buffers, ``[m]``.
        held: Indices of the client's validation samples, if it has any.
    """
    return {
        rule.name: take_survey(rule, ctx, model, normalize, client, v, b, held)
        for rule, ctx in zip(rules, ctxs, strict=True)
        if when in survey_times(rule)
    }
