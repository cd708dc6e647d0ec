"""Names of engines: built-in engines, and engines of plugins with their options."""

from __future__ import annotations

from unskew.errors import ConfigError
from unskew.expressions import parse_expression
from unskew.plugins import ENGINES, find_plugin

BUILT_IN = ("auto", "inline", "processes", "vectorized")


def parse_engine(engine: str) -> tuple[str, dict[str, str]]:
    """Parse an engine expression ``name:key=value,key=value`` into its name and options.

    Args:
        engine: Engine expression from the configuration.

    Raises:
        ConfigError: If the engine does not exist, or takes no options here.
    """
    expression = parse_expression(engine)
    name, options = expression.name, expression.with_flags(())
    if name not in BUILT_IN:
        name = find_plugin(ENGINES, "engine", name, BUILT_IN).name
    if options and name in (*BUILT_IN, "ray"):
        remedy = "Set them in the section ray" if name == "ray" else "Remove them"
        raise ConfigError(f"The engine {name!r} takes no options in its name. {remedy}.")
    return name, options
