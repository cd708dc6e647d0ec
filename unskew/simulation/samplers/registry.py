"""Registry of samplers, and the parser of the option ``sampling``."""

from __future__ import annotations

import dataclasses
import inspect

from unskew import plugins
from unskew.errors import ConfigError
from unskew.expressions import parse_expression
from unskew.option_parsing import build_from_options, import_own, option_defaults
from unskew.protocol.client_sampler import ClientSampler

SAMPLERS: dict[str, str] = {
    "fixed": "unskew.protocol.client_sampler:FixedSampler",
    "poisson": "unskew.simulation.samplers.poisson:PoissonSampler",
    "power-of-choice": "unskew.simulation.samplers.power_of_choice:PowerOfChoice",
    "oort": "unskew.simulation.samplers.oort:Oort",
}
"""Import paths of the samplers by name."""


def parse_sampling(text: str) -> ClientSampler:
    """Create the sampler of an expression ``NAME:VALUE,option=value``; a value without a name is the first option.

    Args:
        text: Value of the option ``sampling``.

    Raises:
        ConfigError: If there is no such sampler, or an option is not valid.

    >>> parse_sampling("power-of-choice:20")
    PowerOfChoice(candidates=20)
    """
    expression = parse_expression(text)
    name = expression.name
    plugin = None
    if name in SAMPLERS:
        cls = import_own(SAMPLERS[name])
    else:
        plugin = plugins.find_plugin(plugins.SAMPLERS, "sampling", name, SAMPLERS)
        cls = plugin.load_callable()
        if not (inspect.isclass(cls) and issubclass(cls, ClientSampler)):
            raise ConfigError(
                f"The package {plugin.package} provides {name!r} ({plugin.group}), which is not a subclass of "
                "unskew.ClientSampler."
            )
    options = dict(expression.options)
    if expression.values:
        first = next(iter(option_defaults(cls)), None)
        if first is None:
            raise ConfigError(f"The sampling {name} has no options; write sampling={name}.")
        if len(expression.values) > 1 or first in options:
            raise ConfigError(f"sampling={text} sets {first} twice, or an option without its name; write option=value.")
        options[first] = expression.values[0]
    required = next((option for option in _required_options(cls) if option not in options), None)
    if required is not None:
        raise ConfigError(f"The sampling {name} needs the option {required}; write sampling={name}:{required}=VALUE.")
    sampler: ClientSampler = build_from_options(cls, options, f"The sampling {name}", f"sampling={name}:")
    if plugin is not None:
        check_declarations(sampler, plugin)
    return sampler


def _required_options(cls: type) -> list[str]:
    """Return the names of the options without a default."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    without = dataclasses.MISSING
    return [field.name for field in fields if field.init and field.default is field.default_factory is without]


def check_declarations(sampler: ClientSampler, plugin: plugins.Plugin) -> None:
    """Validate the name of a sampler, and that its attributes and hooks fit together.

    Args:
        sampler: Sampler of a package.
        plugin: Its entry point.

    Raises:
        ConfigError: If the name is not that of the entry point, a hook is missing, or a hook is never called.
    """
    cls = type(sampler)
    where = f"{cls.__name__} of the package {plugin.package}"
    name = getattr(sampler, "name", None)
    if not isinstance(name, str) or name.lower() != plugin.name:
        raise ConfigError(
            f"{where} needs the name of its entry point, {plugin.name!r}, not {name!r}. Set name = {plugin.name!r} in the "
            "class."
        )
    if cls.draw is ClientSampler.draw:
        raise ConfigError(f"{where} is a sampler, so it must define the method 'draw'.")
    for attribute, hook in (("asks_loss", "select"), ("reads_reports", "record")):
        declared, defined = getattr(sampler, attribute), getattr(cls, hook) is not getattr(ClientSampler, hook)
        if not isinstance(declared, bool):
            raise ConfigError(f"{where}: {attribute} must be True or False, not {declared!r}.")
        if defined and not declared:
            raise ConfigError(
                f"{where} defines the method {hook!r}, which is called only with {attribute} = True. Set it, or remove the "
                "method."
            )
        if declared and not defined:
            raise ConfigError(
                f"{where} has {attribute} = True, so it must define the method {hook!r}. Define it, or remove {attribute}."
            )
