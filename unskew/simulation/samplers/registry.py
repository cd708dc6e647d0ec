"""Registry of samplers, and the parser of the option ``sampling``."""

from __future__ import annotations

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
    sampler: ClientSampler = build_from_options(cls, options, f"The sampling {name}", f"sampling={name}:")
    return sampler
