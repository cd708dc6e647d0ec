"""Registry of generators, such as ``ddpm``, ``ddpm-small;epochs=50`` or ``package.module:factory;option=value``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from unskew.errors import ConfigError, unknown_name
from unskew.expressions import parse_expression
from unskew.generators.base import GeneratorJob, ImageGenerator
from unskew.option_parsing import build_from_options, import_callable, import_own

Factory = Callable[[GeneratorJob], ImageGenerator]

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
"""Maps each name to a class and the options that differ from its defaults."""


def generator_factory(spec: str, epochs: int | None = None) -> Factory:
    """Return the factory of a client's generator.

    Args:
        spec: Name or import path, followed by options after semicolons; items of a list are separated by slashes
            (``attention=16/8``).
        epochs: Number of training epochs; None uses the generator's default.

    Raises:
        ConfigError: If there is no such generator, or it does not have such options.

    >>> generator_factory("vae-small;beta=2", epochs=5)
    VAE(epochs=5, batch=32, lr=0.002, beta=2.0, latent=10, channels=32, hidden=128)
    """
    name, options = _parts(spec)
    if epochs is not None:
        if "epochs" in options:
            raise ConfigError(f"generator={spec!r} and the method's option epochs both set epochs. Remove one of them.")
        options["epochs"] = epochs
    if ":" in name:
        own = import_callable(name, f"generator={name!r}")
        return partial(own, **options) if options else cast(Factory, own)
    if name not in GENERATORS:
        raise ConfigError(unknown_name("generator", name, GENERATORS) + " Or use your own as package.module:factory.")
    path, usual = GENERATORS[name]
    return cast(
        Factory,
        build_from_options(import_own(path), {**usual, **options}, f"the generator {name}", f"generator={name};"),
    )


def normalize_expression(spec: str, epochs: int | None = None) -> tuple[str, int | None]:
    """Normalize a generator expression, so that equal generators have equal expressions.

    Options are sorted, and ``epochs`` is returned separately.

    Args:
        spec: Generator expression.
        epochs: Epochs from the method; None uses those of the expression.

    >>> normalize_expression("ddpm; steps=9;epochs=5;batch=4;"), normalize_expression("vae", 5)
    (('ddpm;batch=4;steps=9', 5), ('vae', 5))
    """
    name, options = _parts(spec)
    if epochs is None and options.get("epochs", "").isdecimal():
        epochs = int(options.pop("epochs"))
    return ";".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))]), epochs


def _parts(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a generator expression into name and options."""
    expression = parse_expression(spec, ";", ";")
    if expression.values:
        raise ConfigError(
            f"{expression.values[0]!r} in generator={spec!r} is not an option; write {expression.name};option=value."
        )
    return expression.name, dict(expression.options)
