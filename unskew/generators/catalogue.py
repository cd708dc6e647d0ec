"""Generators by name: ``ddpm``, ``ddpm-small;epochs=50``, ``package.module:factory;option=value``."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import pydantic

from unskew.errors import ConfigError, plain, unknown
from unskew.generators.job import ImageGenerator, Job

Factory = Callable[[Job], ImageGenerator]

GENERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddpm": ("unskew.generators.trained.ddpm:DDPM", {}),
    "ddpm-small": (
        "unskew.generators.trained.ddpm:DDPM",
        {
            "epochs": 300,
            "batch": 64,
            "lr": 1e-3,
            "steps": 200,
            "sampling_steps": 50,
            "ema": 0.99,
            "width": 16,
            "blocks": 1,
            "attention": (8,),
            "dropout": 0.0,
        },
    ),
    "vae": ("unskew.generators.trained.vae:VAE", {}),
    "vae-small": (
        "unskew.generators.trained.vae:VAE",
        {"epochs": 150, "batch": 32, "lr": 2e-3, "beta": 1.0, "hidden": 128},
    ),
    "gan": ("unskew.generators.trained.gan:GAN", {}),
    "gan-small": ("unskew.generators.trained.gan:GAN", {"epochs": 200, "batch": 32, "width": 16, "noise": 32}),
}
"""Class and the options that differ from its defaults."""


def factory(spec: str, epochs: int | None = None) -> Factory:
    """What makes a client's generator.

    Args:
        spec: A name or an import path, then options after semicolons; a list such as ``attention=16/8`` has slashes.
        epochs: Of the training, if not the generator's own.

    Raises:
        ConfigError: There is no such generator, or it does not take such options.

    >>> factory("vae-small;beta=2", epochs=5)
    VAE(epochs=5, batch=32, lr=0.002, beta=2.0, latent=10, channels=32, hidden=128)
    """
    name, *rest = (piece.strip() for piece in spec.split(";"))
    given: dict[str, Any] = {}
    for item in filter(None, rest):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"{item!r} in generator={spec!r} is not an option; write {name};option=value.")
        given[key.strip()] = value.strip()
    if epochs is not None:
        if "epochs" in given:
            raise ConfigError(f"generator={spec!r} gives epochs, and the method's option epochs does, too.")
        given["epochs"] = epochs
    if ":" in name:
        made = imported(name, "generator")
        return partial(made, **given) if given else typing.cast(Factory, made)
    if name not in GENERATORS:
        raise ConfigError(unknown("generator", name, GENERATORS) + " Or give your own as package.module:factory.")
    path, options = GENERATORS[name]
    cls: Any = imported(path, "generator")
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {field.name for field in dataclasses.fields(cls)}
    checked = dict(options)
    for key, value in given.items():
        if key not in known:
            raise ConfigError(unknown(f"option of the generator {name}", key, known))
        several = isinstance(value, str) and isinstance(getattr(cls, key), tuple)
        try:
            checked[key] = pydantic.TypeAdapter(hints[key]).validate_python(value.split("/") if several else value)
        except pydantic.ValidationError as error:
            reason = plain(error.errors()[0]["msg"])
            raise ConfigError(f"generator={name};{key}={given[key]} is not valid: {reason}.") from error
    return typing.cast(Factory, cls(**checked))


def spelled(spec: str, epochs: int | None = None) -> tuple[str, int | None]:
    """The same generator in one spelling, so that equal ones are known as equal: options sorted, epochs apart.

    >>> spelled("ddpm; steps=9;epochs=5;batch=4;"), spelled("vae", 5)
    (('ddpm;batch=4;steps=9', 5), ('vae', 5))
    """
    name, *rest = (piece.strip() for piece in spec.split(";"))
    options = {key.strip(): value.strip() for key, _, value in (item.partition("=") for item in rest if item)}
    if epochs is None and options.get("epochs", "").isdecimal():
        epochs = int(options.pop("epochs"))
    return ";".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))]), epochs


def imported(path: str, what: str) -> Callable[..., Any]:
    """The callable at ``package.module:name``.

    Raises:
        ConfigError: There is none.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}={path!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigError(f"{what}={path!r} is not a function or a class.")
    return typing.cast(Callable[..., Any], found)
