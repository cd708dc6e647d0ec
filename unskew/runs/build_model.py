"""Construction of a run's model from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unskew.config.experiment import Experiment
from unskew.data.federation import Federation
from unskew.data.normalization import Normalization
from unskew.data.packing import longest_text
from unskew.data.readers.encoders import category_counts
from unskew.engines.batches import InputNormalizer
from unskew.errors import ConfigError
from unskew.methods.registry import METHODS, REFERENCES, rule_class
from unskew.models.names import split_models
from unskew.models.registry import ModelLike as OneModel
from unskew.models.registry import resolve_model
from unskew.models.spec import ModelSpec, example_inputs
from unskew.models.user_modules import copy_module
from unskew.models.zoo.hf_wrappers import CausalLM
from unskew.protocol.rules import Method
from unskew.seeding import derive

ModelLike = OneModel | Sequence[OneModel]
"""Types of a model that is passed in Python; a list gives clients models of different architectures."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def initial_spec(config: Experiment, federation: Federation, model: ModelLike | None, method: Method) -> ModelSpec:
    """Build the model and return its layout and initial parameters, which depend on the seed only.

    If clients have models of different architectures, the layout of the first one contains those of the others.

    Args:
        config: Configuration of the run.
        federation: Data of all clients.
        model: Model, or several, that were passed in Python; None builds the configured ones.
        method: Method of the run.

    Raises:
        ConfigError: If the list of models is empty or has another length than the list of options, the method does not
            support several models, or only some of them normalize their inputs.
    """
    given = config.model if model is None else model
    models = split_models(given) if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    if not models:
        raise ConfigError("The list of models is empty. Pass one model, or a list of several.")
    if len(models) > 1:
        check_several_models(method, len(models))
    own = config.model_options
    options = [own] * len(models) if isinstance(own, dict) else own
    if len(options) != len(models):
        raise ConfigError(
            f"model_options is a list of {len(options)} for {len(models)} models. Pass as many models as the run had."
        )
    first, *others = [
        _build_spec(config, federation, entry, values, method) for entry, values in zip(models, options, strict=True)
    ]
    if any(spec.intensities != first.intensities for spec in others):
        raise ConfigError(
            "Some of the models normalize their inputs themselves and others do not. Use models of one kind."
        )
    first.others = tuple(others)
    return first


def check_several_models(method: Method, count: int) -> None:
    """Validate that clients may have models of different architectures.

    Args:
        method: Method of the run.
        count: Number of models.

    Raises:
        ConfigError: If a rule of the method does not support it.
    """
    other = next((rule.name for rule in method.rules if not rule.supports_several_models), None)
    if other is not None or method.sync is None:
        known = [name for name in (*METHODS, *REFERENCES) if rule_class(name).supports_several_models]
        raise ConfigError(
            f"{other or method.name} needs a common model, so clients cannot have {count} different ones. Methods that "
            f"exchange no part of the model support this: {', '.join(known)}. Use one of them alone, or one model."
        )


def _build_spec(
    config: Experiment, federation: Federation, model: OneModel, options: Mapping[str, Any], method: Method
) -> ModelSpec:
    """Build one model; models of one kind have the same initial parameters."""
    x = federation.test[0]

    def spec_of(module: nn.Module, head: str | None) -> ModelSpec:
        return ModelSpec(
            module,
            federation.shape,
            federation.classes,
            head,
            DTYPES[config.precision],
            torch.int64 if x.dtype == torch.int64 else None,
            autocast=config.precision == "bf16",
            per_token=federation.objective.tokens,
            per_pixel=federation.objective.pixels,
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "initial model"))
        module = resolve_model(
            model,
            federation.shape,
            federation.classes,
            options,
            federation.task,
            category_counts(federation.encoders),
        )
        module = copy_module(module)
        if config.text.pack:
            if not isinstance(module, CausalLM):
                raise ConfigError("text.pack requires a language model of transformers, hf:NAME. Remove text.pack.")
            module.separate_texts(longest_text(all_texts(federation)))
        spec = spec_of(module, config.head)
        for rule in method.client:
            adapted, head = rule.adapt(module, spec.head_name)
            if adapted is not module:
                module = adapted
                # ModelSpec rejects a head that is passed and not trained, as those of language models are.
                spec = spec_of(adapted, head if spec.head_trains or head != spec.head_name else config.head)
    normalize = InputNormalizer(federation.normalization, federation.shape, spec.dtype, torch.device("cpu"))
    spec.inspect_training(normalize(x[:2].cpu()) if len(x) > 1 else example_inputs(spec))
    return spec


def all_texts(federation: Federation) -> Iterator[Tensor]:
    """Yield the inputs of the test set, of the server and of every client.

    Args:
        federation: Data of all clients.

    Yields:
        Inputs, ``[n, ...]``.
    """
    yield federation.test[0]
    if federation.server is not None:
        yield federation.server.x
    for client in (*federation.clients, *federation.unseen):
        yield client.x
        yield client.x_test


def match_model_input_range(federation: Federation, spec: ModelSpec) -> Federation:
    """Scale images to intensities from 0 to 1 if the model normalizes its inputs itself.

    Args:
        federation: Data of all clients.
        spec: Layout of the model.

    Returns:
        The federation with another normalization, or ``federation`` unchanged.
    """
    if not spec.intensities:
        return federation
    normalization, x = federation.normalization, federation.test[0]
    scale = normalization.scale if normalization is not None else 1 / 255 if x.dtype == torch.uint8 else 1.0
    channels = x.shape[1]
    return replace(federation, normalization=Normalization((0.0,) * channels, (1.0,) * channels, scale))
